"""From a configuration to a GraphBolt dataloader: the only place where names become stages.

A stage is any datapipe function that is registered in this process: GraphBolt's, featsync's, or the
user's own. Graph and feature store are given to the parameters that want them, by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.utils.data import IterDataPipe

from featsync import config as configuration
from featsync._graphbolt import gb, known_keys, seeded
from featsync.allocator import keep_memory
from featsync.config import Config
from featsync.errors import ConfigError, unknown_name
from featsync.feature_keys import check_feature_keys
from featsync.loading import LoadedDataset, load_dataset

__all__ = ["BoundStage", "as_config", "bind_stages", "build"]

# Parameters of stages that `build` fills: which part of the dataset each of them wants.
INJECTED: Final = {
    "graph": "graph",
    "feature_store": "features",
    "features": "features",
    "store": "features",
}
# Modules whose datapipe functions are no stages of a GraphBolt pipeline: they read files, print …
_FOREIGN_MODULES: Final = ("torch.", "torchdata.")


@dataclass(frozen=True)
class BoundStage:
    """A stage of the configuration with all its arguments named and known to exist.

    Attributes:
        where: Its place in the configuration, for messages.
        name: Its datapipe function.
        arguments: What the configuration says.
        injected: Parameters to fill, with the attribute of `LoadedDataset` that each wants.
    """

    where: str
    name: str
    arguments: Mapping[str, Any]
    injected: Mapping[str, str]


def build(
    config: Config | Mapping[str, Any] | str | Path,
    rank: int | None = None,
    dataset: LoadedDataset | None = None,
    split: str = "train",
) -> Any:
    """Make the dataloader that a configuration describes.

    Collective only where the configuration says ``share: true`` and no ``dataset`` is given.

    Args:
        config: A configuration, the mapping it is made from, or its file.
        rank: The caller's rank, checked against the process group; ``None``: as the group says.
        dataset: What `load_dataset` gave for the same settings, to load it once for many loaders.
        split: ``train``, ``valid`` or ``test``. Only ``train`` is shuffled.

    Returns:
        The stock ``gb.DataLoader``.

    Raises:
        ConfigError: Something in the configuration is wrong, or does not fit the dataset.
    """
    config = as_config(config)
    _check_rank(rank)
    stages = bind_stages(config)
    if config.allocator == "keep":
        keep_memory()
    if dataset is None:
        dataset = load_dataset(config)
    if split not in dataset.items:
        raise unknown_name("build: split", split, dataset.items)
    if (known := known_keys(dataset.features)) is not None:
        check_feature_keys(config, known)
    datapipe = _item_sampler(
        config, dataset.items[split], shuffle=config.shuffle and split == "train"
    )
    for stage in stages:
        datapipe = _add(datapipe, stage, dataset)
    return gb.DataLoader(datapipe, num_workers=config.num_workers)


def as_config(config: Config | Mapping[str, Any] | str | Path) -> Config:
    """Take a configuration in any of its forms."""
    if isinstance(config, Config):
        return config
    if isinstance(config, str | Path):
        return configuration.load(config)
    return configuration.parse(config)


def bind_stages(config: Config) -> list[BoundStage]:
    """Find every stage and check the names of its arguments; nothing is built.

    Raises:
        ConfigError: A stage or an argument is not known, or a needed one is missing.
    """
    known = _known_stages()
    bound = []
    for index, stage in enumerate(config.stages):
        where = f"{config.source}: stages[{index}]"
        if stage.name not in known:
            raise unknown_name(where, stage.name, known)
        where = f"{where}.{stage.name}"
        parameters = _parameters(known[stage.name])
        injected = {name: INJECTED[name] for name in parameters if name in INJECTED}
        _check_arguments(where, stage.arguments, parameters, injected)
        bound.append(BoundStage(where, stage.name, stage.arguments, injected))
    return bound


def _known_stages() -> dict[str, Any]:
    """All registered datapipe functions that can be stages, with what each of them builds."""
    known = {}
    for name, function in IterDataPipe.functions.items():
        # torch registers a class as a partial of which the class is the first argument.
        builder = next(iter(getattr(function, "args", ())), function)
        if not builder.__module__.startswith(_FOREIGN_MODULES) and not name.startswith("_"):
            known[name] = builder
    return known


def _parameters(builder: Any) -> dict[str, inspect.Parameter]:
    """All parameters of a stage but the first, which is the datapipe before it."""
    parameters = list(inspect.signature(builder).parameters.values())[1:]
    return {parameter.name: parameter for parameter in parameters}


def _check_arguments(
    where: str,
    arguments: Mapping[str, Any],
    parameters: Mapping[str, inspect.Parameter],
    injected: Mapping[str, str],
) -> None:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    takes_any = any(parameter.kind in variable for parameter in parameters.values())
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind not in variable and name not in injected
    }
    for name in arguments:
        if name in injected:
            raise ConfigError(f"{where}.{name} is given by the dataset; leave it out")
        if name not in named and not takes_any:
            raise unknown_name(f"{where}.{name}: argument", name, named)
    for name, parameter in named.items():
        if parameter.default is inspect.Parameter.empty and name not in arguments:
            raise ConfigError(f"{where}.{name} is missing; it has no default")


def _add(datapipe: Any, stage: BoundStage, dataset: LoadedDataset) -> Any:
    arguments = {name: _to_stage_value(name, value) for name, value in stage.arguments.items()}
    arguments |= {name: getattr(dataset, source) for name, source in stage.injected.items()}
    try:
        return getattr(datapipe, stage.name)(**arguments)
    except ConfigError as error:
        raise ConfigError(f"{stage.where}: {error}") from error
    except (AssertionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{stage.where} refuses its arguments: {reason}") from error


def _to_stage_value(name: str, value: Any) -> Any:
    """Give fanouts by edge type (a list in the list) as the tensors that GraphBolt wants."""
    if name == "fanouts" and isinstance(value, list):
        return [torch.tensor(entry) if isinstance(entry, list) else entry for entry in value]
    return value


def _item_sampler(config: Config, items: Any, *, shuffle: bool) -> Any:
    is_split_over_ranks = (
        dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    )
    sampler_class = gb.DistributedItemSampler if is_split_over_ranks else gb.ItemSampler
    arguments: dict[str, Any] = {"batch_size": config.batch_size, "shuffle": shuffle}
    return seeded(sampler_class, items, config.seed, **arguments)


def _check_rank(rank: int | None) -> None:
    actual = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if rank is not None and rank != actual:
        raise ConfigError(
            f"build: rank = {rank}, but this process is rank {actual}; initialise the process group"
            " before, and leave rank out"
        )
