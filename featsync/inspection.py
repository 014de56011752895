"""Look at what one pipeline delivers: compare its rows with the tables, or record its ids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

import featsync
from featsync.bench.check_rows import RowCheck, check_minibatch
from featsync.bench.inputs import wanted_ids
from featsync.config import Config
from featsync.feature_keys import feature_keys, without_feature_keys
from featsync.loading import load_dataset
from featsync.pipeline import build

OnProgress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class CheckOutcome:
    """What a check found.

    Attributes:
        minibatches: How many were compared.
        rows: Rows compared, and those that differed.
        choices: For each feature its size, how its rows come, and why.
    """

    minibatches: int
    rows: RowCheck
    choices: list[tuple[str, ...]]


def check_pipeline(config: Config, minibatches: int, on_progress: OnProgress) -> CheckOutcome:
    """Run some minibatches and compare all features with their tables.

    Rows are compared when they come, and again when the next minibatch has come: until then they
    must be there and stay.

    Raises:
        ConfigError: The pipeline cannot be built.
    """
    on_progress("loading", 0, minibatches)
    dataset = load_dataset(config)
    loader = build(config, dataset=dataset)
    keys = feature_keys(config)
    total, done, before = RowCheck(), 0, None
    for minibatch in loader:
        total += check_minibatch(minibatch, dataset.features, keys)
        if before is not None:
            total += check_minibatch(before, dataset.features, keys)
        before, done = minibatch, done + 1
        on_progress("comparing", done, minibatches)
        if done == minibatches:
            break
    return CheckOutcome(done, total, _choices(config, loader, dataset.features))


def choices_table(outcome: CheckOutcome) -> Table:
    """Lay out what was chosen."""
    table = Table(title="What was chosen")
    for column in ("feature", "row", "transport", "hit rate", "why"):
        table.add_column(column)
    for row in outcome.choices:
        table.add_row(*row)
    return table


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


def _choices(config: Config, loader: Any, features: Any) -> list[tuple[str, ...]]:
    stats = None
    if any(stage.name == "sync_feature" for stage in config.stages):
        stats = featsync.stats(loader)
    rows: list[tuple[str, ...]] = []
    for key in feature_keys(config):
        shape = str(tuple(features.size(*key)))
        found = None if stats is None else stats.features.get(key)
        if found is None:
            rows.append((str(key), shape, "stock", "", "read by the stage itself"))
        else:
            rate = f"{found.hit_rate:.3f}"
            rows.append((str(key), shape, found.transport, rate, found.why))
    return rows
