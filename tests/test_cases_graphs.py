"""What graphs, seeds and tables are like: cases 3, 4, 7 and 9."""

from __future__ import annotations

import warnings

import pytest
import torch

from featsync.errors import FeatureError
from featsync.workers import WORKERS
from support.graphs import (
    BUYS,
    HETERO_NODES,
    HandMade,
    assert_as_stock,
    assert_same,
    hetero3,
    hetero_store,
    planned_loader,
    ring20,
    ring_batches,
    ring_store,
    seed_batches,
    served,
)

pytestmark = pytest.mark.dgl


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
