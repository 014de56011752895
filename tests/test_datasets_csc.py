"""Edge lists to CSC, against edge by edge references and against GraphBolt itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from featsync.datasets import csc, splits
from featsync.datasets.graph_data import ORIGINAL_EDGE_ID

NODES = {"user": 3, "item": 4}
EDGES = {
    "user:likes:item": ([0, 2, 2, 1, 0], [3, 3, 0, 1, 3]),
    "item:liked_by:user": ([3, 3, 0, 1, 3], [0, 2, 2, 1, 0]),
    "user:knows:user": ([0, 1], [1, 1]),
}


def arrays(edges):
    return {name: (np.array(ends[0]), np.array(ends[1])) for name, ends in edges.items()}


def test_homogeneous_edges_end_where_they_should():
    sources, destinations = np.array([4, 1, 0, 1, 2]), np.array([2, 0, 2, 2, 4])

    graph = csc.homogeneous(5, (sources, destinations))

    assert graph.indptr.tolist() == [0, 1, 1, 4, 4, 5]
    assert graph.indices.tolist() == [1, 4, 0, 1, 2]
    assert graph.edge_attributes[ORIGINAL_EDGE_ID].tolist() == [1, 0, 2, 3, 4]
    assert (graph.num_nodes, graph.num_edges, graph.is_heterogeneous) == (5, 5, False)


def test_heterogeneous_edges_are_all_there_and_sorted_by_type():
    graph = csc.heterogeneous(NODES, arrays(EDGES))

    assert graph.node_type_to_id == {"item": 0, "user": 1}
    assert graph.edge_type_to_id == {
        "item:liked_by:user": 0,
        "user:knows:user": 1,
        "user:likes:item": 2,
    }
    assert graph.node_type_offset.tolist() == [0, 4, 7]
    found = set()
    names = {number: name for name, number in graph.edge_type_to_id.items()}
    for node in range(7):
        begin, end = graph.indptr[node], graph.indptr[node + 1]
        types = graph.type_per_edge[begin:end].tolist()
        assert types == sorted(types)
        for position in range(begin, end):
            name = names[int(graph.type_per_edge[position])]
            original = int(graph.edge_attributes[ORIGINAL_EDGE_ID][position])
            source = int(graph.indices[position]) - (4 if name.startswith("user") else 0)
            destination = node - (4 if name.endswith("user") else 0)
            assert (source, destination) == (EDGES[name][0][original], EDGES[name][1][original])
            found.add((name, original))
    assert len(found) == graph.num_edges == 12


def test_pairs_are_distinct_edges_of_the_type():
    graph = csc.heterogeneous(NODES, arrays(EDGES), keep_edge_ids=False)

    pairs = splits.sample_pairs(graph, "user:likes:item", 4)

    assert graph.edge_attributes == {}
    assert [len(pairs[part]) for part in ("train", "valid", "test")] == [2, 1, 1]
    sampled = torch.cat(list(pairs.values())).tolist()
    assert all(
        [source, destination] in [[0, 3], [2, 3], [2, 0], [1, 1]] for source, destination in sampled
    )
    everything = torch.cat(list(splits.sample_pairs(graph, "user:likes:item", 99).values()))
    assert sorted(everything.tolist()) == [[0, 3], [0, 3], [1, 1], [2, 0], [2, 3]]


def test_splits_cover_every_item_once_and_stay_as_they_are():
    parts = splits.split(1000)

    assert [len(ids) for ids in parts.values()] == [600, 200, 200]
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(1000))
    # Recorded: another order would change every published accuracy.
    assert parts["train"][:5].tolist() == [558, 992, 196, 963, 472]


@pytest.mark.dgl
@pytest.mark.parametrize("fanouts", [[-1], [-1, -1, -1]])
def test_graphbolt_samples_the_edges_and_their_ids(fanouts):
    gb = pytest.importorskip("dgl.graphbolt")
    topology = csc.heterogeneous(NODES, arrays(EDGES))
    graph = gb.fused_csc_sampling_graph(
        topology.indptr,
        topology.indices,
        topology.node_type_offset,
        topology.type_per_edge,
        topology.node_type_to_id,
        topology.edge_type_to_id,
        None,
        topology.edge_attributes,
    )
    seeds = {"user": torch.arange(3), "item": torch.arange(4)}

    sampled = graph.sample_neighbors(seeds, torch.tensor(fanouts))

    for name, (sources, destinations) in EDGES.items():
        ids = sampled.original_edge_ids[name]
        part = sampled.sampled_csc[name]
        owners = torch.repeat_interleave(torch.arange(len(part.indptr) - 1), part.indptr.diff())
        assert part.indices.tolist() == [sources[i] for i in ids.tolist()]
        assert owners.tolist() == [destinations[i] for i in ids.tolist()]
        assert sorted(ids.tolist()) == list(range(len(sources)))
