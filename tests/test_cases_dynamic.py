"""Rows that change, on one rank: cases 26, 28, 29 and 30."""

from __future__ import annotations

import dgl.graphbolt as gb
import numpy as np
import pytest
import torch

import featsync
from featsync.errors import ConfigError
from featsync.mapped import open_npy
from featsync.workers import WORKERS
from support.graphs import HandMade, planned, planned_loader, ring_batches, seeds_of, store_of
from support.tensors import same_bits

pytestmark = pytest.mark.dgl

WINDOWS = [1, 2, 4, 8]
NUM_BATCHES = 10


def ring_feature(**options):
    feature = featsync.DynamicFeature(torch.zeros(20, 1), **options)
    return feature, store_of({("node", None, "x"): feature})


def inputs_of():
    """Input nodes of each minibatch, as they will be sampled."""
    return [minibatch.input_nodes for minibatch in ring_batches(NUM_BATCHES)]


def rows_written(which, inputs, i):
    """After minibatch i: all rows, its own, or only what the next one needs."""
    if which == "all":
        return None
    wanted = inputs[i] if which == "own" else inputs[(i + 1) % NUM_BATCHES]
    return wanted


def update_each(loader, feature, which, inputs, start=0, names_minibatch=False):
    """One epoch in which minibatch i has to read what was written before, and i + 1 is written."""
    table = feature.read()
    count = 0
    for i, minibatch in enumerate(loader):
        assert same_bits(minibatch.input_nodes, inputs[i])
        found = minibatch.node_features["x"]
        assert same_bits(found, table[minibatch.input_nodes]), f"minibatch {i}"
        if which != "own" and i:
            assert found.eq(start + i).all()
        rows = rows_written(which, inputs, i)
        table = table.clone()
        table[slice(None) if rows is None else rows] = start + i + 1.0
        value = torch.full((20 if rows is None else len(rows), 1), start + i + 1.0)
        feature.update(value, rows, minibatch=minibatch if names_minibatch else None)
        count += 1
    assert count == NUM_BATCHES
    assert same_bits(feature.read(), table)


@pytest.mark.parametrize("which", ["all", "own", "next"])
@pytest.mark.parametrize("lookahead", WINDOWS)
@pytest.mark.parametrize("worker", WORKERS)
def test_minibatch_i_reads_what_was_written_before_it(worker, lookahead, which):
    """Case 26: two epochs, of the pipe and of a stock loader; by name of the minibatch or not."""
    feature, store = ring_feature()
    inputs = inputs_of()
    loader = planned_loader(
        ring_batches(NUM_BATCHES), store, ["x"], lookahead=lookahead, worker=worker
    )
    for epoch in range(2):
        update_each(loader, feature, which, inputs, 10 * epoch, names_minibatch=epoch == 1)
    pipe = planned(ring_batches(NUM_BATCHES), store, ["x"], lookahead=lookahead, worker=worker)
    update_each(pipe, feature, which, inputs, 20)


@pytest.mark.parametrize(
    ("lookahead", "which"), [(1, "all"), (2, "own"), (4, "next"), (8, "all"), (8, "own")]
)
def test_minibatches_of_two_loader_workers_read_what_was_written_before(lookahead, which):
    """Case 26."""
    feature, store = ring_feature()
    loader = planned_loader(
        ring_batches(NUM_BATCHES), store, ["x"], num_workers=2, lookahead=lookahead
    )
    update_each(loader, feature, which, inputs_of())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("names_minibatch", [False, True])
@pytest.mark.parametrize(("lookahead", "num_batches"), [(1, 10), (2, 2), (4, 4), (8, 10)])
def test_copy_to_behind_the_stage_is_refused_at_the_first_update(
    lookahead, num_batches, names_minibatch, num_workers
):
    """Case 26: it reads ahead on a thread of its own, maybe the whole epoch."""
    feature, store = ring_feature()
    pipe = planned(ring_batches(num_batches), store, ["x"], lookahead=lookahead)
    loader = gb.DataLoader(pipe.copy_to(torch.device("cpu")), num_workers=num_workers)
    count = 0
    for minibatch in loader:
        assert minibatch.node_features["x"].eq(0).all()
        named = minibatch if names_minibatch else None
        count += 1
        if count < num_batches:
            with pytest.raises(ConfigError, match=r"reads ahead|no loop .* is under way"):
                feature.update(torch.ones(20, 1), minibatch=named)
            assert feature.read().eq(0).all()
    assert count == num_batches
    # After the loop nothing can come late.
    feature.update(torch.ones(20, 1))
    assert feature.read().eq(1).all()


def test_copy_to_before_the_stage_is_fine():
    """Case 26: what the refusal says to do."""
    feature, store = ring_feature()
    source = ring_batches(NUM_BATCHES).copy_to(torch.device("cpu"))
    update_each(planned(source, store, ["x"], device="cpu"), feature, "all", inputs_of())


def one_ahead(loader):
    """As Lightning's fetcher: asks for the next minibatch before it gives one."""
    iterator = iter(loader)
    last = next(iterator)
    for minibatch in iterator:
        yield last
        last = minibatch
    yield last


def test_updates_for_a_minibatch_that_is_not_the_last_one_are_refused():
    """Case 26: a consumer that reads ahead on the same thread."""
    feature, store = ring_feature()
    loader = planned_loader(ring_batches(NUM_BATCHES), store, ["x"])
    refused = 0
    for minibatch in one_ahead(loader):
        if refused < NUM_BATCHES - 1:
            with pytest.raises(ConfigError, match=r"not the last one delivered.*would come late"):
                feature.update(torch.ones(20, 1), minibatch=minibatch)
            refused += 1
            assert feature.read().eq(0).all()
    assert refused == NUM_BATCHES - 1
    assert feature.read().eq(0).all()


@pytest.mark.parametrize(("merge", "wanted"), [("last", 2.0), ("sum", -7.0), ("mean", 1.5)])
@pytest.mark.parametrize("in_two_calls", [False, True])
def test_an_id_named_twice_is_merged(merge, wanted, in_two_calls):
    """Case 28: the row is 10 at the start of the step."""
    feature = featsync.DynamicFeature(torch.full((5, 1), 10.0), merge)
    store = store_of({("node", None, "x"): feature})
    ids, values = torch.tensor([3, 3]), torch.tensor([[1.0], [2.0]])
    for minibatch in planned_loader(HandMade([torch.arange(5)] * 2), store, ["x"]):
        if minibatch.node_features["x"][3] != 10:
            break
        for part in ((0, 1), (1, 2)) if in_two_calls else ((0, 2),):
            feature.update(values[slice(*part)], ids[slice(*part)])
        assert feature.read(ids).eq(10).all()  # inside a step reads show its start
    assert feature.read().flatten().tolist() == [10, 10, 10, wanted, 10]


@pytest.mark.parametrize("merge", ["last", "sum", "mean"])
def test_a_whole_table_is_updated_and_another_shape_is_refused(merge):
    """Case 29: by the stock call of the feature store, in a loop and outside."""
    feature = featsync.DynamicFeature(torch.zeros(20, 1), merge)
    store = store_of({("node", None, "x"): feature})
    value = torch.randn(20, 1)
    store.update("node", None, "x", value)
    assert same_bits(feature.read(), value)
    for minibatch in planned_loader(ring_batches(3), store, ["x"]):
        assert same_bits(minibatch.node_features["x"], value[minibatch.input_nodes])
        for shape in ((20,), (20, 2), (21, 1), (19, 1), (1, 1)):
            with pytest.raises(ConfigError, match=r"value is .* where \(20, 1\) .* is allowed"):
                store.update("node", None, "x", torch.ones(shape))
        value = value + 1
        store.update("node", None, "x", value)
    assert same_bits(feature.read(), value)
    with pytest.raises(ConfigError, match=r"value is \(21, 1\)"):
        store.update("node", None, "x", torch.ones(21, 1))
    assert same_bits(feature.read(), value)
    assert store.size("node", None, "x") == torch.Size([1])


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_a_mapped_file_is_unchanged_unless_flushed(tmp_path, mode):
    """Case 30: also one that could be written."""
    path = tmp_path / "x.npy"
    rows = np.arange(60, dtype=np.float32).reshape(20, 3)
    np.save(path, rows)
    before = path.read_bytes()
    # A private map (c) is no file's any more.
    table = open_npy(path) if mode == "r" else torch.from_numpy(np.load(path, mmap_mode=mode))
    feature = featsync.DynamicFeature(table)
    store = store_of({("node", None, "x"): feature})
    for minibatch in planned_loader(ring_batches(3), store, ["x"]):
        feature.update(minibatch.node_features["x"] + 1, minibatch.input_nodes)
    feature.update(torch.full((1, 3), 9.0), torch.tensor([5]))
    assert path.read_bytes() == before
    assert same_bits(table, torch.from_numpy(rows))
    if mode == "c":
        with pytest.raises(ConfigError, match=r"not mapped from a whole \.npy file"):
            feature.flush()
        assert path.read_bytes() == before
        return
    feature.flush()
    assert same_bits(torch.from_numpy(np.load(path)), feature.read())
    assert same_bits(table, torch.from_numpy(rows))  # the map shows what it was made of


def test_seeds_come_in_their_order_whatever_is_written():
    """Case 26: the source is pulled as without updates."""
    feature, store = ring_feature()
    plain = [seeds_of(minibatch) for minibatch in ring_batches(NUM_BATCHES)]
    found = []
    for minibatch in planned_loader(ring_batches(NUM_BATCHES), store, ["x"], lookahead=8):
        feature.update(torch.ones(20, 1))
        found.append(seeds_of(minibatch))
    assert found == plain
