"""Applies what was written to the table, step by step, together with the other ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.dynamic.areas import Areas
from featsync.dynamic.board import Board
from featsync.dynamic.merge import Merge, RowNumbers, rounds_of
from featsync.dynamic.positions import Position
from featsync.errors import PeerError, PeerTimeoutError
from featsync.host_lock import HostLock

__all__ = ["Commits", "Neighbours"]

_PATIENCE = 30  # times the timeout, for ranks that live

Watch = Callable[[int], Callable[[], None]]
_Awaited = tuple[int, int, int]  # signal, count, and the rank that advances it


@dataclass(frozen=True)
class Neighbours:
    """The other ranks that a table is shared with.

    Attributes:
        rank: This one.
        name_of: Names a rank for people.
        watch: Begins to wait for a rank; what it returns raises once the wait is in vain.
        timeout: Seconds without a sign of life after which a rank is given up.
    """

    rank: int
    name_of: Callable[[int], str]
    watch: Watch
    timeout: float


class Commits:
    """One rank's hand in commits, and in reads that hold them off.

    May be used by the thread that iterates and by a worker's at the same time.

    Args:
        table: ``(num_rows, *row_shape)``, shared.
        board: Of the feature.
        lock: Guards the board.
        areas: What ranks wrote.
        merge: What becomes of rows that several wrote.
        others: Who shares the table.
    """

    def __init__(
        self,
        table: torch.Tensor,
        board: Board,
        lock: HostLock,
        areas: Areas,
        merge: Merge,
        others: Neighbours,
    ) -> None:
        self.table, self.board, self.areas = table, board, areas
        self.merge = merge
        self._numbers = RowNumbers(len(table))
        self._lock, self._others = lock, others
        self._merging = threading.Lock()

    def advance(self, to: Position, patience: float = _PATIENCE) -> None:
        """Block until all steps before a position are committed, and help to do so.

        Args:
            to: The position.
            patience: How many times the timeout to wait for a rank that lives.

        Raises:
            PeerError: A rank that has to end its step has ended, or one that merged has.
            PeerTimeoutError: It gave no sign of life, or did not come for very long.
        """
        while (step := self._settled()) < to:
            for rank in range(self.board.num_ranks):
                signal = self.board.closed_signal(rank)
                self._wait(signal, step + 1, rank, "end its step", patience)
            self._commit(step)

    def rows_written(self, step: Position) -> NDArray[np.int64]:
        """The rows that a step wrote, which is committed while the next is not; may repeat."""
        calls = [call.rows for of_rank in self.areas.written(step) for call in of_rank]
        # Copied: the areas will be used again.
        return np.concatenate(calls) if calls else np.empty(0, np.int64)

    def are_distinct(self, rows: NDArray[np.int64]) -> bool:
        """Whether no row is named twice."""
        with self._merging:
            return self._numbers.are_distinct(rows)

    def help(self) -> None:
        """Commit what can be committed; waits for nobody but ranks that merge."""
        while self.board.is_closed(step := self._settled()):
            self._commit(step)

    @contextmanager
    def hold(self, at_least: Position = 0) -> Iterator[Position]:
        """Keep the table as it is inside a ``with``, after a whole step.

        Args:
            at_least: A position up to which all has to be committed.

        Yields:
            Up to where all is committed.

        Raises:
            PeerError: See `advance`.
        """
        self.advance(at_least)
        where = None
        while where is None:
            self.help()
            where = self._begin_hold()
        try:
            yield where
        finally:
            with self._lock.hold(self._others.timeout):
                signal = self.board.ended_signal(self._others.rank)
                self.board.signals.advance(signal, self.board.signals.value(signal) + 1)

    def assign(self, write: Callable[[], None]) -> None:
        """Write to the table at once, between two commits; blocks while others read or merge.

        Args:
            write: Does it.
        """
        while True:
            self.help()
            with self._lock.hold(self._others.timeout):
                is_merging = self.board.is_merging(self.board.settle())
                holding = self._holding()
                if not is_merging and not holding:
                    write()
                    self.board.count_assignment()
                    return
            self._wait_for(holding)

    def check(self) -> None:
        """Raise if the table is lost.

        Raises:
            PeerError: A rank failed in the middle of a commit.
        """
        if (rank := self.board.broken_by) is not None:
            name = self._others.name_of(rank)
            raise PeerError(
                f"{name} failed while it changed rows: some hold a step's values and some do not, "
                "so nobody may use the table any more. Look at that rank first, and go on from a "
                "checkpoint.",
                name,
            )

    def _settled(self) -> Position:
        self.check()
        with self._lock.hold(self._others.timeout):
            return self.board.settle()

    def _commit(self, step: Position) -> None:
        """Merge shares of a step that all have closed, until it is committed."""
        while self.board.committed <= step:
            with self._lock.hold(self._others.timeout):
                share, busy = self._claim(step)
            if share is not None:
                self._merge(step, share)
            elif busy:
                self._wait_for(busy)

    def _claim(self, step: Position) -> tuple[int | None, list[_Awaited]]:
        """Take a share to merge, or tell what to wait for; under the lock."""
        if self.board.committed > step:
            return None, []
        free = self.board.free_shares(step)
        if len(free) == 0:
            return None, self._merging_elsewhere(step)
        if holding := self._holding():
            return None, holding
        self.board.claims[free[0]] = step + 1
        self.board.claimed_by[free[0]] = self._others.rank
        return int(free[0]), []

    def _holding(self) -> list[_Awaited]:
        return [(self.board.ended_signal(r), count, r) for r, count in self.board.holders()]

    def _merging_elsewhere(self, step: Position) -> list[_Awaited]:
        ranks = self.board.claimed_by[self.board.done != step + 1]
        return [(0, step + 1, int(rank)) for rank in ranks[:1]]

    def _wait_for(self, busy: list[_Awaited]) -> None:
        for signal, count, rank in busy:
            self._wait(signal, count, rank, "finish with the table")

    def _merge(self, step: Position, share: int) -> None:
        try:
            with self._merging:
                calls = [call for of_rank in self.areas.written(step) for call in of_rank]
                rounds = list(rounds_of(calls, share, self.board.num_ranks))
                self.merge.apply(self.table, rounds, self._numbers)
        except BaseException:
            self.board.give_up(self._others.rank)
            raise
        with self._lock.hold(self._others.timeout):
            self.board.finish(share, step)

    def _begin_hold(self) -> Position | None:
        """Hold commits off, unless one is under way."""
        with self._lock.hold(self._others.timeout):
            step = self.board.settle()
            if self.board.is_merging(step):
                return None
            signal = self.board.begun_signal(self._others.rank)
            self.board.signals.advance(signal, self.board.signals.value(signal) + 1)
            return step

    def _wait(
        self, signal: int, at_least: int, rank: int, what: str, patience: float = _PATIENCE
    ) -> None:
        signals = self.board.signals
        if signals.value(signal) >= at_least:
            return
        look = self._others.watch(rank)
        limit = patience * self._others.timeout

        def check() -> None:
            self.check()
            with self._lock.hold(self._others.timeout):
                self.board.settle()
            look()

        if not signals.wait(signal, at_least, limit, check):
            name = self._others.name_of(rank)
            raise PeerTimeoutError(
                f"waited {limit:g} s for {name} to {what}: it lives, but does not. All ranks that "
                "train take part in every epoch: if that one has nothing to write, an update of "
                "no rows in the first step says so. For validation beside training, give "
                "sync_feature(staleness='any').",
                name,
            )
