"""Kinds of pipelines: samplers, tasks, and whole epochs beside those of stock."""

from __future__ import annotations

import dgl.graphbolt as gb
import pytest
import torch

from support.graphs import (
    HETERO_EDGES,
    HETERO_NODES,
    assert_as_stock,
    assert_same_features,
    hetero3,
    hetero_store,
    planned,
    planned_loader,
    ring20,
    ring_batches,
    ring_store,
    seed_batches,
    seeds_of,
    stock_loader,
)

pytestmark = pytest.mark.dgl


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
