"""Pipelines that take turns, epoch by epoch, in one process over one dataset.

How long sampling takes differs more from epoch to epoch than a feature stage's whole cost, so what
is compared runs next to each other: an epoch without features, one of each pipeline, and again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from featsync.bench.check_rows import check_minibatch
from featsync.bench.measure import time_epoch
from featsync.config import Config
from featsync.feature_keys import feature_keys
from featsync.loading import LoadedDataset
from featsync.pipeline import build

RESAMPLES = 10_000

Step = Callable[[Any], None]


class Lane:
    """One pipeline over a dataset that all lanes share.

    Args:
        name: Of the pipeline.
        config: It.
        dataset: What `load_dataset` gave for the same settings.
        tables: A store of whole tables, to compare rows with.
        step: What is done with each minibatch.

    Attributes:
        seconds: Of the epochs in the clock.
        cpu_seconds: Of all threads and child processes meanwhile.
        num_minibatches: Of the last epoch.
        wrong_rows: Of all epochs, each of which has its last minibatch compared.
    """

    def __init__(
        self, name: str, config: Config, dataset: LoadedDataset, tables: Any, step: Step
    ) -> None:
        self.name = name
        self.loader = build(config, dataset=dataset)
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.num_minibatches = 0
        self.wrong_rows = 0
        self._keys = feature_keys(config)
        self._tables, self._step = tables, step

    def run(self, timed: bool) -> None:
        """Run an epoch; rows are compared after the clock stopped."""
        times = time_epoch(self.loader, lambda _, minibatch: self._step(minibatch))
        self.num_minibatches = len(times.marks)
        if timed:
            self.seconds.append(times.wall_s)
            self.cpu_seconds.append(times.cpu_s)
        for minibatch in times.held.values():
            self.wrong_rows += check_minibatch(minibatch, self._tables, self._keys).wrong


def take_turns(
    lanes: Sequence[Lane],
    rounds: int,
    each: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> None:
    """Run all lanes in turn, once to warm up and ``rounds`` times in the clock.

    Args:
        lanes: In the order in which they run.
        rounds: How often.
        each: Makes what every epoch runs in, clock and all.
    """
    for turn in range(rounds + 1):
        for lane in lanes:
            with each():
                lane.run(timed=turn > 0)


def shares(cost: np.ndarray, base: np.ndarray) -> dict[str, float]:
    """A lane's cost as a share of the base's: of all rounds, and within what 90 % of draws lie."""
    draws = np.random.default_rng(0).integers(0, len(cost), (RESAMPLES, len(cost)))
    found = cost[draws].mean(1) / base[draws].mean(1)
    low, high = np.quantile(found, [0.05, 0.95])
    return {"all": float(cost.mean() / base.mean()), "low": float(low), "high": float(high)}
