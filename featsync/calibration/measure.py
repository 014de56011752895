"""Starts the ranks and has them measure, in rounds, so that all ways meet the machine in each mood.

What is measured:

- **Messages.** All ranks fetch rows of all others at once, as in training, and each its own after
  the other: from announcing them until they are in place, divided by the number of ranks asked.
  Nothing else runs; whose rows they are was looked up before.
- **What a message takes from Python.** The main thread of rank 0 counts, in pure Python; meanwhile
  either a thread of that rank fetches rows of the others, or the others fetch rows of it. What it
  has counted less than alone, in the time in which it had a core, divided by the number of
  messages, is what a message takes from whoever wants rows, and from whoever holds them. Ranks that
  are not needed wait. See `featsync.calibration.python_work`.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from featsync.calibration.protocol import (
    Fetched,
    FetchPrepared,
    KeepFetching,
    Prepare,
    Prepared,
    Ran,
    RankSpec,
    Ready,
    RunPython,
)
from featsync.calibration.samples import LOCAL, Measured, Sample, Setting, Tax, settings
from featsync.errors import ConfigError
from featsync.profile import VARIABLE
from featsync.rank_processes import RankProcesses, environment_of_ranks
from featsync.transports import TRANSPORTS

__all__ = ["TAXED", "Options", "Ranks", "lost_seconds", "measure"]

# What messages carry whose tax is measured: as many rows as transports are compared for.
TAXED = Setting(rows=10_000, row_bytes=64)
_PYTHON_S = 0.2
_TIMES = 3
_FEWEST_RANKS = 2

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
        ranks: Processes; where they are more than two, two are measured as well.
        rounds: How often everything is measured.
        timeout: Seconds without a sign of life after which a rank is given up.
    """

    ranks: int = 2
    rounds: int = 10
    timeout: float = 60.0


def measure(options: Options, on_progress: OnProgress) -> list[Measured]:
    """Measure everything; takes about a minute for each number of ranks.

    Args:
        options: How.
        on_progress: Told what is being done, rounds done, and rounds in all.

    Returns:
        What was measured with each number of ranks, ascending.

    Raises:
        ConfigError: There are too few ranks.
        CapacityError: The machine's shared memory is too small.
        PeerError: A rank died or failed.
        PeerTimeoutError: A rank gave no sign of life for too long.
    """
    if options.ranks < _FEWEST_RANKS:
        raise ConfigError(
            f"--ranks {options.ranks}: rows come from other ranks, so there have to be at least "
            f"{_FEWEST_RANKS}"
        )
    sizes = sorted({_FEWEST_RANKS, options.ranks})
    total = len(sizes) * (options.rounds + 1)
    found = []
    for index, num_ranks in enumerate(sizes):
        done = index * (options.rounds + 1)

        def on_step(what: str, rounds: int, num_ranks: int = num_ranks, done: int = done) -> None:
            on_progress(f"{num_ranks} ranks: {what}", done + rounds, total)

        on_step("starting", 0)
        with Ranks(num_ranks, options.timeout) as ranks:
            found.append(ranks.measure(options.rounds, on_step))
        on_step("done", options.rounds + 1)
    return found


@dataclass
class _Found:
    """What repetitions gave so far."""

    seconds: defaultdict[tuple[str, Setting], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    fetching: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    serving: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class Ranks:
    """So many ranks, as processes; they end with the context, in order unless it raised."""

    def __init__(self, num_ranks: int, timeout: float) -> None:
        self._num_ranks = num_ranks
        self._settings = settings(num_ranks)
        environment = environment_of_ranks(os.environ, threads=1)
        # What is measured does not depend on it, and it may be the very file to be written.
        environment.pop(VARIABLE, None)
        self._processes = RankProcesses(
            "featsync.calibration.rank",
            f"{num_ranks} ranks",
            num_ranks,
            lambda rank, store_file: RankSpec(rank, num_ranks, store_file, self._settings, timeout),
            environment,
            timeout,
        )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self._processes.finish()
        self._processes.kill()

    def measure(self, rounds: int, on_step: Callable[[str, int], None]) -> Measured:
        """Measure all ways in all settings, and the taxes of all ways, so many times."""
        reached = [ready.ways for ready in self._processes.wait_ready(Ready)]
        ways = [way for way in reached[0] if all(way in of_rank for of_rank in reached)]
        # All memory is touched, the largest last; what it took does not count.
        self._fetch_all(ways, _Found(), lambda what: on_step(f"warm-up, {what}", 0))
        found = _Found()
        for number in range(1, rounds + 1):
            in_turn = ways if number % 2 else ways[::-1]

            def on_what(what: str, number: int = number) -> None:
                on_step(f"round {number}, {what}", number)

            self._fetch_all(in_turn, found, on_what)
            on_what("beside Python")
            self._tax_all(in_turn, found)
        return Measured(
            self._num_ranks,
            [
                Sample(way, setting, statistics.median(found.seconds[way, setting]))
                for way in ways
                for setting in self._settings
            ],
            [_tax(way, found) for way in ways],
            [name for name in TRANSPORTS if name not in ways],
        )

    def _fetch_all(
        self, ways: Sequence[str], found: _Found, on_what: Callable[[str], None]
    ) -> None:
        everybody = range(self._num_ranks)
        for setting in self._settings:
            on_what(f"{setting.rows:,} rows of {setting.row_bytes:,} bytes")
            for way in ways:
                prepare = Prepare(way, setting, _TIMES)
                self._processes.ask(dict.fromkeys(everybody, prepare), Prepared)
                go = dict.fromkeys(everybody, FetchPrepared())
                for fetched in self._processes.ask(go, Fetched).values():
                    found.seconds[way, setting] += [
                        seconds / fetched.messages for seconds in fetched.seconds
                    ]

    def _tax_all(self, ways: Sequence[str], found: _Found) -> None:
        alone = self._run_python(None)
        for way in ways:
            beside = self._run_python(way)
            found.fetching[way].append(lost_seconds(beside, alone) / max(1, beside.messages))
            if way != LOCAL:
                served, messages = self._serve(way)
                found.serving[way].append(lost_seconds(served, alone) / max(1, messages))

    def _run_python(self, beside: str | None) -> Ran:
        return self._processes.ask({0: RunPython(_PYTHON_S, beside, TAXED)}, Ran)[0]

    def _serve(self, way: str) -> tuple[Ran, int]:
        """Have rank 0 count while the others fetch its rows; gives how many messages that were."""
        work = {0: RunPython(_PYTHON_S, None, TAXED)}
        others = dict.fromkeys(range(1, self._num_ranks), KeepFetching(_PYTHON_S, way, TAXED))
        answers = self._processes.ask({**work, **others}, Ran)
        return answers[0], sum(answers[rank].messages for rank in others)


def _tax(way: str, found: _Found) -> Tax:
    """The medians; less than nothing is noise."""
    fetching, serving = found.fetching[way], found.serving[way] or [0.0]
    return Tax(way, max(0.0, statistics.median(fetching)), max(0.0, statistics.median(serving)))


def lost_seconds(beside: Ran, alone: Ran) -> float:
    """Seconds that the work took longer than it takes alone."""
    return beside.seconds - beside.work * alone.seconds / alone.work
