"""Facts about GraphBolt 2.1 that featsync leans on: they fail here first when DGL changes."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from pathlib import Path

import dgl.graphbolt as gb
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.graph import traverse_dps

from support.graphs import (
    HETERO_NODES,
    Counted,
    HandMade,
    end_loader_workers,
    hetero3,
    hetero_store,
    ring20,
    ring_batches,
    ring_store,
    seed_batches,
    seeds_of,
    stock_loader,
)

pytestmark = pytest.mark.dgl


@pytest.fixture(autouse=True)
def no_worker_is_left():
    yield
    end_loader_workers()


def note_worker(minibatch):
    minibatch.sampled_in = os.getpid()
    minibatch.is_in_worker = get_worker_info() is not None
    return minibatch


def stages(pipe):
    """All stages of a pipe."""
    found = []
    levels = [traverse_dps(pipe)]
    while levels:
        for stage, above in levels.pop().values():
            found.append(stage)
            levels.append(above)
    return found


# The worker cut


class OwnFetcher(gb.FeatureFetcher):
    """A subclass of the marker."""


@pytest.mark.parametrize(("fetcher", "is_cut"), [(gb.FeatureFetcher, True), (OwnFetcher, False)])
def test_the_worker_cut_is_found_by_exact_class(fetcher, is_cut):
    source = ring_batches(4).transform(note_worker)
    loader = gb.DataLoader(fetcher(source, ring_store(), ["x"]), num_workers=2)

    minibatches = list(loader)

    assert {minibatch.is_in_worker for minibatch in minibatches} == {is_cut}
    assert (os.getpid() in {minibatch.sampled_in for minibatch in minibatches}) != is_cut


def test_a_fetcher_without_keys_is_a_cut_and_reads_nothing():
    class Untouchable:
        def read(self, *_):
            raise AssertionError("read")

    source = ring_batches(4).transform(note_worker)
    loader = gb.DataLoader(source.fetch_feature(Untouchable()), num_workers=2)

    for minibatch in loader:
        assert minibatch.is_in_worker
        assert minibatch.node_features == {}
        assert minibatch.edge_features == [{}, {}]


def test_a_stage_behind_the_cut_runs_in_the_main_process():
    pipe = ring_batches(4).fetch_feature(ring_store()).transform(note_worker)

    for minibatch in gb.DataLoader(pipe, num_workers=2):
        assert minibatch.sampled_in == os.getpid()
        assert not minibatch.is_in_worker


def test_two_cuts_nest_workers_and_fail():
    pipe = ring_batches(4).fetch_feature(ring_store(), ["x"]).fetch_feature(ring_store(), ["x"])

    with pytest.raises(AssertionError, match="daemonic processes"):
        list(gb.DataLoader(pipe, num_workers=2))


def test_a_loader_is_a_torch_loader_of_its_pipe_and_takes_any_stage():
    pipe = ring_batches(4).fetch_feature(ring_store(), ["x"])
    loader = gb.DataLoader(pipe)

    assert isinstance(loader, torch.utils.data.DataLoader)
    assert pipe in stages(loader.dataset)
    assert isinstance(pipe, IterDataPipe)


def test_a_plain_item_sampler_is_given_a_filter_that_splits_by_rank(monkeypatch):
    plain = gb.DataLoader(ring_batches(4).fetch_feature(ring_store()))
    items = gb.ItemSet(torch.arange(8), names="seed_nodes")
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    split = gb.DistributedItemSampler(items, batch_size=2)

    for loader, is_filtered in ((plain, True), (gb.DataLoader(split), False)):
        names = {type(stage).__name__ for stage in stages(loader.dataset)}
        assert ("ShardingFilterIterDataPipe" in names) == is_filtered


def test_two_pipes_of_one_sampler_cannot_both_get_loaders_that_run():
    """Why every loader here gets a pipe of its own: the first loader rewrote the sampler's."""
    sampled = ring_batches(4)
    first = gb.DataLoader(sampled.fetch_feature(ring_store()))
    second = gb.DataLoader(sampled.fetch_feature(ring_store()))

    with pytest.raises(RuntimeError, match="Sharding twice"):
        list(second)
    assert first is not second


# Feature stages


def test_a_second_fetcher_throws_the_first_ones_features_away():
    pipe = (
        ring_batches(4).fetch_feature(ring_store(), ["x"]).fetch_feature(ring_store(), None, ["w"])
    )

    for minibatch in gb.DataLoader(pipe):
        assert minibatch.node_features == {}
        assert [set(layer) for layer in minibatch.edge_features] == [{"w"}, {"w"}]


def test_the_fetcher_sets_features_through_the_minibatchs_own_methods():
    """By which `SyncedMiniBatch` takes the union."""

    class Watched(gb.MiniBatch):
        calls = 0

        def set_node_features(self, node_features):
            Watched.calls += 1
            super().set_node_features(node_features)

        def set_edge_features(self, edge_features):
            Watched.calls += 1
            super().set_edge_features(edge_features)

    def watch(minibatch):
        minibatch.__class__ = Watched
        return minibatch

    list(ring_batches(3).transform(watch).fetch_feature(ring_store(), ["x"]))

    assert Watched.calls == 6


def test_a_type_that_is_never_a_source_is_a_key_error_in_stock():
    seeds = seed_batches({"item": torch.tensor([0, 1])}).sample_neighbor(hetero3(), [2])

    with pytest.raises(KeyError, match="item"):
        list(stock_loader(seeds, hetero_store(), HETERO_NODES))


def test_edges_without_ids_give_nothing_and_no_word_in_stock():
    source = ring_batches(2, graph=ring20(edge_ids=False))

    for minibatch in stock_loader(source, ring_store(), None, ["w"]):
        assert minibatch.edge_ids(0) is None
        assert minibatch.edge_features == [{}, {}]


def test_a_tuple_as_edge_type_is_not_found_in_stock():
    seeds = seed_batches({"item": torch.arange(6)}, batch_size=6).sample_neighbor(hetero3(), [2])
    keys = {("user", "buys", "item"): ["w"]}

    (minibatch,) = list(stock_loader(seeds, hetero_store(), None, keys))

    assert minibatch.edge_features == [{}]
    assert set(minibatch.edge_ids(0)) == {"user:buys:item", "shop:sells:item"}


def test_a_negative_id_wraps_to_the_last_row_in_stock():
    (minibatch,) = list(HandMade([torch.tensor([-1])]).fetch_feature(ring_store(), ["x"]))

    assert minibatch.node_features["x"].tolist() == [[19.0]]


def test_the_table_of_a_feature_is_its_contiguous_tensor_and_an_update_is_seen_by_its_version():
    table = torch.arange(20.0).reshape(20, 1)
    feature = gb.TorchBasedFeature(table)
    version = table._version

    assert feature._tensor is table
    feature.update(torch.ones(2, 1), torch.tensor([3, 4]))
    assert feature._tensor is table
    assert table._version > version
    feature.update(torch.ones(20, 1))
    assert feature._tensor is not table


def test_a_store_keeps_its_features_by_domain_type_and_name():
    store = ring_store()

    assert set(store.keys()) == {("node", None, "x"), ("edge", None, "w")}
    assert store._features["node", None, "x"].read() is store.read("node", None, "x")


def on_disk_store(folder):
    np.save(folder / "x.npy", np.ones((20, 3), np.float32))
    spec = gb.OnDiskFeatureData(
        domain="node", name="x", format="numpy", path=str(folder / "x.npy"), in_memory=False
    )
    return gb.TorchBasedFeatureStore([spec])


def test_the_domain_of_an_on_disk_feature_is_an_enum_that_equals_its_name(tmp_path):
    ((domain, _, _),) = on_disk_store(tmp_path).keys()

    assert domain == "node"
    assert type(domain) is not str
    assert domain.value == "node"


def test_a_table_on_disk_is_mapped_for_writing(tmp_path):
    store = on_disk_store(tmp_path)

    lines = Path("/proc/self/maps").read_text().splitlines()
    (line,) = [line for line in lines if line.endswith(str(tmp_path / "x.npy"))]
    assert line.split()[1] == "rw-s"
    assert store.read("node", None, "x").shape == (20, 3)


# Iterating and leaving


def loaders_iterators():
    """The iterators of loaders that are asking for something now, outermost last."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, _BaseDataLoaderIter) and owner not in found:
            found.append(owner)
        frame = frame.f_back
    return found


class SeesItsCaller(IterDataPipe):
    """Notes whether the loader's iterator is on the stack when a stage is first asked."""

    def __init__(self, datapipe):
        super().__init__()
        self.datapipe = datapipe
        self.seen = []

    def __iter__(self):
        found = loaders_iterators()
        self.seen.append(len(found))
        weakref.finalize(found.pop(), self.seen.append, "left").atexit = False
        yield from self.datapipe


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loaders_iterator_is_on_the_stack_when_a_stage_behind_the_cut_begins(num_workers):
    stage = SeesItsCaller(ring_batches(10).fetch_feature(ring_store()))
    loader = gb.DataLoader(stage, num_workers=num_workers)

    for _ in loader:
        assert stage.seen == [1]
        break

    assert stage.seen == [1, "left"]
    for _ in loader:
        pass
    assert stage.seen == [1, "left", 1, "left"]


def test_an_error_in_the_loop_body_ends_the_iterator_once_it_was_handled():
    stage = SeesItsCaller(ring_batches(10).fetch_feature(ring_store()))
    loader = gb.DataLoader(stage)

    try:
        for _ in loader:
            raise KeyError("of the loop body")
    except KeyError:
        pass

    assert stage.seen == [1, "left"]


class Suspended(IterDataPipe):
    """Notes when its generator ends."""

    def __init__(self, datapipe):
        super().__init__()
        self.datapipe = datapipe
        self.ended = 0

    def __iter__(self):
        try:
            yield from self.datapipe
        finally:
            self.ended += 1


def test_leaving_a_loop_is_invisible_to_a_stage_until_the_next_iter():
    stage = Suspended(ring_batches(10))
    loader = gb.DataLoader(stage)

    for _ in loader:
        break

    assert stage.ended == 0
    next(iter(loader))
    assert stage.ended == 1


def test_a_source_is_pulled_one_minibatch_at_a_time_by_the_thread_that_asks():
    source = Counted(ring_batches(10))
    loader = stock_loader(source, ring_store(), ["x"])

    for i, _ in enumerate(loader):
        assert source.pulled == i + 1


class NotesThread(IterDataPipe):
    """Notes who pulls it, and how far."""

    def __init__(self, datapipe):
        super().__init__()
        self.datapipe = datapipe
        self.threads = set()
        self.pulled = 0

    def __iter__(self):
        for minibatch in self.datapipe:
            self.threads.add(threading.get_ident())
            self.pulled += 1
            yield minibatch


def test_copy_to_reads_ahead_on_another_thread():
    """Everything before it, an own stage too; at most 2 in its buffer, 1 in hand, 1 delivered."""
    stage = NotesThread(ring_batches(10).fetch_feature(ring_store(), ["x"]))
    loader = gb.DataLoader(stage.copy_to(torch.device("cpu")))

    seeds = []
    for i, minibatch in enumerate(loader):
        seeds.append(seeds_of(minibatch))
        assert stage.pulled <= i + 4

    assert seeds == [[i, i + 1] for i in range(0, 20, 2)]
    assert threading.get_ident() not in stage.threads
    assert len(stage.threads) == 1


def test_iterating_a_loader_is_collective_where_there_is_a_process_group(monkeypatch):
    """So a validation loop on one rank alone cannot use one: torch makes a group at ``iter()``."""
    made = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "new_group", lambda backend: made.append(backend))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)

    list(gb.DataLoader(HandMade([torch.tensor([1])]).fetch_feature(ring_store(), ["x"])))

    assert made == ["gloo", "gloo"]  # of the loader, and of the one inside its worker cut


def test_a_cpu_build_lacks_what_the_loader_calls_where_a_gpu_is(monkeypatch):
    if hasattr(torch.ops.graphbolt, "set_max_uva_threads"):
        pytest.skip("this DGL was built with CUDA")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    with pytest.raises(AttributeError, match="set_max_uva_threads"):
        stock_loader(ring_batches(2), ring_store(), ["x"])


# Minibatches


def test_a_minibatch_takes_attributes_of_our_own_through_the_stages_and_the_worker_cut():
    source = ring_batches(4).transform(note_worker)

    for minibatch in stock_loader(source, ring_store(), ["x"], num_workers=1):
        assert minibatch.sampled_in != os.getpid()


def test_a_minibatch_has_its_ids_where_the_planner_looks():
    (minibatch, *_) = list(ring_batches(2))

    assert minibatch.node_ids() is minibatch.input_nodes
    assert minibatch.num_layers() == 2
    for layer in range(2):
        edges = minibatch.edge_ids(layer)
        assert edges is minibatch.sampled_subgraphs[layer].original_edge_ids
    assert gb.MiniBatch().num_layers() == 0
    assert gb.MiniBatch().node_ids() is None
