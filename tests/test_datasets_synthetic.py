"""The generated graphs: their sizes, their hubs, and what they have to teach."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from featsync.datasets import load, synthetic
from featsync.datasets.graph_data import Topology

OPTIONS = {"nodes": 5000, "edges": 100_000, "width": 16, "classes": 7, "seed": 3}


@pytest.fixture(scope="module")
def graph():
    return load({"synthetic": OPTIONS}, task="link_prediction")


def labels_of(graph):
    labels = torch.empty(graph.num_nodes, dtype=torch.int64)
    for split in graph.splits.values():
        labels[split.seeds] = split.labels
    return labels


def destinations(graph):
    return torch.repeat_interleave(torch.arange(graph.num_nodes), graph.indptr.diff())


def test_sizes_are_what_was_asked_for(graph):
    features = graph.features["node", None, "feat"]

    assert (graph.num_nodes, graph.num_edges, graph.num_classes) == (5000, 100_000, 7)
    assert (features.shape, features.dtype) == ((5000, 16), torch.float32)
    assert graph.indptr.dtype == graph.indices.dtype == torch.int64
    assert graph.indptr[0] == 0
    assert graph.indptr[-1] == 100_000
    assert 0 <= graph.indices.min() <= graph.indices.max() < 5000
    assert torch.isfinite(features).all()


@pytest.mark.parametrize(
    ("nodes", "edges", "classes"), [(1, 0, 1), (1, 9, 1), (3, 1, 3), (10, 1000, 9)]
)
def test_the_smallest_graphs_are_whole(nodes, edges, classes):
    options = {"nodes": nodes, "edges": edges, "width": 1, "classes": classes}

    data = load({"synthetic": options}, task="link_prediction")

    assert data.indptr[-1] == len(data.indices) == edges
    assert sum(len(split.seeds) for split in data.splits.values()) == nodes
    assert sum(len(split.pairs) for split in data.splits.values()) == min(nodes, edges)


def test_a_seed_gives_one_graph_and_another_seed_another(graph):
    again = load({"synthetic": OPTIONS})
    other = load({"synthetic": {**OPTIONS, "seed": 4}})

    assert torch.equal(graph.indices, again.indices)
    assert torch.equal(graph.features["node", None, "feat"], again.features["node", None, "feat"])
    assert not torch.equal(graph.indices, other.indices)


def test_blocks_cover_every_edge_once(graph, monkeypatch):
    indptr = graph.indptr.numpy()
    parts = [synthetic._destinations(indptr, a, b) for a, b in synthetic._blocks(100_000, 777)]

    assert np.array_equal(np.concatenate(parts), destinations(graph).numpy())


def test_degrees_follow_the_power_law_both_ways(graph):
    in_degrees = graph.indptr.diff().sort(descending=True).values
    out_degrees = torch.bincount(graph.indices, minlength=5000).sort(descending=True).values

    # Of the first r ranks: E * (r/N)^(1/3).
    for rank in (5, 50, 500):
        expected = 100_000 * (rank / 5000) ** (1 / 3)
        assert in_degrees[:rank].sum() == pytest.approx(expected, rel=0.01)
        assert out_degrees[:rank].sum() == pytest.approx(expected, rel=0.1)


def test_hubs_lie_anywhere(graph):
    hubs = graph.indptr.diff().topk(200).indices.float()

    assert hubs.mean() == pytest.approx(2500, abs=400)
    assert hubs.std() == pytest.approx(5000 / 12**0.5, rel=0.15)


def test_classes_are_equally_large_and_half_the_edges_stay_inside(graph):
    labels = labels_of(graph)

    counts = torch.bincount(labels)
    inside = (labels[graph.indices] == labels[destinations(graph)]).float().mean()

    assert counts.max() - counts.min() <= 1
    assert inside == pytest.approx(0.5 + 0.5 / 7, abs=0.03)


def test_neighbours_tell_more_than_the_row_alone(graph):
    labels, features = labels_of(graph), graph.features["node", None, "feat"]
    sums = torch.zeros(5000, 16).index_add_(0, destinations(graph), features[graph.indices])
    around = features + sums / graph.indptr.diff().unsqueeze(1)

    def accuracy(rows):
        train, valid = graph.splits["train"].seeds, graph.splits["valid"].seeds
        centres = torch.stack([rows[train][labels[train] == c].mean(dim=0) for c in range(7)])
        return (torch.cdist(rows[valid], centres).argmin(dim=1) == labels[valid]).float().mean()

    assert 0.4 < accuracy(features) < accuracy(around) - 0.05


def test_pairs_are_edges(graph):
    edges = set(zip(graph.indices.tolist(), destinations(graph).tolist(), strict=True))

    for split in graph.splits.values():
        assert len(split.pairs) == len(split.seeds)
        assert set(map(tuple, split.pairs.tolist())) <= edges


def test_the_topology_alone_is_a_topology(graph):
    assert isinstance(graph, Topology)
    assert graph.edge_attributes == {}
