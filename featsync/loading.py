"""A dataset as GraphBolt objects, loaded once and used by any number of loaders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import featsync
from featsync import datasets
from featsync._graphbolt import gb
from featsync.config import Config
from featsync.ondisk import open_folder

__all__ = ["LoadedDataset", "load_dataset"]


@dataclass(frozen=True)
class LoadedDataset:
    """What pipelines of one dataset and task need; loaders share it and do not change it.

    Attributes:
        graph: A ``gb.FusedCSCSamplingGraph``.
        features: A ``gb.FeatureStore``.
        items: The ``gb.ItemSet`` or ``gb.ItemSetDict`` of each split: train, valid, test.
        num_classes: Of node classification; 0 for link prediction.
    """

    graph: Any
    features: Any
    items: Mapping[str, Any]
    num_classes: int

    @property
    def has_edge_ids(self) -> bool:
        """Whether sampled edges say which rows of the edge features are theirs."""
        return gb.ORIGINAL_EDGE_ID in (self.graph.edge_attributes or {})


def load_dataset(config: Config) -> LoadedDataset:
    """Load, or generate, what a configuration names.

    Collective where the configuration says ``share: true``: the ranks of a host then hold each
    table once.

    Raises:
        ConfigError: The dataset is not there, or has no such task.
    """
    dataset = _load(config)
    if not config.share:
        return dataset
    shared = featsync.share(dataset.features)
    return LoadedDataset(dataset.graph, shared, dataset.items, dataset.num_classes)


def _load(config: Config) -> LoadedDataset:
    spec = config.dataset
    if isinstance(spec, dict) and "path" in spec:
        return LoadedDataset(*open_folder(spec["path"], config.task))
    if spec == "debian-files" or (isinstance(spec, dict) and "debian-files" in spec):
        raise NotImplementedError
    return from_graph_data(datasets.load(spec, config.task))


def from_graph_data(data: datasets.GraphData) -> LoadedDataset:
    """Wrap plain tensors as GraphBolt objects; nothing is copied."""
    raise NotImplementedError
