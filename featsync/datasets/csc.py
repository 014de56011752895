"""From lists of edges to the CSC form that GraphBolt samples from."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from featsync.datasets.graph_data import ORIGINAL_EDGE_ID, Topology

Integers = npt.NDArray[np.int64]
Edges = tuple[Integers, Integers]


def homogeneous(num_nodes: int, edges: Edges) -> Topology:
    """Build a graph without types.

    Args:
        num_nodes: Number of nodes.
        edges: Sources and destinations, each ``(edges,)``. The position of an edge in them is its
            original id.
    """
    sources, destinations = edges
    order = np.argsort(destinations, kind="stable")
    return Topology(
        indptr=torch.from_numpy(_indptr(destinations, num_nodes)),
        indices=torch.from_numpy(sources[order]),
        edge_attributes={ORIGINAL_EDGE_ID: torch.from_numpy(order)},
    )


def heterogeneous(
    num_nodes: Mapping[str, int], edges: Mapping[str, Edges], keep_edge_ids: bool = True
) -> Topology:
    """Build a graph with node and edge types.

    Args:
        num_nodes: Number of nodes by node type.
        edges: By edge type (``source:relation:destination``) sources and destinations, each
            ``(edges of that type,)``, counted per node type. The position of an edge in them is its
            original id.
        keep_edge_ids: Whether the graph records the original ids.
    """
    node_type_to_id = {name: number for number, name in enumerate(sorted(num_nodes))}
    edge_type_to_id = {name: number for number, name in enumerate(sorted(edges))}
    counts = [num_nodes[name] for name in node_type_to_id]
    offset = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    sizes = np.array([len(edges[name][0]) for name in edge_type_to_id], dtype=np.int64)

    def gather(end: int) -> Integers:
        # Node type at the start (0) or the end (2) of ``source:relation:destination``.
        types = [node_type_to_id[name.split(":")[2 * end]] for name in edge_type_to_id]
        parts = [edges[name][end] for name in edge_type_to_id]
        return np.concatenate(
            [part + offset[type_] for part, type_ in zip(parts, types, strict=True)]
        )

    destinations = gather(1)
    # Stable: the edges into one node stay sorted by type, which sampling per type relies on.
    order = np.argsort(destinations, kind="stable")
    indptr = _indptr(destinations, int(offset[-1]))
    del destinations
    indices = gather(0)[order]
    edge_types = np.repeat(np.arange(len(sizes), dtype=np.uint8), sizes)[order]
    attributes = {}
    if keep_edge_ids:
        first = np.cumsum(sizes) - sizes
        order -= first[edge_types]
        attributes[ORIGINAL_EDGE_ID] = torch.from_numpy(order)
    return Topology(
        indptr=torch.from_numpy(indptr),
        indices=torch.from_numpy(indices),
        node_type_offset=torch.from_numpy(offset),
        type_per_edge=torch.from_numpy(edge_types),
        node_type_to_id=node_type_to_id,
        edge_type_to_id=edge_type_to_id,
        edge_attributes=attributes,
    )


def _indptr(destinations: Integers, num_nodes: int) -> Integers:
    degrees = np.bincount(destinations, minlength=num_nodes)
    return np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64)
