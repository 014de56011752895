"""Kinds of pipelines: tasks, samplers, tables, policies, consumers; and what long use leaves."""

from __future__ import annotations

from pathlib import Path

import dgl.graphbolt as gb
import numpy as np
import pytest
import torch

import featsync
from featsync.device import open_device
from featsync.retention import RETENTION
from featsync.workers import WORKERS
from support.graphs import (
    HETERO_EDGES,
    HETERO_NODES,
    assert_as_stock,
    assert_no_more_handles_than,
    assert_same,
    assert_same_features,
    end_loader_workers,
    expected,
    hetero3,
    hetero_store,
    open_handles,
    planned,
    planned_loader,
    ring20,
    ring_batches,
    ring_store,
    seed_batches,
    seeds_of,
    served,
    stock_loader,
    store_of,
)

pytestmark = pytest.mark.dgl


@pytest.fixture(autouse=True)
def no_worker_is_left():
    yield
    end_loader_workers()


# Samplers and tasks

SAMPLERS = {
    "neighbor": lambda pipe, graph: pipe.sample_neighbor(graph, [2, 1]),
    "layer neighbor": lambda pipe, graph: pipe.sample_layer_neighbor(graph, [2, 1]),
    "in-subgraph": lambda pipe, graph: pipe.sample_in_subgraph(graph),
}


@pytest.mark.parametrize("names", ["seeds", "seed_nodes"])
@pytest.mark.parametrize("sample", SAMPLERS.values(), ids=SAMPLERS)
def test_node_classification_delivers_what_stock_reads(sample, names):
    store = ring_store()
    source = sample(seed_batches(20, batch_size=3, names=names), ring20())
    loader = planned_loader(source, store, ["x"], ["w"], device_cache=5)

    for _ in range(2):
        minibatches = list(loader)
        assert len(minibatches) == 7
        for minibatch in minibatches:
            assert_as_stock(minibatch, store, ["x"], ["w"])
            assert len(minibatch.edge_features[0]["w"]) > 0


@pytest.mark.parametrize("names", ["seeds", "node_pairs"])
@pytest.mark.parametrize("sample", SAMPLERS.values(), ids=SAMPLERS)
def test_link_prediction_delivers_what_stock_reads(sample, names):
    store = ring_store()
    pairs = torch.stack([torch.arange(20), torch.arange(20).roll(3)], 1)
    source = seed_batches(pairs, batch_size=3, names=names).sample_uniform_negative(ring20(), 2)
    loader = planned_loader(sample(source, ring20()), store, ["x"], ["w"], device_cache=5)

    for _ in range(2):
        minibatches = list(loader)
        assert len(minibatches) == 7
        for minibatch in minibatches:
            assert_as_stock(minibatch, store, ["x"], ["w"])


@pytest.mark.parametrize("sample", SAMPLERS.values(), ids=SAMPLERS)
def test_a_heterogeneous_graph_delivers_nodes_and_edges_of_all_types(sample):
    store = hetero_store()
    source = sample(seed_batches({"item": torch.arange(6)}, batch_size=4), hetero3())
    loader = planned_loader(source, store, HETERO_NODES, HETERO_EDGES, device_cache=2)

    for _ in range(2):
        minibatches = list(loader)
        assert len(minibatches) == 2
        for minibatch in minibatches:
            assert_as_stock(minibatch, store, HETERO_NODES, HETERO_EDGES)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_whole_epoch_equals_that_of_the_stock_pipeline(num_workers):
    """Not only for its own ids: seeds, ids, features and labels of two pipelines side by side."""
    store = ring_store()

    def source():
        items = gb.ItemSet((torch.arange(20), torch.arange(20) % 3), names=("seeds", "labels"))
        return gb.ItemSampler(items, batch_size=3).sample_neighbor(ring20(), [2, 2])

    ours = planned_loader(source(), store, ["x"], ["w"], num_workers=num_workers)
    stock = stock_loader(source(), store, ["x"], ["w"], num_workers=num_workers)

    for _ in range(2):
        for found, wanted in zip(ours, stock, strict=True):
            assert torch.equal(found.seeds, wanted.seeds)
            assert torch.equal(found.labels, wanted.labels)
            assert torch.equal(found.input_nodes, wanted.input_nodes)
            assert_same_features(found.node_features, wanted.node_features)
            for layer, other in zip(found.edge_features, wanted.edge_features, strict=True):
                assert_same_features(layer, other)
            assert [block.num_edges() for block in found.blocks] == [
                block.num_edges() for block in wanted.blocks
            ]


def test_a_pipe_without_a_loader_delivers_the_same():
    store = ring_store()
    pipe = planned(ring_batches(10), store, ["x"], ["w"], device_cache=4)

    for _ in range(2):
        seeds = []
        for minibatch in pipe:
            assert_as_stock(minibatch, store, ["x"], ["w"])
            seeds.append(seeds_of(minibatch))
        assert len(seeds) == 10


# Tables and workers


def in_memory(folder, tables):
    return store_of(tables)


def mapped(folder, tables):
    features = {}
    for i, (key, table) in enumerate(tables.items()):
        np.save(folder / f"{i}.npy", table.numpy())
        features[key] = torch.from_numpy(np.load(folder / f"{i}.npy", mmap_mode="r+"))
    return store_of(features)


def shared(folder, tables):
    return featsync.share(store_of(tables))


KINDS = {"in memory": in_memory, "mapped": mapped, "shared": shared}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("worker", WORKERS)
def test_every_worker_serves_every_kind_of_table(worker, kind, num_workers, tmp_path):
    if worker == "process" and kind == "in memory":
        pytest.skip("refused, as tested elsewhere: the helper cannot see private memory")
    tables = {
        ("node", None, "x"): torch.randn(20, 7, generator=torch.Generator().manual_seed(0)),
        ("edge", None, "w"): torch.arange(80, dtype=torch.int16).reshape(40, 2),
    }
    plain = store_of(tables)
    store = KINDS[kind](tmp_path, tables)
    loader = planned_loader(
        ring_batches(6), store, ["x"], ["w"], num_workers=num_workers, worker=worker, device_cache=6
    )

    for _ in range(2):
        seeds = []
        for minibatch in loader:
            assert_as_stock(minibatch, plain, ["x"], ["w"])
            seeds.append(seeds_of(minibatch))
        assert len(seeds) == 6


@pytest.mark.parametrize("lookahead", [1, 2, 5, 11])
@pytest.mark.parametrize("device_cache", [1, 7, 0.5, 1.0, "100B"])
@pytest.mark.parametrize("retention", RETENTION)
def test_a_policy_changes_sources_and_never_values(retention, device_cache, lookahead):
    store = ring_store()
    loader = planned_loader(
        ring_batches(10),
        store,
        ["x"],
        ["w"],
        retention=retention,
        device_cache=device_cache,
        lookahead=lookahead,
    )
    stats = featsync.stats(loader)

    for _ in range(2):
        wanted = 0
        for minibatch in loader:
            assert_as_stock(minibatch, store, ["x"], ["w"])
            wanted += len(minibatch.input_nodes) + sum(
                len(minibatch.edge_ids(layer)) for layer in range(2)
            )
        assert stats.rows == wanted
        assert stats.bytes == {source: 4 * stats_rows(stats, source) for source in stats.bytes}
        if retention == "none":
            assert stats.hit_rate == 0
        stats.reset()


def stats_rows(stats, source):
    return sum(feature.rows[source] for feature in stats.features.values())


@pytest.mark.parametrize("retention", [name for name in RETENTION if name != "none"])
def test_a_cache_as_large_as_the_table_serves_every_row_of_the_second_epoch(retention):
    """What a cache holds belongs to the feature: it survives epochs, and other loaders use it."""
    store = ring_store()
    settings = {"retention": retention, "device_cache": 1.0}
    first = planned_loader(ring_batches(10), store, ["x"], **settings)
    second = planned_loader(ring_batches(10), store, ["x"], **settings)
    list(first)

    for loader in (first, second):
        stats = featsync.stats(loader)
        stats.reset()
        for minibatch in loader:
            assert_as_stock(minibatch, store, ["x"])
        assert stats.hit_rate == 1.0


@pytest.mark.parametrize("kind", ["mapped", "shared"])
def test_loaders_with_different_workers_use_one_cache(kind, tmp_path):
    """What one worker put into it another one reads, and moves on."""
    tables = {("node", None, "x"): torch.arange(60.0).reshape(20, 3)}
    store, plain = KINDS[kind](tmp_path, tables), store_of(tables)
    settings = {"device_cache": 1.0}
    list(planned_loader(ring_batches(10), store, ["x"], worker="thread", **settings))

    for worker in WORKERS:
        loader = planned_loader(ring_batches(10), store, ["x"], worker=worker, **settings)
        for minibatch in loader:
            assert_as_stock(minibatch, plain, ["x"])
        assert featsync.stats(loader).hit_rate == 1.0


def test_an_update_between_epochs_is_seen_although_rows_were_cached():
    store = ring_store()
    loader = planned_loader(ring_batches(10), store, ["x"], device_cache=1.0)
    list(loader)

    for value, ids in (
        (torch.full((2, 1), -3.0), torch.tensor([0, 19])),
        (torch.ones(20, 1), None),
    ):
        store.update("node", None, "x", value, ids)
        for _ in range(2):
            for minibatch in loader:
                assert_as_stock(minibatch, store, ["x"])


# Consumers


def test_copy_to_behind_the_stages_delivers_the_right_static_values():
    """It reads two minibatches ahead, on another thread."""
    store = ring_store()
    for worker in WORKERS:
        pipe = planned(ring_batches(10), served(worker, store), ["x"], ["w"], worker=worker)
        loader = gb.DataLoader(pipe.copy_to(torch.device("cpu")))
        for _ in range(2):
            seeds = []
            for minibatch in loader:
                assert_as_stock(minibatch, store, ["x"], ["w"])
                seeds.append(seeds_of(minibatch))
            assert seeds == [[i, i + 1] for i in range(0, 20, 2)]


HOLDS = {
    "tensor": lambda tensor: tensor,
    "view": lambda tensor: tensor[1:, 1:],
    "array": lambda tensor: tensor.numpy(),
    "autograd": lambda tensor: (tensor * torch.ones(3, requires_grad=True)).grad_fn,
}


@pytest.mark.parametrize("holds", HOLDS)
@pytest.mark.parametrize("worker", WORKERS)
def test_what_the_user_still_holds_is_never_overwritten(worker, holds):
    """Over many minibatches whose memory would fit, held as tensor, view, array or saved tensor."""
    table = torch.arange(60.0).reshape(20, 3)
    store = served(worker, ring_store(x=table))
    loader = planned_loader(ring_batches(30), store, ["x"], worker=worker, device_cache=4)
    held = []

    for i, minibatch in enumerate(loader):
        if i % 3 == 1:
            rows = minibatch.node_features["x"]
            held.append((HOLDS[holds](rows), table[minibatch.input_nodes]))
            del rows
        for thing, wanted in held:
            assert np.array_equal(look(thing), look_wanted(holds, wanted))

    assert len(held) == 10


def look(thing):
    if isinstance(thing, np.ndarray):
        return thing
    if isinstance(thing, torch.Tensor):
        return thing.numpy()
    return thing._saved_self.numpy()


def look_wanted(holds, wanted):
    return wanted[1:, 1:].numpy() if holds == "view" else wanted.numpy()


@pytest.mark.parametrize("worker", WORKERS)
def test_memory_that_nobody_holds_is_used_again(worker, monkeypatch):
    """In steady state nothing is allocated: a handful of blocks serves all minibatches."""
    allocated = []
    store = served(worker, ring_store())
    loader = planned_loader(ring_batches(40), store, ["x"], worker=worker)
    example = WORKERS[worker](open_device(None), 10.0)
    example.close()
    made_by, allocate = type(example), type(example).allocate

    def counted(self, num_bytes):
        allocated.append(num_bytes)
        return allocate(self, num_bytes)

    monkeypatch.setattr(made_by, "allocate", counted)
    for _ in loader:
        pass

    assert 0 < len(allocated) <= 5


@pytest.mark.parametrize("device_cache", [0, 4])
@pytest.mark.parametrize("worker", WORKERS)
def test_a_validation_loop_nested_in_a_training_loop_disturbs_neither(worker, device_cache):
    """Both on the same features and the same cache, at several steps."""
    store = served(worker, ring_store())
    settings = {"worker": worker, "device_cache": device_cache}
    training = planned_loader(ring_batches(10), store, ["x"], ["w"], **settings)
    validation = planned_loader(ring_batches(6), store, ["x"], ["w"], **settings)

    for _ in range(2):
        seeds = []
        for i, minibatch in enumerate(training):
            seeds.append(seeds_of(minibatch))
            if i in (0, 4, 9):
                inner = 0
                for other in validation:
                    assert_as_stock(other, store, ["x"], ["w"])
                    inner += 1
                    if i == 4 and inner == 3:
                        break
                assert inner == (3 if i == 4 else 6)
            assert_as_stock(minibatch, store, ["x"], ["w"])
        assert seeds == [[i, i + 1] for i in range(0, 20, 2)]


def test_a_nested_loop_reads_from_home_while_another_drives_the_cache_and_drives_it_afterwards():
    store = ring_store()
    training = planned_loader(ring_batches(10), store, ["x"], device_cache=1.0)
    validation = planned_loader(ring_batches(10), store, ["x"], device_cache=1.0)
    list(training)
    counts = featsync.stats(validation)

    for _ in training:
        list(validation)
        break
    assert counts.hit_rate == 0
    assert counts.rows > 0

    counts.reset()
    list(validation)
    assert counts.hit_rate == 1.0


def test_two_loaders_side_by_side_deliver_as_if_alone():
    store = ring_store()
    loaders = [
        planned_loader(ring_batches(10), store, ["x"], ["w"], device_cache=4) for _ in range(2)
    ]

    for _ in range(2):
        for pair in zip(*loaders, strict=True):
            for minibatch in pair:
                assert_as_stock(minibatch, store, ["x"], ["w"])
            assert seeds_of(pair[0]) == seeds_of(pair[1])


def test_features_take_part_in_autograd():
    loader = planned_loader(ring_batches(4), ring_store(), ["x"])
    layer = torch.nn.Linear(1, 1)

    losses = [layer(minibatch.node_features["x"]).square().sum() for minibatch in loader]
    torch.stack(losses).sum().backward()

    tables = [expected(m, ring_store(), ["x"])[0]["x"] for m in ring_batches(4)]
    again = torch.nn.Linear(1, 1)
    again.load_state_dict(layer.state_dict())
    torch.stack([again(rows).square().sum() for rows in tables]).sum().backward()
    assert_same(layer.weight.grad, again.weight.grad)


# Long use


def shared_memory_names():
    """Entries of /dev/shm but for those of other programs' sampled tensors."""
    return {p.name for p in Path("/dev/shm").iterdir() if not p.name.startswith(("torch_", "sem."))}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("worker", WORKERS)
def test_twenty_epochs_with_breaks_leave_no_thread_descriptor_or_shared_memory(worker, num_workers):
    before_all = shared_memory_names()
    store = served(worker, ring_store())
    loader = planned_loader(
        ring_batches(6), store, ["x"], num_workers=num_workers, worker=worker, device_cache=4
    )

    def some_epochs(count):
        for number in range(count):
            for i, _ in enumerate(loader):
                if number % 3 == i:
                    break

    some_epochs(8)
    before = open_handles()
    some_epochs(12)

    assert_no_more_handles_than(before)
    assert shared_memory_names() == before_all


@pytest.mark.parametrize("worker", WORKERS)
def test_loaders_that_are_gone_leave_no_thread_and_no_descriptor(worker):
    store = served(worker, ring_store())

    def use_and_drop():
        list(planned_loader(ring_batches(3), store, ["x"], worker=worker))

    before = open_handles()
    for _ in range(3):
        use_and_drop()

    assert_no_more_handles_than(before)
