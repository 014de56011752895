"""The model that fits a configuration and its dataset, ready to train; used by scripts as well."""

from __future__ import annotations

from typing import Any

import torch

from featsync.bench.inputs import Delivered, Resident
from featsync.bench.model import GraphSage, NodeType, Relation, Shape
from featsync.bench.objective import OBJECTIVES
from featsync.bench.steps import TrainStep
from featsync.config import Config
from featsync.errors import ConfigError
from featsync.feature_keys import feature_keys
from featsync.loading import LoadedDataset

HIDDEN = 64


def train_step(config: Config, dataset: LoadedDataset, world_size: int = 1) -> TrainStep:
    """Make a GraphSAGE with one layer a fanout, its loss and its optimizer.

    Collective where ``world_size`` is over 1: the ranks start from the same parameters.

    Raises:
        ConfigError: The stages do not say how many layers are sampled.
    """
    torch.manual_seed(config.seed)
    model = GraphSage(model_shape(config, dataset))
    return TrainStep(model, OBJECTIVES[config.task](), world_size)


def delivered_source(config: Config, dataset: LoadedDataset) -> Delivered:
    """What feeds the model with the features that the pipeline delivers."""
    return Delivered(feature_keys(config), node_types(dataset))


def resident_source(config: Config, dataset: LoadedDataset) -> Resident:
    """What feeds the model with rows of the same shape that lie in memory already."""
    keys = feature_keys(config)
    widths = {key: dataset.features.size(*key).numel() for key in keys}
    return Resident(keys, widths, node_types(dataset))


def model_shape(config: Config, dataset: LoadedDataset) -> Shape:
    """Read off the configuration and the dataset what the model must look like."""
    nodes: dict[NodeType, int] = dict.fromkeys(node_types(dataset), 0)
    edges: dict[Relation, int] = {}
    for key in feature_keys(config):
        width = dataset.features.size(*key).numel()
        if key.domain == "node":
            nodes[key.type] += width
        elif dataset.has_edge_ids:
            edges[key.type] = edges.get(key.type, 0) + width
    return Shape(
        node_widths=nodes,
        edge_widths=edges,
        relations=relations(dataset),
        num_layers=num_layers(config),
        num_outputs=dataset.num_classes if config.task == "node_classification" else HIDDEN,
        hidden=HIDDEN,
    )


def num_layers(config: Config) -> int:
    """How many layers the stages sample.

    Raises:
        ConfigError: They do not say.
    """
    for stage in config.stages:
        fanouts = stage.arguments.get("fanouts")
        if isinstance(fanouts, list) and fanouts:
            return len(fanouts)
        count = stage.arguments.get("num_layers")
        if isinstance(count, int) and count > 0:
            return count
    raise ConfigError(
        f"{config.source}: no stage says how many layers are sampled (fanouts, num_layers), which"
        " the model needs; choose --model none or name them"
    )


def node_types(dataset: LoadedDataset) -> tuple[NodeType, ...]:
    """All node types; ``(None,)`` on a homogeneous graph."""
    return _names(dataset.graph.node_type_to_id)


def relations(dataset: LoadedDataset) -> tuple[Relation, ...]:
    """All relations as ``source:name:target``; ``(None,)`` on a homogeneous graph."""
    return _names(dataset.graph.edge_type_to_id)


def _names(ids: Any) -> tuple[str | None, ...]:
    return tuple(ids) if ids else (None,)
