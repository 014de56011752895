"""A store of whole tables made into one of which each rank holds a part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from featsync._graphbolt import gb, known_keys, table_of
from featsync.errors import ConfigError
from featsync.partition import OwnerPartition, Partition, RangePartition
from featsync.partitioned_feature import PartitionedFeature
from featsync.partitioners import contiguous, partition_nodes
from featsync.table import TensorTable

__all__ = ["partitioned_store"]


def partitioned_store(store: Any, graph: Any, method: str) -> Any:
    """Split the tables of a store over all ranks; collective among them.

    Each rank takes its part of the tables that it has loaded and lets go of the rest. Node
    features are split as their nodes are, edge features into runs of equal length.

    Args:
        store: A ``gb.FeatureStore`` of tensors, the same on all ranks.
        graph: A ``gb.FusedCSCSamplingGraph``, whose nodes are split.
        method: A name of `PARTITIONERS`.

    Returns:
        A ``gb.BasicFeatureStore`` of `PartitionedFeature`.

    Raises:
        ConfigError: A feature is no tensor, or the parts do not make a table.
    """
    is_alone = not (dist.is_available() and dist.is_initialized())
    rank, num_ranks = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
    nodes = _of_first_rank(partition_nodes(graph, num_ranks, method), num_ranks, is_alone)
    by_type = _by_type(nodes, graph, num_ranks)
    features = {}
    for key in known_keys(store) or ():
        table = table_of(store, key)
        if not isinstance(table, TensorTable):
            raise ConfigError(
                f"partition: feature {key} is no tensor but has its own read(), and cannot be split"
            )
        of_type = by_type.get(key.type) if key.domain == "node" else None
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
        # A view: what is mapped from a file stays there.
        return table.tensor[partition.bounds[rank] : partition.bounds[rank + 1]]
    return table.tensor[torch.from_numpy(partition.rows_of(rank))]


def _of_first_rank(partition: Partition, num_ranks: int, is_alone: bool) -> Partition:
    """Take what the first rank drew."""
    if is_alone or isinstance(partition, RangePartition):
        return partition
    owners = torch.from_numpy(partition.owners).to(torch.int64)
    dist.broadcast(owners, src=0)
    return OwnerPartition(owners.numpy(), num_ranks)


def _by_type(nodes: Partition, graph: Any, num_ranks: int) -> Mapping[str | None, Partition]:
    """Split the partition of all nodes by node type; each type numbers its nodes from 0."""
    types = graph.node_type_to_id
    if types is None:
        return {None: nodes}
    if isinstance(nodes, RangePartition):
        # One run of all nodes would give whole types to a rank.
        counts = torch.diff(graph.node_type_offset).tolist()
        return {name: contiguous(counts[number], num_ranks) for name, number in types.items()}
    owners, starts = nodes.owners, graph.node_type_offset.tolist()
    return {
        name: OwnerPartition(owners[starts[number] : starts[number + 1]], num_ranks)
        for name, number in types.items()
    }
