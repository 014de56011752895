"""A dataset as GraphBolt objects, loaded once and used by any number of loaders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import featsync
from featsync import datasets
from featsync._graphbolt import gb
from featsync.config import Config, Task
from featsync.errors import ConfigError
from featsync.ondisk import open_folder
from featsync.partition import Partition
from featsync.partitioned_store import partitioned_store, split_nodes

__all__ = ["LoadedDataset", "load_dataset", "load_to_compare"]


@dataclass(frozen=True)
class LoadedDataset:
    """What pipelines of one dataset and task need; loaders share it and do not change it.

    Attributes:
        graph: A ``gb.FusedCSCSamplingGraph``.
        features: A ``gb.FeatureStore``.
        items: The ``gb.ItemSet`` or ``gb.ItemSetDict`` of each split: train, valid, test.
        num_classes: Of node classification; 0 for link prediction.
        nodes_by_type: Where features are split over ranks, who holds which node, see `split_nodes`.
    """

    graph: Any
    features: Any
    items: Mapping[str, Any]
    num_classes: int
    nodes_by_type: Mapping[str | None, Partition] = field(default_factory=dict)

    @property
    def has_edge_ids(self) -> bool:
        """Whether sampled edges say which rows of the edge features are theirs."""
        return gb.ORIGINAL_EDGE_ID in (self.graph.edge_attributes or {})


def load_dataset(config: Config) -> LoadedDataset:
    """Load, or generate, what a configuration names.

    Collective where the configuration says ``share: true``: the ranks of a host then hold each
    table once; or ``partition``: each rank then holds a part.

    Raises:
        ConfigError: The dataset is not there, or has no such task.
    """
    return _placed(_load(config), config)


def load_to_compare(config: Config) -> tuple[LoadedDataset, Any]:
    """Load a dataset, and keep its tables whole beside it, to compare what is delivered with them.

    Collective as `load_dataset` is. What is read from a table that is split goes the way that is to
    be checked; so the whole one stays as well, once a machine: in shared memory, or in the file
    that it is mapped from.

    Returns:
        The dataset, and a ``gb.FeatureStore`` of whole tables, each of which this process reads.

    Raises:
        ConfigError: See `load_dataset`.
        CapacityError: The machine's shared memory does not hold the tables twice.
    """
    whole = _load(config)
    dataset = _placed(whole, config)
    if config.partition is None:
        return dataset, dataset.features
    is_alone = not (dist.is_available() and dist.is_initialized())
    return dataset, whole.features if is_alone else featsync.share(whole.features)


def _placed(dataset: LoadedDataset, config: Config) -> LoadedDataset:
    """Put the tables where the configuration wants them; collective if it wants them elsewhere."""
    if config.share:
        return replace(dataset, features=featsync.share(dataset.features))
    if config.partition is not None:
        nodes = split_nodes(dataset.graph, config.partition)
        parts = partitioned_store(dataset.features, nodes)
        return replace(dataset, features=parts, nodes_by_type=nodes)
    return dataset


def _load(config: Config) -> LoadedDataset:
    try:
        folder = datasets.folder_of(config.dataset, _save_graph)
        if folder is not None:
            return LoadedDataset(*open_folder(str(folder), config.task))
        return from_graph_data(datasets.load(config.dataset, config.task), config.task)
    except ConfigError as error:
        raise ConfigError(f"{config.source}: {error}") from error


def from_graph_data(data: datasets.GraphData, task: Task) -> LoadedDataset:
    """Wrap plain tensors as GraphBolt objects; no table is copied."""
    features = {key: gb.TorchBasedFeature(tensor) for key, tensor in data.features.items()}
    return LoadedDataset(
        graph=_graph_of(data),
        features=gb.BasicFeatureStore(features),
        items={name: _items_of(split, task) for name, split in data.splits.items()},
        num_classes=data.num_classes if task == "node_classification" else 0,
    )


def _items_of(split: datasets.Split, task: Task) -> Any:
    """Name the seeds ``seeds``, a name that every version of GraphBolt understands."""
    if task == "link_prediction":
        return _item_set(("seeds",), split.pairs)
    return _item_set(("seeds", "labels"), split.seeds, split.labels)


def _item_set(names: tuple[str, ...], *columns: Any) -> Any:
    first = columns[0]
    if not isinstance(first, Mapping):
        return gb.ItemSet(columns, names=names)
    by_type = {
        name: gb.ItemSet(tuple(column[name] for column in columns), names=names) for name in first
    }
    return gb.ItemSetDict(by_type)


def _graph_of(topology: datasets.Topology) -> Any:
    return gb.fused_csc_sampling_graph(
        topology.indptr,
        topology.indices,
        node_type_offset=topology.node_type_offset,
        type_per_edge=topology.type_per_edge,
        node_type_to_id=_optional(topology.node_type_to_id),
        edge_type_to_id=_optional(topology.edge_type_to_id),
        edge_attributes=_optional(topology.edge_attributes),
    )


def _save_graph(topology: datasets.Topology, path: Path) -> None:
    """Write a graph as GraphBolt's own preprocessing does."""
    torch.save(_graph_of(topology), path)


def _optional(mapping: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A plain dictionary, which GraphBolt's C++ wants; ``None`` for nothing."""
    return dict(mapping) if mapping else None
