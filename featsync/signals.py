"""Counters that the ranks of a machine share in memory and can wait for.

A counter says how far its owner is (rows of step 7 written, step 8 delivered). The owner alone
advances it; the others look, or sleep until it is far enough. A line of 64 bytes each, so that
owners do not disturb each other::

    byte  0        4        8                              64
          ├────────┼────────┼───────────────────────────────┤
    line  │ low 32 │ high 32│ unused                        │   one for each counter
          ├────────┴────────┼───────────────────────────────┘
          │ count, int64    │ begins at 0, never falls
          └ the word that waiters sleep on

    owner    write rows ─▶ advance(i, 7): store 7 ─▶ wake all
    waiter   wait(i, 7):   3 < 7: sleep on the word 3 ········▶ 7: read rows

What the owner wrote before `Signals.advance` is seen after `Signals.wait`, see `featsync.futex`.
Nothing tells who waits: waking makes a system call each time, of 1.5 µs. (To count waiters, several
processes would have to write one word, which takes an atomic addition, and Python has none.)

An owner that dies leaves its counter as it was: waits for it end at their limit, or when the
caller's check finds out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from featsync.errors import PlanError
from featsync.futex import LINE_BYTES, FutexWord, aligned

__all__ = ["Signals"]


class Signals:
    """Counters in shared memory, all 0 at first.

    Any process that maps the memory makes its own object of it, and needs no more. Looking and
    waiting work on memory that is mapped for reading only. Any thread may look and wait; one thread
    at a time may advance a counter.
    """

    def __init__(self, memory: NDArray[np.uint8], num_counters: int) -> None:
        """See the counters in some memory, without changing them.

        Args:
            memory: ``(at least num_bytes(num_counters),)``, from the start of a line, filled with
                zeros when it was made, as segments are. Kept alive by this object.
            num_counters: How many; the same in all processes.

        Raises:
            ConfigError: The memory does not fit, or this is no x86-64.
        """
        lines = aligned(memory, self.num_bytes(num_counters), f"{num_counters} signals")
        self._counts = lines.view(np.int64)[:: LINE_BYTES // 8]
        self._words = [FutexWord(lines[i:]) for i in range(0, len(lines), LINE_BYTES)]

    @staticmethod
    def num_bytes(num_counters: int) -> int:
        """How much memory counters need."""
        return num_counters * LINE_BYTES

    def value(self, counter: int) -> int:
        """Look at a counter; does not wait."""
        return int(self._counts[counter])

    def advance(self, counter: int, to: int) -> None:
        """Set an own counter and wake all that wait for it; does not wait, keeps the GIL.

        Raises:
            PlanError: It would fall. It is as it was.
        """
        now = self.value(counter)
        if to < now:
            raise PlanError(f"signal {counter} stands at {now} and would fall to {to}")
        self._counts[counter] = to
        self._words[counter].wake()

    def wait(
        self,
        counter: int,
        at_least: int,
        timeout_s: float,
        check: Callable[[], None] | None = None,
    ) -> bool:
        """Sleep, without the GIL, until a counter is far enough.

        Args:
            counter: Which.
            at_least: Count to wait for.
            timeout_s: Limit in seconds; 0 only looks.
            check: Called every half second of waiting, to look whether the owner lives or the group
                has a fault; what it raises ends the wait.

        Returns:
            Whether it is far enough; if not, the limit is over, and the caller knows whom it waited
            for.
        """
        return self._words[counter].wait_until(
            lambda: self.value(counter) >= at_least, timeout_s, check
        )
