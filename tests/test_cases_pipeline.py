"""Public faults of feature pipelines, cases 1 to 7, 9 and 10: one rank."""

from __future__ import annotations

import os
import warnings

import dgl.graphbolt as gb
import pytest
import torch
from torch.utils.data.graph import traverse_dps

import featsync
from featsync.errors import ConfigError, FeatureError
from featsync.workers import WORKERS
from support.graphs import (
    BUYS,
    HETERO_NODES,
    Counted,
    HandMade,
    assert_as_stock,
    assert_no_more_handles_than,
    assert_same,
    end_loader_workers,
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
)

pytestmark = pytest.mark.dgl


@pytest.fixture(autouse=True)
def no_worker_is_left():
    yield
    end_loader_workers()


def check_epoch(loader, store, num_batches=10):
    """All minibatches of ``ring_batches``, in order, each as stock would deliver it."""
    seeds = []
    for minibatch in loader:
        assert_as_stock(minibatch, store, ["x"], ["w"])
        seeds.append(seeds_of(minibatch))
    assert seeds == [[2 * i % 20, (2 * i + 1) % 20] for i in range(num_batches)]


# Case 1: edges of the window


@pytest.mark.parametrize(
    ("num_batches", "lookahead"), [(12, 1), (12, 3), (12, 12), (12, 13), (1, 4), (0, 4)]
)
def test_the_source_is_pulled_once_a_minibatch_and_as_far_ahead_as_asked(num_batches, lookahead):
    """Case 1: n minibatches in, n out, in every epoch, for windows of any size."""
    source = Counted(ring_batches(num_batches))
    store = ring_store()
    loader = planned_loader(source, store, ["x"], ["w"], lookahead=lookahead)

    for epoch in range(2):
        already = epoch * num_batches
        for i, minibatch in enumerate(loader):
            ahead = min(i + 1, lookahead)  # the window fills while the first minibatches are used
            assert source.pulled - already == min(i + 1 + ahead, num_batches)
            assert_as_stock(minibatch, store, ["x"], ["w"])
        assert source.pulled - already == num_batches
        check_epoch(loader, store, num_batches)
        source.pulled -= num_batches


@pytest.mark.parametrize("lookahead", [1, 3, 12, 13])
def test_each_minibatch_is_moved_once(lookahead):
    """Case 1: one exchange a batch, again in the second epoch."""
    store = ring_store()
    loader = planned_loader(ring_batches(12), store, ["x"], lookahead=lookahead)
    stats = featsync.stats(loader)

    for _ in range(2):
        wanted = sum(len(minibatch.input_nodes) for minibatch in loader)

        assert stats.minibatches == 12
        assert stats.rows == wanted
        stats.reset()


# Case 2: leaving early, then again


def leave_by_break(loader):
    for i, _ in enumerate(loader):
        if i == 2:
            break


def leave_by_error(loader):
    def body():
        for i, _ in enumerate(loader):
            if i == 2:
                raise KeyError("of the loop body")

    with pytest.raises(KeyError, match="of the loop body"):
        body()


def leave_after_one(loader):
    next(iter(loader))


WAYS_OUT = {"break": leave_by_break, "error": leave_by_error, "take one": leave_after_one}


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("leave", WAYS_OUT.values(), ids=WAYS_OUT)
def test_after_leaving_early_two_full_epochs_follow(leave, worker):
    """Case 2: ten right minibatches each; nothing of the abandoned window comes."""
    store = served(worker, ring_store())
    loader = planned_loader(ring_batches(10), store, ["x"], ["w"], lookahead=4, worker=worker)

    leave(loader)

    check_epoch(loader, store)
    check_epoch(loader, store)


@pytest.mark.parametrize("leave", WAYS_OUT.values(), ids=WAYS_OUT)
def test_after_leaving_early_two_full_epochs_follow_with_loader_workers(leave):
    """Case 2, with minibatches on their way from two workers."""
    store = ring_store()
    loader = planned_loader(ring_batches(10), store, ["x"], ["w"], num_workers=2, lookahead=4)
    stock = [
        seeds_of(minibatch)
        for minibatch in stock_loader(ring_batches(10), store, ["x"], num_workers=2)
    ]
    end_loader_workers()

    leave(loader)

    for _ in range(2):
        seeds = []
        for minibatch in loader:
            assert_as_stock(minibatch, store, ["x"], ["w"])
            seeds.append(seeds_of(minibatch))
        assert seeds == stock


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_leaving_early_again_and_again_keeps_no_thread_and_no_descriptor(num_workers, worker):
    """Case 2: threads and handles do not grow."""
    store = served(worker, ring_store())
    loader = planned_loader(
        ring_batches(10), store, ["x"], num_workers=num_workers, lookahead=4, worker=worker
    )
    for leave in (*WAYS_OUT.values(), *WAYS_OUT.values()):
        leave(loader)
    before = open_handles()

    for _ in range(3):
        for leave in WAYS_OUT.values():
            leave(loader)

    assert_no_more_handles_than(before)


def test_the_pipe_can_be_walked_while_it_runs_and_after_it_was_left():
    """Case 2: GraphBolt pickles the attributes of every stage to find the stages before it."""
    loader = planned_loader(ring_batches(10), ring_store(), ["x"], device_cache=4)
    stages = len(list(_classes(traverse_dps(loader.dataset))))

    for minibatch in loader:
        assert len(list(_classes(traverse_dps(loader.dataset)))) == stages
        if seeds_of(minibatch) == [4, 5]:
            break

    assert len(list(_classes(traverse_dps(loader.dataset)))) == stages


def _classes(level):
    for stage, above in level.values():
        yield type(stage)
        yield from _classes(above)


# Case 3: a type that is never a source


@pytest.mark.parametrize(
    ("seeds", "users", "shops"),
    [
        ({"item": [0, 1]}, [0, 1], []),
        ({"item": [4, 5]}, [], [0, 1]),
        ({"item": [3, 3]}, [], []),
        ({"user": [0, 1]}, [0, 1], []),
    ],
    ids=str,
)
def test_a_type_that_was_not_sampled_is_left_out_and_an_empty_one_is_empty(seeds, users, shops):
    """Case 3: where stock raises KeyError for the missing type."""
    store = hetero_store()
    seeds = {type_: torch.tensor(nodes) for type_, nodes in seeds.items()}
    loader = planned_loader(
        seed_batches(seeds).sample_neighbor(hetero3(), [2]), store, HETERO_NODES
    )

    (minibatch,) = list(loader)

    assert set(minibatch.node_features) == {("user", "f"), ("shop", "f")}
    assert_same(minibatch.node_features["user", "f"], store.read("node", "user", "f")[users])
    assert_same(minibatch.node_features["shop", "f"], store.read("node", "shop", "f")[shops])


def test_types_come_and_go_from_one_minibatch_to_the_next():
    """Case 3: with a cache, whose rows of a type must outlast minibatches without it."""
    store = hetero_store()
    some, none = torch.tensor([2, 0]), torch.tensor([], dtype=torch.int64)
    sampled = [{"user": some}, {"shop": some}, {"user": none}, {"user": some, "shop": none}, {}]
    loader = planned_loader(HandMade(sampled), store, HETERO_NODES, device_cache=2)

    for _ in range(2):
        for minibatch, nodes in zip(loader, sampled, strict=True):
            assert set(minibatch.node_features) == {(type_, "f") for type_ in nodes}
            assert_as_stock(minibatch, store, HETERO_NODES)


# Case 4: edge features silently absent


@pytest.mark.parametrize("num_workers", [0, 2])
def test_edges_without_ids_give_empty_features_and_one_warning(num_workers):
    """Case 4: stock gives empty dictionaries and says nothing."""
    source = ring_batches(10, graph=ring20(edge_ids=False))
    loader = planned_loader(source, ring_store(), ["x"], ["w"], num_workers=num_workers)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for minibatch in loader:
                assert minibatch.edge_features == [{}, {}]

    told = [warning for warning in caught if "edge_feature_keys" in str(warning.message)]
    assert len(told) == 1
    assert "_ORIGINAL_EDGE_ID" in str(told[0].message)


def test_edges_with_ids_give_the_rows_of_their_ids():
    """Case 4: and a tuple names an edge type as well as a string."""
    ring, hetero = ring_store(), hetero_store()

    for minibatch in planned_loader(ring_batches(10), ring, None, ["w"]):
        for layer in range(2):
            ids = minibatch.edge_ids(layer)
            assert_same(minibatch.edge_features[layer]["w"], ring.read("edge", None, "w")[ids])
    seeds = seed_batches({"item": torch.arange(6)}, batch_size=6)
    loader = planned_loader(
        seeds.sample_neighbor(hetero3(), [2]), hetero, None, {("user", "buys", "item"): ["w"]}
    )
    (minibatch,) = list(loader)
    (layer,) = minibatch.edge_features
    assert set(layer) == {(BUYS, "w")}
    assert_same(layer[BUYS, "w"], hetero.read("edge", BUYS, "w")[minibatch.edge_ids(0)[BUYS]])
    assert len(layer[BUYS, "w"]) == 3


def test_a_heterogeneous_graph_without_edge_ids_is_told_as_well():
    """Case 4, with a tuple key."""
    seeds = seed_batches({"item": torch.arange(6)}, batch_size=6)
    loader = planned_loader(
        seeds.sample_neighbor(hetero3(edge_ids=False), [2]),
        hetero_store(),
        None,
        {("user", "buys", "item"): ["w"]},
    )

    with pytest.warns(UserWarning, match="_ORIGINAL_EDGE_ID"):
        (minibatch,) = list(loader)

    assert minibatch.edge_features == [{}]


# Case 5: workers silently off


def note_process(minibatch):
    minibatch.sampled_in = os.getpid()
    return minibatch


@pytest.mark.parametrize("num_workers", [1, 2])
def test_loader_workers_sample_and_the_planner_sees_all_minibatches_in_order(num_workers):
    """Case 5: stock's worker cut is found, and both stages stand behind it."""
    store = ring_store()
    planned_pipe = planned(ring_batches(10).transform(note_process), store, ["x"], lookahead=3)
    loader = gb.DataLoader(planned_pipe.transform(note_delivery), num_workers=num_workers)
    stock = stock_loader(ring_batches(10), store, ["x"], num_workers=num_workers)
    stock_seeds = [seeds_of(minibatch) for minibatch in stock]
    end_loader_workers()

    for _ in range(2):
        minibatches = list(loader)

        samplers = {minibatch.sampled_in for minibatch in minibatches}
        assert len(samplers) == num_workers
        assert os.getpid() not in samplers
        assert {minibatch.delivered_in for minibatch in minibatches} == {os.getpid()}
        assert [seeds_of(m) for m in minibatches] == stock_seeds
        assert sorted(seed for m in minibatches for seed in seeds_of(m)) == list(range(20))


def note_delivery(minibatch):
    minibatch.delivered_in = os.getpid()
    return minibatch


# Case 6: two feature stages


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fetch_feature_before_the_stages_adds_its_features(num_workers):
    """Case 6: the union, where stock throws the first stage's features away."""
    store = ring_store()
    pipe = planned(ring_batches(10).fetch_feature(store, ["x"]), store, None, ["w"])

    for minibatch in gb.DataLoader(pipe, num_workers=num_workers):
        assert_as_stock(minibatch, store, ["x"], ["w"])


def test_fetch_feature_behind_the_stages_adds_its_features():
    """Case 6: for other features, other types, and one feature twice."""
    store = ring_store()
    pipe = planned(ring_batches(10), store, ["x"], ["w"]).fetch_feature(store, ["x"], None)

    for minibatch in gb.DataLoader(pipe):
        assert_as_stock(minibatch, store, ["x"], ["w"])


def test_two_pairs_of_stages_give_the_union():
    """Case 6: a second Planner and Syncer, which find a cut upstream already."""
    store = ring_store()
    pipe = planned(planned(ring_batches(10), store, ["x"]), store, None, ["w"], lookahead=3)

    for minibatch in gb.DataLoader(pipe, num_workers=2):
        assert_as_stock(minibatch, store, ["x"], ["w"])


def test_fetch_feature_behind_the_stages_is_refused_with_loader_workers():
    """Case 6: stock would nest workers in workers."""
    store = ring_store()
    pipe = planned(ring_batches(10), store, ["x"]).fetch_feature(store, None, ["w"])

    with pytest.raises(ConfigError, match=r"Put that fetch_feature\s+before plan_feature"):
        list(gb.DataLoader(pipe, num_workers=2))


# Case 7: which seeds field


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("names", ["seeds", "seed_nodes"])
def test_both_seed_fields_of_node_classification_work(names, dtype):
    """Case 7: and a graph of int32 gives ids of int32."""
    store = ring_store()
    seeds = seed_batches(torch.arange(20, dtype=dtype), names=names)
    sampled = seeds.sample_neighbor(ring20(dtype=dtype), [2, 2])

    minibatches = list(planned_loader(sampled, store, ["x"], ["w"], device_cache=4))

    assert len(minibatches) == 10
    for minibatch in minibatches:
        assert getattr(minibatch, names).dtype == minibatch.input_nodes.dtype == dtype
        assert_as_stock(minibatch, store, ["x"], ["w"])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("names", ["seeds", "node_pairs"])
def test_both_seed_fields_of_link_prediction_work(names, dtype):
    """Case 7: pairs of nodes, with negative ones."""
    store = ring_store()
    pairs = torch.stack([torch.arange(20), torch.arange(20).roll(1)], 1).to(dtype)
    sampled = seed_batches(pairs, names=names).sample_uniform_negative(ring20(dtype=dtype), 1)
    sampled = sampled.sample_neighbor(ring20(dtype=dtype), [2, 2])

    minibatches = list(planned_loader(sampled, store, ["x"], ["w"], device_cache=4))

    assert len(minibatches) == 10
    for minibatch in minibatches:
        assert minibatch.input_nodes.dtype == dtype
        assert_as_stock(minibatch, store, ["x"], ["w"])


# Case 9: table and graph do not match


@pytest.mark.parametrize("device_cache", [0, 4])
@pytest.mark.parametrize("worker", WORKERS)
def test_a_table_shorter_than_the_graph_is_named_with_the_id(worker, device_cache):
    """Case 9: 10 rows for 20 nodes."""
    store = served(worker, ring_store(x=torch.arange(10.0).reshape(10, 1)))
    source = HandMade([torch.tensor([3, 9]), torch.tensor([4, 13]), torch.tensor([5, 6])])
    loader = planned_loader(source, store, ["x"], worker=worker, device_cache=device_cache)

    with pytest.raises(FeatureError) as caught:
        list(loader)

    for fact in ("node/None/x", " 13 ", "10 rows"):
        assert fact in str(caught.value)


@pytest.mark.parametrize("device_cache", [0, 4])
@pytest.mark.parametrize("worker", WORKERS)
def test_a_negative_id_is_an_error(worker, device_cache):
    """Case 9: stock wraps to the last row."""
    store = served(worker, ring_store())
    source = HandMade([torch.tensor([3, -1])])
    loader = planned_loader(source, store, ["x"], worker=worker, device_cache=device_cache)

    with pytest.raises(FeatureError) as caught:
        list(loader)

    for fact in ("node/None/x", " -1 ", "20 rows"):
        assert fact in str(caught.value)


# Case 10: CPU build of DGL where a GPU is present


def test_a_gpu_beside_a_dgl_without_cuda_is_explained_and_then_works(monkeypatch):
    """Case 10: the stock loader fails for want of set_max_uva_threads unless told otherwise."""
    if hasattr(torch.ops.graphbolt, "set_max_uva_threads"):
        pytest.skip("this DGL was built with CUDA")
    store = ring_store()

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.warns(UserWarning, match=r"overlap_feature_fetch=False\) works"):
            pipe = planned(ring_batches(10), store, ["x"], ["w"])
        loader = gb.DataLoader(pipe, overlap_feature_fetch=False)

    check_epoch(loader, store)


def test_store_keys_may_be_unknown():
    """A store that does not tell its keys is taken at its word."""

    class Duck:
        def __init__(self, store):
            self._store = store
            self.reads = 0

        def read(self, domain, type_name, name, ids=None):
            self.reads += 1
            return self._store.read(domain, type_name, name, ids)

    store = ring_store()
    duck = Duck(store)

    check_epoch(planned_loader(ring_batches(10), duck, ["x"], ["w"]), store)

    assert duck.reads == 30
