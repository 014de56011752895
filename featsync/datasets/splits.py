"""Divides the items of a dataset into train, valid and test, always in the same way."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from featsync.datasets.graph_data import Topology
from featsync.datasets.hashed_words import mix

SHARES = {"train": 0.6, "valid": 0.2, "test": 0.2}

Integers = npt.NDArray[np.int64]


def split(num_items: int, train_share: float = SHARES["train"]) -> dict[str, Integers]:
    """Assign the numbers below `num_items` to the parts, in the shares of `SHARES`.

    A smaller share of training items leaves the others out of the split altogether.

    The order is that of a hash of the number, not of a random generator: it is the same for every
    version of every library. Within a part the numbers are in that order too.
    """
    order = np.argsort(mix(np.arange(num_items, dtype=np.uint64)), kind="stable")
    bounds = np.round(np.cumsum(list(SHARES.values())) * num_items).astype(np.int64)
    parts = dict(zip(SHARES, np.split(order, bounds[:-1]), strict=True))
    parts["train"] = parts["train"][: round(train_share * num_items)]
    return parts


def seeds_and_labels(
    labels: Integers, train_share: float = SHARES["train"]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Split labelled nodes.

    Args:
        labels: ``(nodes,)``, the class of each node.
        train_share: Share of the nodes that are trained on, at most that of `SHARES`.

    Returns:
        By part, node ids and their labels, each ``(seeds,)`` int64.
    """
    return {
        part: (torch.from_numpy(ids), torch.from_numpy(labels[ids]))
        for part, ids in split(len(labels), train_share).items()
    }


def sample_pairs(graph: Topology, edge_type: str | None, num_pairs: int) -> dict[str, Tensor]:
    """Sample edges of a graph and split them.

    Args:
        graph: The graph. The sampled edges stay in it.
        edge_type: Which edges to sample, in a heterogeneous graph.
        num_pairs: How many, all parts together; fewer if there are not as many.

    Returns:
        By part, source and destination of each edge, ``(pairs, 2)`` int64, counted per node type.
    """
    positions, source_offset, destination_offset = _candidates(graph, edge_type)
    available = graph.num_edges if positions is None else len(positions)
    chosen = min(num_pairs, available)
    # Evenly spaced over the edges: no two alike, and nothing as long as the list of all edges.
    picked = np.arange(chosen, dtype=np.int64) * available // max(chosen, 1)
    if positions is not None:
        picked = positions[picked]
    sources = graph.indices.numpy()[picked] - source_offset
    destinations = np.searchsorted(graph.indptr.numpy(), picked, side="right") - 1
    pairs = np.stack([sources, destinations - destination_offset], axis=1)
    return {part: torch.from_numpy(pairs[ids]) for part, ids in split(chosen).items()}


def _candidates(graph: Topology, edge_type: str | None) -> tuple[Integers | None, int, int]:
    """Positions of the edges of a type (``None``: all), first numbers of the types of its ends."""
    if edge_type is None or graph.type_per_edge is None or graph.node_type_offset is None:
        return None, 0, 0
    node_types: Mapping[str, int] = graph.node_type_to_id or {}
    edge_types: Mapping[str, int] = graph.edge_type_to_id or {}
    source, _, destination = edge_type.split(":")
    positions = np.flatnonzero(graph.type_per_edge.numpy() == edge_types[edge_type])
    offsets = graph.node_type_offset.tolist()
    return positions, offsets[node_types[source]], offsets[node_types[destination]]
