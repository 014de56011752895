"""Which features a configuration asks for: read from the stages' arguments, nothing is built."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from featsync.config import Config, Stage
from featsync.errors import ConfigError, unknown_name
from featsync.plan import FeatureKey

# Arguments by which any stage names features, as GraphBolt's `fetch_feature` does.
_ARGUMENTS: Final = {"node_feature_keys": "node", "edge_feature_keys": "edge"}


def feature_keys(config: Config) -> tuple[FeatureKey, ...]:
    """All features that the stages ask for, each once, in order.

    Raises:
        ConfigError: The keys are neither a list of names nor such a list for each type.
    """
    found: dict[FeatureKey, None] = {}
    for index, stage in enumerate(config.stages):
        for argument, domain in _ARGUMENTS.items():
            where = f"{config.source}: stages[{index}].{stage.name}.{argument}"
            found |= dict.fromkeys(_keys(where, domain, stage.arguments.get(argument)))
    return tuple(found)


def without_feature_keys(config: Config) -> Config:
    """The same pipeline, asking for no feature: what is left is the floor under all of them."""
    stages = [
        Stage(
            name=stage.name,
            arguments={k: v for k, v in stage.arguments.items() if k not in _ARGUMENTS},
        )
        for stage in config.stages
    ]
    return config.model_copy(update={"stages": stages})


def check_feature_keys(config: Config, available: Iterable[tuple[str, str | None, str]]) -> None:
    """Refuse features that the dataset does not have.

    Args:
        config: What asks.
        available: (domain, type, name) of all features of the dataset.

    Raises:
        ConfigError: One is not there, or the form of the keys does not fit the graph.
    """
    known = {str(FeatureKey(*key)) for key in available}
    typed = {key.split("/")[1] != "None" for key in known}
    for key in feature_keys(config):
        if str(key) in known:
            continue
        if typed == {True} and key.type is None:
            raise ConfigError(
                f"{config.source}: {key.domain}_feature_keys names {key.name!r} without a type, but"
                f" the graph is heterogeneous; write `{{type: [{key.name}]}}`. There are"
                f" {', '.join(sorted(known))}."
            )
        if typed == {False} and key.type is not None:
            raise ConfigError(
                f"{config.source}: {key.domain}_feature_keys names the type {key.type!r}, but the"
                f" graph is homogeneous; write `[{key.name}]`."
                f" There are {', '.join(sorted(known))}."
            )
        raise unknown_name(f"{config.source}: feature", str(key), known)


def _keys(where: str, domain: str, value: Any) -> list[FeatureKey]:
    by_type = value if isinstance(value, dict) else {None: value or []}
    keys = []
    for type_name, names in by_type.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(
                f"{where} = {value!r} is not allowed; give a list of names, or such a list by type"
            )
        keys += [FeatureKey(domain, type_name, name) for name in names]
    return keys
