"""Runs configurations against the first of them, in turn, and collects what the ranks measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from featsync.bench.lane import Lane
from featsync.bench.protocol import EpochReport, Model, Progress, RankSpec, RunEpoch
from featsync.bench.steps import SimulatedStep
from featsync.config import Config
from featsync.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """How to compare.

    Attributes:
        ranks: Processes of each lane.
        epochs: Epochs of each side of a pair; their mean counts.
        pairs: How often each configuration is run against the base.
        model: What a step is, unless it is simulated.
        simulated: A simulated step in the place of the model.
        threads: Threads of torch's operators in each process.
        modules: Modules that each process imports first.
        timeout: Seconds without a sign of life after which a rank is given up.
        with_marks: Whether to keep the times of each minibatch.
    """

    ranks: int = 1
    epochs: int = 1
    pairs: int = 5
    model: Model = "sage"
    simulated: SimulatedStep | None = None
    threads: int = 1
    modules: tuple[str, ...] = ()
    timeout: float = 300.0
    with_marks: bool = False


@dataclass(frozen=True)
class Sample:
    """One side of a pair: some epochs of one lane, of which each has one report a rank."""

    epochs: list[list[EpochReport]]

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch: that of the slowest rank, since they start together."""
        return self._mean(lambda reports: max(report.wall_s for report in reports))

    @property
    def cpu_s(self) -> float:
        """CPU seconds of an epoch, of all ranks together."""
        return self._mean(lambda reports: sum(report.cpu_s for report in reports))

    @property
    def next_s(self) -> float:
        """Seconds of an epoch that a rank spends waiting for minibatches, on average."""
        return self._mean(lambda reports: sum(r.next_s for r in reports) / len(reports))

    def _mean(self, of_epoch: Callable[[list[EpochReport]], float]) -> float:
        return sum(of_epoch(reports) for reports in self.epochs) / len(self.epochs)


@dataclass
class Results:
    """All that was measured.

    Attributes:
        names: Of the configurations, the base first.
        workload: Facts about the dataset and the model.
        samples: Of each configuration, in the order in which they were run.
        pairs: Of each configuration but the base, and of the base against itself, (base, other).
        floors: Epochs without features, of any configuration.
        warm_ups: Reports of the warm-up epochs, in which many rows were compared.
    """

    names: list[str]
    workload: dict[str, object] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    pairs: dict[str, list[tuple[Sample, Sample]]] = field(default_factory=dict)
    floors: list[Sample] = field(default_factory=list)
    warm_ups: dict[str, list[EpochReport]] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """Name of the configuration that the others are compared with."""
        return self.names[0]

    @property
    def floor(self) -> Sample:
        """The fastest epoch without features."""
        return min(self.floors, key=lambda sample: sample.epoch_s)

    @property
    def usual_floor_s(self) -> float:
        """Seconds of an epoch without features, the median of all."""
        return statistics.median(sample.epoch_s for sample in self.floors)


class Driver:
    """Holds all lanes loaded and lets one of them run at a time."""

    def __init__(
        self,
        configs: Sequence[Config],
        options: Options,
        on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ) -> None:
        """Prepare; nothing is started.

        Args:
            configs: The base, and what is compared with it.
            options: How to compare.
            on_progress: Told what is being done, epochs done, and epochs in all.

        Raises:
            ConfigError: Too few configurations, or two of them differ in the workload.
        """
        _check_comparable(configs)
        self._configs = dict(zip(lane_names(configs), configs, strict=True))
        self._options = options
        self._on_progress = on_progress
        self._done = 0
        others = len(configs) - 1
        self._total = len(configs) * 3 + 1 + options.pairs * (others + 1) * (2 * options.epochs + 1)
        self._numbers: dict[str, int] = {}

    def run(self) -> Results:
        """Measure everything.

        Raises:
            FeatsyncError: What the first failing rank raised, or how it ended.
        """
        names = list(self._configs)
        # The base has a twin, a lane of its own: what two equal pipelines differ by is noise.
        lanes: list[Lane] = []
        try:
            for name in [*names, names[0]]:
                lanes.append(self._start(name))  # noqa: PERF401 - those started must be ended
            self._on_progress("loading", 0, self._total)
            workloads = [lane.wait_ready() for lane in lanes]
            results = Results(names, workloads[0])
            self._measure(results, lanes)
            for lane in lanes:
                lane.finish()
        finally:
            for lane in lanes:
                lane.kill()
        return results

    def _measure(self, results: Results, lanes: list[Lane]) -> None:
        base, *others, twin = lanes
        for lane in lanes:
            results.warm_ups.setdefault(lane.name, []).extend(self._epoch(lane, "warm_up"))
        for lane in [base, *others]:
            self._epoch(lane, "floor")
            results.floors.append(Sample([self._epoch(lane, "floor")]))
        for _ in range(self._options.pairs):
            for other in [*others, twin]:
                pair = (self._sample(base), self._sample(other))
                results.pairs.setdefault(other.name, []).append(pair)
                results.samples.setdefault(base.name, []).append(pair[0])
                if other is not twin:
                    results.samples.setdefault(other.name, []).append(pair[1])
                # Among the pairs, so that the machine is in the same mood; by each lane in turn.
                lane = lanes[len(results.floors) % (len(lanes) - 1)]
                results.floors.append(Sample([self._epoch(lane, "floor")]))

    def _start(self, name: str) -> Lane:
        options = self._options
        return Lane(
            RankSpec(
                lane=name,
                config=self._configs[name],
                rank=0,
                world_size=options.ranks,
                store_file="",
                threads=options.threads,
                model=options.model,
                simulated=options.simulated,
                modules=options.modules,
                timeout=options.timeout,
            )
        )

    def _sample(self, lane: Lane) -> Sample:
        return Sample([self._epoch(lane, "timed") for _ in range(self._options.epochs)])

    def _epoch(self, lane: Lane, kind: str) -> list[EpochReport]:
        number = self._numbers[lane.name] = self._numbers.get(lane.name, -1) + 1
        what = f"{lane.name}: {kind.replace('_', '-')} epoch"

        def on_progress(progress: Progress) -> None:
            self._on_progress(
                f"{what}, {progress.minibatches} minibatches", self._done, self._total
            )

        self._on_progress(what, self._done, self._total)
        reports = lane.run(
            RunEpoch(kind, number, self._options.with_marks),  # type: ignore[arg-type]
            on_progress,
        )
        self._done += 1
        self._on_progress(what, self._done, self._total)
        return reports


def lane_names(configs: Sequence[Config]) -> list[str]:
    """Name configurations by their files, by the whole path where two files have one name."""
    names = [config.name for config in configs]
    return [config.source if names.count(config.name) > 1 else config.name for config in configs]


def _check_comparable(configs: Sequence[Config]) -> None:
    if len(configs) < 2:
        raise ConfigError("bench compares: give a base and at least one other configuration")
    base = configs[0]
    for other in configs[1:]:
        if other.source == base.source:
            raise ConfigError(f"bench: {base.source} is given twice; it runs against itself anyway")
        for name in ("dataset", "task", "batch_size"):
            mine, theirs = getattr(base, name), getattr(other, name)
            if mine != theirs:
                raise ConfigError(
                    f"bench compares pipelines on one workload, but {name} is {mine!r} in"
                    f" {base.source} and {theirs!r} in {other.source}; make them equal"
                )
