"""The process that holds one configuration loaded and runs an epoch whenever it is told to.

Started by `featsync.bench.lane` as ``python -m featsync.bench.rank DESCRIPTOR``; the descriptor is
its end of a connection to the driver, on which it first gets a `RankSpec`.
"""

from __future__ import annotations

import importlib
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import featsync
from featsync._graphbolt import gb
from featsync.bench.check_rows import RowCheck, check_minibatch
from featsync.bench.inputs import delivered_rows, wanted_ids
from featsync.bench.measure import EpochTimes, time_epoch
from featsync.bench.protocol import EpochReport, Progress, RankSpec, Ready, RunEpoch
from featsync.bench.steps import DrainStep, Step
from featsync.bench.training import delivered_source, resident_source, train_step
from featsync.feature_keys import feature_keys, without_feature_keys
from featsync.loading import load_to_compare
from featsync.pipeline import build
from featsync.plan import FeatureKey
from featsync.rank_program import join_group, serve

_SIGN_OF_LIFE_S = 0.5
# Of the warm-up epoch, which may be long: all of its first minibatches, and some of the others.
_CHECK_ALL_BEFORE = 16
_CHECK_EVERY = 8


class Rank:
    """One rank of one lane, loaded: two loaders, with and without features, and a trainer."""

    def __init__(self, spec: RankSpec, report: Callable[[Progress], None]) -> None:
        self._spec = spec
        self._report = report
        self._dataset, self._tables = load_to_compare(spec.config)
        self._keys = feature_keys(spec.config)
        self._loader = build(spec.config, dataset=self._dataset)
        self._floor_loader: Any = None
        self._step = self._make_step()
        self._delivered = delivered_source(spec.config, self._dataset)
        self._resident = resident_source(spec.config, self._dataset)
        self._num_minibatches = 0

    def workload(self) -> dict[str, object]:
        """Facts about dataset and configuration, for the report."""
        config = self._spec.config
        return {
            "dataset": config.dataset,
            "task": config.task,
            "batch_size": config.batch_size,
            "num_workers": config.num_workers,
            "stages": [{stage.name: stage.arguments} for stage in config.stages],
            "nodes": self._dataset.graph.total_num_nodes,
            "edges": self._dataset.graph.total_num_edges,
            "features": {
                str(key): {
                    "row_shape": list(self._dataset.features.size(*key)),
                    "row_bytes": self._row_bytes(key),
                }
                for key in self._keys
            },
        }

    def run(self, request: RunEpoch) -> EpochReport:
        """Run one epoch; collective among the ranks of the lane."""
        stats = self._stats()
        if stats is not None:
            stats.reset()
        if self._spec.world_size > 1:
            dist.barrier()
        rows: dict[FeatureKey, int] = dict.fromkeys(self._keys, 0)
        checks: list[RowCheck] = []
        with self._step.epoch():
            if request.kind == "floor":
                times = time_epoch(self._floor(), self._stepper(self._resident))
            else:
                stepper = self._counting(rows, self._stepper(self._delivered))
                if request.kind == "warm_up":
                    stepper = self._checking(checks, stepper)
                times = time_epoch(self._loader, stepper, self._to_hold(request.number))
        self._num_minibatches = len(times.marks)
        if request.kind == "timed":
            held = times.held.values()
            checks = [check_minibatch(one, self._tables, self._keys) for one in held]
        return self._summary(request, times, rows, sum(checks, RowCheck()))

    def _make_step(self) -> Step:
        if self._spec.simulated is not None:
            return self._spec.simulated
        if self._spec.model == "none":
            return DrainStep()
        return train_step(self._spec.config, self._dataset, self._spec.world_size)

    def _floor(self) -> Any:
        if self._floor_loader is None:
            bare = without_feature_keys(self._spec.config)
            self._floor_loader = build(bare, dataset=self._dataset)
        return self._floor_loader

    def _stepper(self, source: Any) -> Callable[[int, Any], None]:
        last_sign = time.monotonic()

        def step(index: int, minibatch: Any) -> None:
            nonlocal last_sign
            self._step(minibatch, source)
            if (now := time.monotonic()) - last_sign > _SIGN_OF_LIFE_S:
                last_sign = now
                self._report(Progress(index + 1))

        return step

    def _counting(
        self, rows: dict[FeatureKey, int], step: Callable[[int, Any], None]
    ) -> Callable[[int, Any], None]:
        def counted(index: int, minibatch: Any) -> None:
            for key, layer, _ in wanted_ids(minibatch, self._keys):
                found = delivered_rows(minibatch, key, layer)
                rows[key] += 0 if found is None else len(found)
            step(index, minibatch)

        return counted

    def _checking(
        self, checks: list[RowCheck], step: Callable[[int, Any], None]
    ) -> Callable[[int, Any], None]:
        """Compare before and after the step: rows must be there in time, and must stay."""

        def checked(index: int, minibatch: Any) -> None:
            if index >= _CHECK_ALL_BEFORE and index % _CHECK_EVERY:
                step(index, minibatch)
                return
            checks.append(check_minibatch(minibatch, self._tables, self._keys))
            step(index, minibatch)
            checks.append(check_minibatch(minibatch, self._tables, self._keys))

        return checked

    def _to_hold(self, number: int) -> list[int]:
        if self._num_minibatches < 2:
            return []
        return [random.Random(number).randrange(self._num_minibatches - 1)]

    def _stats(self) -> Any:
        if any(stage.name == "sync_feature" for stage in self._spec.config.stages):
            return featsync.stats(self._loader)
        return None

    def _row_bytes(self, key: FeatureKey) -> int:
        one = self._tables.read(*key, torch.zeros(1, dtype=torch.int64))
        return int(one.numel() * one.element_size())

    def _summary(
        self, request: RunEpoch, times: EpochTimes, rows: dict[FeatureKey, int], check: RowCheck
    ) -> EpochReport:
        by_source = {"host": sum(rows.values()), "cache": 0, "peer": 0}
        num_bytes = {"host": sum(self._row_bytes(key) * n for key, n in rows.items())}
        num_bytes |= {"cache": 0, "peer": 0}
        transport = {str(key): "local" for key in self._keys}
        why: dict[str, str] = {}
        seconds: dict[str, float] = {}
        stats = self._stats() if request.kind != "floor" else None
        if stats is not None:
            by_source, num_bytes = dict.fromkeys(by_source, 0), dict(stats.bytes)
            for key, feature in stats.features.items():
                transport[str(key)], why[str(key)] = feature.transport, feature.why
                for source, count in feature.rows.items():
                    by_source[source] += count
            seconds = {name: getattr(stats, name) for name in ("plan_s", "transfer_s", "wait_s")}
        return EpochReport(
            wall_s=times.wall_s,
            cpu_s=times.cpu_s,
            next_s=times.next_s,
            minibatches=len(times.marks),
            rows=by_source,
            num_bytes=num_bytes,
            check=check,
            transport=transport,
            why=why,
            stages=seconds,
            marks=times.marks if request.with_marks else [],
        )


def _start(spec: RankSpec, send: Callable[[object], None]) -> Callable[[RunEpoch], EpochReport]:
    torch.set_num_threads(spec.threads)
    torch.manual_seed(spec.config.seed + spec.rank)
    random.seed(spec.config.seed + spec.rank)
    gb.seed(spec.config.seed + spec.rank)
    for module in spec.modules:
        importlib.import_module(module)
    if spec.world_size > 1:
        join_group(spec.store_file, spec.rank, spec.world_size, spec.timeout)
    rank = Rank(spec, send)
    send(Ready(rank.workload()))
    return rank.run


if __name__ == "__main__":
    serve(int(sys.argv[1]), _start)
