"""Measures in rounds, so that every way meets the machine in each of its moods.

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

import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from featsync.calibration.protocol import Ran
from featsync.calibration.ranks import Ranks
from featsync.calibration.samples import LOCAL, Measured, Sample, Setting, Tax
from featsync.errors import ConfigError
from featsync.transports import TRANSPORTS

__all__ = ["Options", "lost_seconds", "measure"]

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
            found.append(_measure_with(ranks, num_ranks, options.rounds, on_step))
        on_step("done", options.rounds + 1)
    return found


def lost_seconds(beside: Ran, alone: Ran) -> float:
    """Seconds that some work took longer than it takes alone."""
    return beside.seconds - beside.work * alone.seconds / alone.work


@dataclass
class _Found:
    """What repetitions gave so far: seconds a message."""

    fetches: defaultdict[tuple[str, Setting], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    fetching: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    serving: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def tax(self, way: str) -> Tax:
        """The medians; less than nothing is noise. Nobody else reads a rank's own memory."""
        serving = self.serving[way] or [0.0]
        return Tax(
            way,
            max(0.0, statistics.median(self.fetching[way])),
            max(0.0, statistics.median(serving)),
        )


def _measure_with(
    ranks: Ranks, num_ranks: int, rounds: int, on_step: Callable[[str, int], None]
) -> Measured:
    ways = ranks.wait_ready()
    # All memory is touched, by the largest message last; what that took does not count.
    _fetch(ranks, ways, _Found(), lambda what: on_step(f"warm-up, {what}", 0))
    found = _Found()
    for number in range(1, rounds + 1):
        in_turn = ways if number % 2 else ways[::-1]

        def on_what(what: str, number: int = number) -> None:
            on_step(f"round {number}, {what}", number)

        _fetch(ranks, in_turn, found, on_what)
        on_what("beside Python")
        _tax(ranks, in_turn, found)
    samples = [
        Sample(way, setting, statistics.median(found.fetches[way, setting]))
        for way in ways
        for setting in ranks.settings
    ]
    unreached = [name for name in TRANSPORTS if name not in ways]
    return Measured(num_ranks, samples, [found.tax(way) for way in ways], unreached)


def _fetch(ranks: Ranks, ways: list[str], found: _Found, on_what: Callable[[str], None]) -> None:
    for setting in ranks.settings:
        on_what(f"{setting.rows:,} rows of {setting.row_bytes:,} bytes")
        for way in ways:
            found.fetches[way, setting] += ranks.fetch(way, setting)


def _tax(ranks: Ranks, ways: list[str], found: _Found) -> None:
    for way in ways:
        found.fetching[way].append(_lost_a_message(ranks, partial(ranks.run_python, way)))
        if way != LOCAL:
            found.serving[way].append(_lost_a_message(ranks, partial(ranks.serve, way)))


def _lost_a_message(ranks: Ranks, run: Callable[[], Ran]) -> float:
    """One pair: alone, and beside messages."""
    alone, beside = ranks.run_python(), run()
    return lost_seconds(beside, alone) / max(1, beside.messages)
