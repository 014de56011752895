"""A pipeline as a YAML file, checked: every wrong key, name or value says where and what is meant.

Only values come out of a file. Nothing in it is imported, looked up in a module or called; which
stages exist is decided by the process that builds the pipeline (`featsync.build`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails

from featsync.datasets import DATASETS
from featsync.datasets.debian_files import DebianFilesOptions
from featsync.datasets.options import read_options
from featsync.errors import ConfigError, unknown_name

__all__ = ["Config", "Stage", "load", "parse"]

Allocator = Literal["default", "keep"]
PartitionMethod = Literal["contiguous", "hashed", "metis"]
Task = Literal["node_classification", "link_prediction"]


class _Checked(BaseModel):
    """Unknown keys are errors, values are never converted, nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Stage(_Checked):
    """One stage of the pipeline, after the item sampler.

    Attributes:
        name: Its datapipe function, such as ``sample_neighbor``.
        arguments: By parameter name, without graph and feature store, which `featsync.build` gives.
    """

    name: str
    arguments: dict[str, Any] = {}


class Config(_Checked):
    """All settings of one pipeline.

    Attributes:
        dataset: A name of `featsync.datasets`, or a mapping from that name to its options;
            ``debian-files``; or ``{path: FOLDER}``.
        task: What is trained; decides which item sets and labels the dataset gives.
        batch_size: Seeds of a minibatch.
        num_workers: Processes that sample; 0 samples in the main process.
        shuffle: Whether training seeds are shuffled anew in each epoch.
        seed: Of the shuffling, the sampling (as far as the host allows) and the model.
        share: Whether the ranks of a host hold each feature table once, in shared memory.
        partition: How node features are split over ranks, each of which then holds its part only;
            edge features are split into runs of equal length.
        allocator: ``keep`` tells glibc, at process start, never to give memory back.
        stages: What follows the item sampler, in order.
    """

    dataset: str | dict[str, Any]
    task: Task = "node_classification"
    batch_size: int = Field(default=1024, ge=1)
    num_workers: int = Field(default=0, ge=0)
    shuffle: bool = True
    seed: int = Field(default=0, ge=0)
    share: bool = False
    partition: PartitionMethod | None = None
    allocator: Allocator = "default"
    stages: list[Stage] = Field(min_length=1)
    _source: str = PrivateAttr(default="configuration")

    @property
    def source(self) -> str:
        """Where the settings come from, for messages: the file, or ``configuration``."""
        return self._source

    @property
    def name(self) -> str:
        """The file's name without folder and ending."""
        return Path(self._source).stem


def load(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a configuration file.

    Args:
        path: The file.
        overrides: Settings that replace those of the file, ``key=value`` or ``key.key=value``.

    Raises:
        ConfigError: The file cannot be read, is not YAML, or says something that is not allowed.
    """
    source = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} cannot be read: {error}. Give a YAML file.") from error
    try:
        # A loader derived from SafeLoader: it makes plain values and nothing else.
        content = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error
    for override in overrides:
        content = _overridden(content, override)
    return parse(content, source)


def parse(content: object, source: str = "configuration") -> Config:
    """Check settings that are already Python values.

    Args:
        content: The mapping that a configuration file holds.
        source: Name of the file, for messages.

    Raises:
        ConfigError: Something is not allowed; all that is wrong on one level is listed.
    """
    settings = _mapping(content, source, "the top level")
    if isinstance(settings.get("stages"), list):
        stages = [
            _stage(entry, source, f"stages[{index}]")
            for index, entry in enumerate(settings["stages"])
        ]
        settings = {**settings, "stages": stages}
    try:
        config = Config.model_validate(settings)
    except ValidationError as error:
        explained = (_explain(details, source) for details in error.errors())
        raise ConfigError("\n".join(explained)) from error
    if config.share and config.partition is not None:
        raise ConfigError(
            f"{source}: share is true and partition = {config.partition!r}; a table is held once a "
            "host, or split over the ranks: leave one of them out"
        )
    _check_dataset(config.dataset, source)
    config._source = source
    return config


def _overridden(content: object, override: str) -> object:
    """Replace one setting; what is not there yet is added, and checked with all others."""
    place, found, text = override.partition("=")
    try:
        value = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override}: the value is not valid YAML: {error}") from error
    if not found or not place:
        raise ConfigError(f"--set {override!r} is not understood; write key=value")
    for key in reversed(place.split(".")):
        value = {key: value}
    return _merged(content, value)


def _merged(content: object, change: object) -> object:
    """Replace what differs, going down only where both are mappings."""
    if not isinstance(content, Mapping) or not isinstance(change, Mapping):
        return change
    merged = {key: _merged(content.get(key), value) for key, value in change.items()}
    return {**content, **merged}


def _check_dataset(dataset: str | dict[str, Any], source: str) -> None:
    known = [*DATASETS, "debian-files", "path"]
    if isinstance(dataset, str):
        name, options = dataset, None
    else:
        name, options = _only_entry(dataset, source, "dataset")
    if name not in known:
        raise unknown_name(f"{source}: dataset", name, known)
    if name == "path":
        if not isinstance(options, str):
            raise ConfigError(f"{source}: dataset.path = {options!r} is no folder; give its name")
        return
    model = DebianFilesOptions if name == "debian-files" else DATASETS[name].options
    read_options(model, f"{source}: dataset.{name}", options)


def _stage(entry: object, source: str, where: str) -> Stage:
    if isinstance(entry, str):
        raise ConfigError(
            f"{source}: {where} = {entry!r} is not a mapping; write `- {entry}: {{}}`"
        )
    name, arguments = _only_entry(entry, source, where)
    if arguments is not None:
        arguments = _mapping(arguments, source, f"{where}.{name}")
    return Stage(name=name, arguments=arguments or {})


def _only_entry(value: object, source: str, where: str) -> tuple[str, Any]:
    entries = _mapping(value, source, where)
    if len(entries) != 1:
        raise ConfigError(
            f"{source}: {where} has {len(entries)} keys ({', '.join(entries) or 'none'}); it needs"
            " exactly one, a name, with its arguments below it"
        )
    return next(iter(entries.items()))


def _mapping(value: object, source: str, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{source}: {where} = {value!r} is not allowed; it must be a mapping (`name: value`)"
        )
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{source}: {where} has the key {key!r}; keys must be names")
    return dict(value)


def _explain(details: ErrorDetails, source: str) -> str:
    """Say in one line where an error is, what was found and what is allowed."""
    first, *rest = details["loc"]
    place = str(first) + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest
    )
    kind, found = details["type"], details["input"]
    if kind == "extra_forbidden":
        return str(unknown_name(f"{source}: {place}: key", first, Config.model_fields))
    if kind == "missing":
        return f"{source}: {place} is missing; it has no default"
    if kind == "literal_error":
        allowed = get_args(Config.model_fields[str(first)].annotation)
        return str(unknown_name(f"{source}: {place}", found, allowed))
    rule = details["msg"].replace("Input should", "it should")
    return f"{source}: {place} = {found!r} is not allowed: {rule}"


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice, where YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Build one mapping."""
        lines: dict[object, int] = {}
        for key_node, _ in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key, str):
                continue
            if key in lines:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice, in lines {lines[key]} and {line}"
                )
            lines[key] = line
        return super().construct_mapping(node, deep)
