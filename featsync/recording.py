"""Record which ids a pipeline asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from featsync.bench.inputs import wanted_ids
from featsync.config import Config
from featsync.feature_keys import feature_keys, without_feature_keys
from featsync.loading import load_dataset
from featsync.pipeline import build

OnProgress = Callable[[str, int, int | None], None]


def record_ids(config: Config, out: Path, on_progress: OnProgress) -> dict[str, int]:
    """Write the ids of one epoch of each feature as an ``.npz`` file, without reading a row.

    For each feature, such as ``node/None/feat``: ``<key>/ids`` int64, those of all minibatches laid
    end to end; ``<key>/offsets`` int64, where each minibatch starts, and the end; and
    ``<key>/num_rows`` int64, the size of its table.

    Returns:
        Ids recorded of each feature.
    """
    on_progress("loading", 0, None)
    dataset = load_dataset(config)
    keys = feature_keys(config)
    ids: dict[str, list[Any]] = {str(key): [] for key in keys}
    offsets: dict[str, list[int]] = {str(key): [0] for key in keys}
    for done, minibatch in enumerate(build(without_feature_keys(config), dataset=dataset), 1):
        counts = dict.fromkeys(ids, 0)
        for key, _, wanted in wanted_ids(minibatch, keys):
            ids[str(key)].append(wanted.cpu().numpy().astype(np.int64))
            counts[str(key)] += len(wanted)
        for name, count in counts.items():
            offsets[name].append(offsets[name][-1] + count)
        on_progress("recording", done, None)
    arrays: dict[str, Any] = {}
    for key in keys:
        name = str(key)
        empty = [np.empty(0, np.int64)]
        arrays[f"{name}/ids"] = np.concatenate(ids[name] or empty)
        arrays[f"{name}/offsets"] = np.array(offsets[name], np.int64)
        arrays[f"{name}/num_rows"] = np.int64(len(dataset.features.read(*key)))
    with out.open("wb") as file:
        np.savez(file, **arrays)
    return {name: counts[-1] for name, counts in offsets.items()}
