"""One rank's hands on the cache that its machine shares: plans under a lock, moves without one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from featsync.errors import PeerError, PeerTimeoutError, PlanError
from featsync.host_cache.directory import Directory, Lookup
from featsync.host_cache.layout import CacheMemory
from featsync.host_cache.uses import Uses
from featsync.host_lock import HostLock
from featsync.retention.arrays import Ids
from featsync.retention.levels import Levels

__all__ = ["HostCache"]

_PATIENCE = 10  # times the timeout, for ranks that live


# Begins to wait for a rank of the machine; what it returns raises once the wait is in vain.
Watch = Callable[[int], Callable[[], None]]


class HostCache:
    """The cache of one feature, as one of the ranks that share it uses it.

    One session at a time drives it, the one whose iteration began first; others read from home.
    `push`, `plan` and `begin` are for the thread that iterates, the rest for whoever moves rows, in
    the order of plans.

    Args:
        memory: Shared by the ranks of the machine.
        lock: Laid in memory that they share as well.
        uses: Of `memory`.
        levels: The same on all ranks.
        rank: Own number within the machine.
        place: Of this cache among all, in the same order on all ranks.
        name_of: Names a rank of the machine for people.
        timeout: Seconds that a lock may be held, or that own rows may be late.
    """

    def __init__(
        self,
        memory: CacheMemory,
        lock: HostLock,
        uses: Uses,
        levels: Levels,
        rank: int,
        place: tuple[Sequence[int], int],
        name_of: Callable[[int], str],
        timeout: float,
    ) -> None:
        self._memory, self._lock = memory, lock
        self._uses = uses
        self.place = place
        self._directory = Directory(memory.directory, uses, levels, rank)
        self._rank, self._name_of, self._timeout = rank, name_of, timeout
        self._pending: deque[Ids] = deque()
        self._num_planned = 0
        self._is_driven: Callable[[], bool] = _nobody
        self._watch: Watch = _unwatched

    @property
    def slots(self) -> torch.Tensor:
        """``(num_slots, *row_shape)``: the cached rows, in memory of all ranks of the machine."""
        return self._memory.slots

    def is_trusted(self) -> bool:
        """Whether slots hold what they should; waits for rows that an earlier loop left coming."""
        signals = self._memory.signals
        if not self._is_broken and not self._is_driven():
            signal = _landed(self._rank)
            if not signals.wait(signal, self._num_planned, self._timeout):
                self._memory.state[0] = 1
        return not self._is_broken

    def begin(self, is_alive: Callable[[], bool], watch: Watch) -> bool:
        """Become the session that drives this rank's side, unless a living one does.

        Args:
            is_alive: Tells later callers whether whoever drives now still does.
            watch: Looks after the ranks that will be waited for meanwhile.

        Returns:
            Whether the caller drives now.
        """
        if self._is_driven():
            return False
        self._is_driven, self._watch = is_alive, watch
        with self._lock.hold(self._timeout):
            self._uses.begin(self._rank, self._pending)
        self._pending.clear()
        return True

    def end(self, is_clean: bool) -> None:
        """The iteration is over; takes no lock and waits for nothing.

        Args:
            is_clean: Whether every plan was handed over to be carried out, and none failed so far.
                Otherwise nobody may trust this cache: ranks get a new one when they begin again.
        """
        self._uses.end(self._rank)
        if not is_clean:
            self._memory.state[0] = 1

    def push(self, ids: Ids) -> None:
        """Make one more minibatch known; its ids, which may repeat, are kept by reference.

        Raises:
            FeatureError: An id lies outside the table. Nothing has changed.
        """
        with self._lock.hold(self._timeout):
            self._directory.push(ids)
        self._pending.append(ids)

    def hold(self) -> AbstractContextManager[None]:
        """Hold the lock under which `plan` is to be called; blocks until it is free."""
        return self._lock.hold(self._timeout)

    def plan(self) -> tuple[int, Lookup]:
        """Plan the oldest minibatch that is pushed and not planned; see `Directory.plan`.

        Whoever plans several caches for one minibatch holds all of their locks meanwhile (`hold`,
        by ascending `place`). So the plans of all caches follow one order, as waiting does: with
        one order a cache, two ranks could wait for each other.

        Returns:
            The number of the plan, and what to do.
        """
        self._num_planned += 1
        ids = self._pending.popleft()
        return self._num_planned, self._directory.plan(self._num_planned, ids)

    def wait_to_read(self, landings: Mapping[int, int]) -> None:
        """Block until other ranks' landings are over.

        Raises:
            PeerError: One of them has ended, or failed.
            PeerTimeoutError: It took too long.
        """
        for rank, number in landings.items():
            self._wait(rank, _landed(rank), number)

    def wait_to_fill(self, landings: Mapping[int, int], readings: Mapping[int, int]) -> None:
        """Block until nobody reads or fills slots any more that another row had.

        Raises:
            PeerError: See `wait_to_read`.
        """
        self.wait_to_read(landings)
        for rank, number in readings.items():
            self._wait(rank, _read(rank), number)

    def has_read(self, number: int) -> None:
        """This rank has read the slots of a plan, and those of all before it."""
        self._memory.signals.advance(_read(self._rank), number)

    def has_landed(self, number: int) -> None:
        """This rank has filled the slots of a plan, and those of all before it."""
        self._memory.signals.advance(_landed(self._rank), number)

    @property
    def _is_broken(self) -> bool:
        return bool(self._memory.state[0])

    def _wait(self, rank: int, signal: int, number: int) -> None:
        signals = self._memory.signals
        if signals.value(signal) >= number:
            return
        look = self._watch(rank)
        limit = _PATIENCE * self._timeout
        if not signals.wait(signal, number, limit, lambda: self._look(rank, look)):
            name = self._name_of(rank)
            raise PeerTimeoutError(
                f"waited {limit:g} s for {name} to bring rows into the cache that this machine's "
                "ranks share: it lives, but does not. A stage between plan_feature and "
                "sync_feature that holds minibatches back does that.",
                name,
            )

    def _look(self, rank: int, look: Callable[[], None]) -> None:
        look()
        if self._is_broken:
            name = self._name_of(rank)
            raise PeerError(
                f"{name}, or another rank of this machine, left its loop in the middle of a plan, "
                "and rows that it was to bring into the cache they share will not come.",
                name,
            )


def _landed(rank: int) -> int:
    return 2 * rank


def _read(rank: int) -> int:
    return 2 * rank + 1


def _nobody() -> bool:
    return False


def _unwatched(rank: int) -> Callable[[], None]:
    raise PlanError(f"rank {rank} is waited for outside an iteration")
