"""Ways to split the nodes of a graph over ranks, and how many rows each will have to send for.

=============  ================================================  =========================
method         who holds a node                                  rows of other ranks
=============  ================================================  =========================
contiguous     runs of equal length, in the order of ids         what the order happens to give
hashed         a hash of its id                                  1 - 1/ranks: the worst, evenly
metis          METIS by way of DGL: few edges between parts of   the fewest
               nearly equal size
=============  ================================================  =========================

METIS: Karypis and Kumar, A fast and high quality multilevel scheme for partitioning irregular
graphs, 1998.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from featsync._graphbolt import metis_owners
from featsync.errors import ConfigError, unknown_name
from featsync.partition import OwnerPartition, Partition, RangePartition

__all__ = ["PARTITIONERS", "joined", "partition_nodes", "remote_share"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def contiguous(num_nodes: int, num_parts: int) -> RangePartition:
    """Split ids into runs of equal length.

    Example:
        >>> contiguous(10, 3)
        RangePartition([0, 3, 6, 10])
    """
    return RangePartition([num_nodes * part // num_parts for part in range(num_parts + 1)])


def hashed(num_nodes: int, num_parts: int) -> OwnerPartition:
    """Give each node to the rank that a hash of its id names; the same everywhere, every time."""
    mixed = np.arange(num_nodes, dtype=np.uint64) * _GOLDEN
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return OwnerPartition((mixed % np.uint64(num_parts)).astype(np.int16), num_parts)


PARTITIONERS: dict[str, Callable[[Any, int], Partition]] = {
    "contiguous": lambda graph, num_parts: contiguous(graph.total_num_nodes, num_parts),
    "hashed": lambda graph, num_parts: hashed(graph.total_num_nodes, num_parts),
    "metis": lambda graph, num_parts: OwnerPartition(
        metis_owners(graph, num_parts).numpy(), num_parts
    ),
}


def partition_nodes(graph: Any, num_parts: int, method: str = "metis") -> Partition:
    """Split the nodes of a graph; not collective.

    METIS draws lots: let one rank split, and tell the others.

    Args:
        graph: A ``gb.FusedCSCSamplingGraph``; nodes of all types in one numbering.
        num_parts: How many ranks will hold them.
        method: A name of `PARTITIONERS`.

    Raises:
        ConfigError: Not a method, or more parts than nodes.
    """
    if method not in PARTITIONERS:
        raise unknown_name("partition_nodes: method", method, PARTITIONERS)
    if not 1 <= num_parts <= max(1, graph.total_num_nodes):
        raise ConfigError(
            f"partition_nodes: {num_parts} parts of {graph.total_num_nodes} nodes; there can be 1 "
            "to as many as there are nodes"
        )
    if num_parts == 1:  # METIS divides by zero
        return contiguous(graph.total_num_nodes, 1)
    return PARTITIONERS[method](graph, num_parts)


def joined(partitions: Sequence[Partition]) -> Partition:
    """Make one partition of several tables that lie end to end, such as nodes of several types.

    Example:
        >>> joined([contiguous(2, 2), contiguous(3, 2)]).owners
        array([0, 1, 0, 1, 1], dtype=int16)
    """
    if len(partitions) == 1:
        return partitions[0]
    owners = np.concatenate([partition.owners for partition in partitions])
    return OwnerPartition(owners, partitions[0].num_ranks)


def remote_share(graph: Any, partition: Partition) -> float:
    """How many rows a rank can expect to need from others, of those it samples.

    Counted on edges: the share of neighbours that another rank holds than the node itself. It is
    what one hop needs whose seeds are the rank's own; further hops need more, seeds of all ranks
    about ``1 - 1/ranks``.

    Args:
        graph: A ``gb.FusedCSCSamplingGraph``.
        partition: Of its nodes.
    """
    degrees = torch.diff(graph.csc_indptr)
    nodes = torch.repeat_interleave(torch.arange(len(degrees)), degrees)
    if len(nodes) == 0:
        return 0.0
    here, _ = partition.locate(nodes.numpy().astype(np.int64, copy=False))
    there, _ = partition.locate(graph.indices.numpy().astype(np.int64, copy=False))
    return float(np.mean(here != there))
