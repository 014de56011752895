"""The datasets a configuration can name, and `load`, which turns a name into a `GraphData`.

A dataset is named alone (``debian``) or with options (``{debian: {width: 512}}``). Two names stand
for a folder that GraphBolt opens itself, an ``OnDiskDataset``: ``{path: FOLDER}`` and
``debian-files``, which is built on first use. `folder_of` answers for those.

To add a dataset: write a module with an option set and ``load(options, task)``, and add a line to
`DATASETS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

from featsync.datasets import debian, debian_files, synthetic
from featsync.datasets.graph_data import ORIGINAL_EDGE_ID, GraphData, Split, Task, Topology
from featsync.datasets.options import Options, read_options
from featsync.errors import ConfigError, unknown_name

__all__ = [
    "DATASETS",
    "ORIGINAL_EDGE_ID",
    "DatasetEntry",
    "GraphData",
    "Split",
    "Topology",
    "folder_of",
    "load",
]


class DatasetEntry(NamedTuple):
    """A line of the table: the option set of a dataset and the function that loads it."""

    options: type[Options]
    load: Callable[[Any, Task], GraphData]


DATASETS: dict[str, DatasetEntry] = {
    "debian": DatasetEntry(debian.DebianOptions, debian.load),
    "synthetic": DatasetEntry(synthetic.SyntheticOptions, synthetic.load),
}

_FOLDERS = ("debian-files", "path")


def load(spec: object, task: str = "node_classification") -> GraphData:
    """Load a dataset into memory.

    Args:
        spec: What stands under ``dataset`` in a configuration: a name, or a mapping with the name
            as its only key and the options as its value.
        task: ``"node_classification"`` or ``"link_prediction"``; the latter adds node pairs to
            the splits.

    Raises:
        ConfigError: A name or an option is unknown or wrong, or the dataset is a folder.
    """
    name, options = _name_and_options(spec)
    if task not in get_args(Task):
        raise unknown_name("task", task, get_args(Task))
    if name in _FOLDERS:
        raise ConfigError(
            f"dataset {name} is a folder that GraphBolt opens; take its path from "
            "featsync.datasets.folder_of and give it to gb.OnDiskDataset."
        )
    entry = DATASETS[name]
    checked = read_options(entry.options, f"dataset.{name}", options)
    return entry.load(checked, cast(Task, task))


def folder_of(spec: object, save_graph: debian_files.SaveGraph) -> Path | None:
    """Give the folder of a dataset that GraphBolt opens itself, building it if need be.

    Args:
        spec: As for `load`.
        save_graph: Writes a graph to a file in the form GraphBolt reads; used for building only.

    Returns:
        The folder of an ``OnDiskDataset``; ``None`` for the datasets that `load` loads. One that
        featsync built (``debian-files``) has no raw data, so open it with
        ``force_preprocess=False``: GraphBolt's preprocessing would delete what it cannot rebuild.

    Raises:
        ConfigError: A name or an option is unknown or wrong, the folder does not exist, or what
            it would be built from is not on this machine.
    """
    name, options = _name_and_options(spec)
    if name == "debian-files":
        where = f"dataset.{name}"
        checked = read_options(debian_files.DebianFilesOptions, where, options)
        return debian_files.ensure(checked, save_graph)
    if name == "path":
        return _existing_folder(options)
    return None


def _name_and_options(spec: object) -> tuple[str, object]:
    if isinstance(spec, Mapping) and len(spec) == 1:
        name, options = next(iter(spec.items()))
    elif isinstance(spec, str):
        name, options = spec, None
    else:
        raise ConfigError(
            f"dataset = {spec!r} is not understood; give a name, or a mapping with one name "
            "and its options, like {debian: {width: 512}}."
        )
    if name not in DATASETS and name not in _FOLDERS:
        raise unknown_name("dataset", name, [*DATASETS, *_FOLDERS])
    return name, options


def _existing_folder(options: object) -> Path:
    if not isinstance(options, str):
        raise ConfigError(f"dataset.path = {options!r} is not a folder; write {{path: FOLDER}}.")
    folder = Path(options).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"dataset.path = {options!r} is not a folder; check how it is spelled.")
    return folder
