"""A GraphBolt ``OnDiskDataset`` folder, with features that stay on disk mapped without a copy.

GraphBolt maps such tables for writing, which a read-only folder refuses, and copies what is not in
C order. Here its own code loads graph and item sets, and the features are opened beside it.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import yaml

from featsync._graphbolt import gb
from featsync.errors import ConfigError
from featsync.fixed_feature import FixedFeature
from featsync.mapped import open_npy

_WHY_FIXED: Final = (
    "it is mapped from a file for reading; say in_memory: true in the dataset's metadata.yaml"
)
_SPLITS: Final = {"train": "train_set", "valid": "validation_set", "test": "test_set"}


def open_folder(folder: str, task: str) -> tuple[Any, Any, dict[str, Any], int]:
    """Open a dataset folder, preprocessed by GraphBolt where it is not yet.

    Args:
        folder: Where ``metadata.yaml`` is.
        task: Name of the task whose item sets are wanted; not needed where there is only one.

    Returns:
        Graph, feature store, item set by split, and number of classes.

    Raises:
        ConfigError: There is no such dataset, or it lacks the task.
    """
    path = Path(folder)
    if not (path / "metadata.yaml").exists() and not (path / "preprocessed").is_dir():
        raise ConfigError(
            f"dataset.path = {folder!r} holds no GraphBolt dataset: metadata.yaml is not there"
        )
    done = (path / "preprocessed" / "metadata.yaml").exists()
    # GraphBolt prints what it does; our output is not the place for it.
    with contextlib.redirect_stdout(sys.stderr):
        dataset = gb.OnDiskDataset(
            folder,
            # What is preprocessed stays as it is: else GraphBolt reads all files to hash them, and
            # deletes the result where the folder was moved or preprocessed with another answer.
            force_preprocess=False if done else None,
            include_original_edge_id=not done and _has_edge_features(path),
        )
    # Taken out before loading, so that GraphBolt does not open them.
    features = dataset.yaml_data.pop("feature_data", None) or []
    store = gb.BasicFeatureStore(
        {
            (entry["domain"], entry.get("type"), entry["name"]): _open_feature(path, entry)
            for entry in features
        }
    )
    dataset.load()
    chosen = _choose_task(dataset.tasks, task, folder)
    items = {name: getattr(chosen, attribute) for name, attribute in _SPLITS.items()}
    items = {name: item_set for name, item_set in items.items() if item_set is not None}
    return dataset.graph, store, items, int(chosen.metadata.get("num_classes") or 0)


def _has_edge_features(folder: Path) -> bool:
    features = yaml.safe_load((folder / "metadata.yaml").read_text()).get("feature_data") or []
    return any(entry.get("domain") == "edge" for entry in features)


def _open_feature(folder: Path, entry: dict[str, Any]) -> Any:
    path = folder / entry["path"]
    if entry.get("format") == "torch":
        return gb.TorchBasedFeature(torch.load(path))
    if entry.get("in_memory", True):
        return gb.TorchBasedFeature(torch.from_numpy(np.load(path)))
    return FixedFeature(open_npy(path), _WHY_FIXED)


def _choose_task(tasks: list[Any], name: str, folder: str) -> Any:
    named = {str(task.metadata.get("name")): task for task in tasks}
    if name in named:
        return named[name]
    if len(tasks) == 1:
        return tasks[0]
    raise ConfigError(
        f"task = {name!r} is not in the dataset {folder!r}; it has {', '.join(named) or 'no tasks'}"
    )
