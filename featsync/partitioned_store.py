"""A store of whole tables made into one of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from featsync._graphbolt import gb, known_keys, table_of
from featsync.errors import ConfigError
from featsync.mapped import file_of
from featsync.partition import OwnerPartition, Partition, RangePartition
from featsync.partitioned_feature import PartitionedFeature
from featsync.partitioners import contiguous, partition_nodes
from featsync.table import TensorTable

__all__ = ["partitioned_store", "split_nodes"]


def split_nodes(graph: Any, method: str) -> dict[str | None, Partition]:
    """Split the nodes of a graph over all ranks; collective among them.

    Args:
        graph: A ``gb.FusedCSCSamplingGraph``.
        method: A name of `PARTITIONERS`.

    Returns:
        By node type, in the order in which the graph numbers them, who holds which node; each type
        numbers its nodes from 0.
    """
    num_ranks = _num_ranks()
    nodes = _of_first_rank(partition_nodes(graph, num_ranks, method), num_ranks)
    types = graph.node_type_to_id
    if types is None:
        return {None: nodes}
    names = sorted(types, key=types.__getitem__)
    starts = graph.node_type_offset.tolist()
    if isinstance(nodes, RangePartition):
        # One run of all nodes would give whole types to a rank.
        return {
            name: contiguous(end - start, num_ranks)
            for name, (start, end) in zip(names, pairwise(starts), strict=True)
        }
    return {
        name: OwnerPartition(nodes.owners[start:end], num_ranks)
        for name, (start, end) in zip(names, pairwise(starts), strict=True)
    }


def partitioned_store(store: Any, nodes: Mapping[str | None, Partition]) -> Any:
    """Split the tables of a store over all ranks; collective among them.

    Each rank takes its part of the tables that it has loaded and lets go of the rest. Node
    features are split as their nodes are, edge features into runs of equal length.

    Args:
        store: A ``gb.FeatureStore`` of tensors, the same on all ranks.
        nodes: Who holds which node, by type; see `split_nodes`.

    Returns:
        A ``gb.BasicFeatureStore`` of `PartitionedFeature`.

    Raises:
        ConfigError: A feature is no tensor, or the parts do not make a table.
    """
    rank, num_ranks = 0 if _is_alone() else dist.get_rank(), _num_ranks()
    features = {}
    for key in known_keys(store) or ():
        table = table_of(store, key)
        if not isinstance(table, TensorTable):
            raise ConfigError(
                f"partition: feature {key} is no tensor but has its own read(), and cannot be split"
            )
        of_type = nodes.get(key.type) if key.domain == "node" else None
        partition = of_type or contiguous(table.num_rows, num_ranks)
        part = _part(table, partition, rank)
        features[tuple(key)] = PartitionedFeature(part, partition, name=str(key))
    return gb.BasicFeatureStore(features)


def _part(table: TensorTable, partition: Partition, rank: int) -> torch.Tensor:
    if partition.num_rows != table.num_rows:
        raise ConfigError(
            f"partition: feature {table.key} has {table.num_rows} rows for {partition.num_rows} "
            "nodes: table and graph do not match"
        )
    if isinstance(partition, RangePartition):
        run = table.tensor[partition.bounds[rank] : partition.bounds[rank + 1]]
        # What is mapped from a file stays there. A view of anything else would keep all of it.
        return run if file_of(run) is not None else run.clone()
    return table.tensor[torch.from_numpy(partition.rows_of(rank))]


def _of_first_rank(partition: Partition, num_ranks: int) -> Partition:
    """Take what the first rank drew."""
    if num_ranks == 1 or isinstance(partition, RangePartition):
        return partition
    owners = torch.from_numpy(partition.owners).to(torch.int64)
    dist.broadcast(owners, src=0)
    return OwnerPartition(owners.numpy(), num_ranks)


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())


def _num_ranks() -> int:
    return 1 if _is_alone() else dist.get_world_size()
