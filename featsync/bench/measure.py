"""The clock of one epoch: wall seconds, CPU seconds of all who work for it, waiting for data."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass
class EpochTimes:
    """One epoch on one rank.

    Attributes:
        wall_s: From asking for the loader's iterator until after the last step.
        cpu_s: Of all threads of this process, of its children, and of theirs.
        next_s: Of the wall seconds, those spent waiting for minibatches.
        marks: Per minibatch, when it was asked for, when it came, and when its step was over.
        held: The minibatches that were to be kept, by index.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    next_s: float = 0.0
    marks: list[tuple[float, float, float]] = field(default_factory=list)
    held: dict[int, Any] = field(default_factory=dict)


def time_epoch(
    loader: Iterable[Any],
    step: Callable[[int, Any], None],
    hold: Iterable[int] = (),
) -> EpochTimes:
    """Run one epoch on the clock.

    Minibatches to compare with the tables are kept and compared when the clock has stopped:
    compared in between, everything that works ahead would gain that time. A kept minibatch also
    shows whether its rows are overwritten while somebody holds them. The last one is always kept.

    Args:
        loader: Gives the minibatches.
        step: What the trainer does with each, by index and minibatch.
        hold: Indices of minibatches to keep besides the last.
    """
    times = EpochTimes()
    wanted = frozenset(hold)
    cpu_before = cpu_seconds()
    started = asked = time.perf_counter()
    iterator = iter(loader)
    minibatch: Any = None
    for index in _count():
        try:
            minibatch = next(iterator)
        except StopIteration:
            times.next_s += time.perf_counter() - asked
            break
        came = time.perf_counter()
        step(index, minibatch)
        done = time.perf_counter()
        times.marks.append((asked, came, done))
        times.next_s += came - asked
        if index in wanted:
            times.held[index] = minibatch
        asked = done
    times.wall_s = time.perf_counter() - started
    times.cpu_s = cpu_seconds() - cpu_before
    if times.marks:
        times.held[len(times.marks) - 1] = minibatch
    return times


def cpu_seconds() -> float:
    """CPU seconds used so far by this process, and by its children, living or not.

    Those of living children come in the kernel's ticks (10 ms), those of this process exact.
    """
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = sum(_child_ticks(pid) for pid in _descendants(os.getpid())) / _TICKS_PER_SECOND
    return time.process_time() + ended.ru_utime + ended.ru_stime + living


def _descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found = [int(child) for child in children.read_text().split()]
        except OSError:
            continue  # The thread ended meanwhile.
        for child in found:
            yield child
            yield from _descendants(child)


def _child_ticks(pid: int) -> int:
    try:
        # The name, in parentheses, may hold spaces; user, system and ended children's follow.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return sum(int(value) for value in fields[11:15])


def _count() -> Iterator[int]:
    index = 0
    while True:
        yield index
        index += 1
