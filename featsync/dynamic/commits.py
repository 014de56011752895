"""Applies what was written to the table, step by step, together with the other ranks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.dynamic.areas import Areas
from featsync.dynamic.board import COMMITTED, READY, Board
from featsync.dynamic.merge import Merge, Round, RowNumbers, rounds_of
from featsync.dynamic.positions import Position
from featsync.dynamic.waits import PATIENCE, Neighbours, Waits
from featsync.host_lock import HostLock

__all__ = ["Commits"]

# Signal, count, and the ranks that have to do something first.
_Awaited = tuple[int, int, Callable[[], list[int]]]


class Commits:
    """One rank's hand in commits, and in reads that hold them off.

    May be used by the thread that iterates and by a worker's at the same time. A commit comes in
    two parts, so that nobody waits for what the next step does not read: rows that are wanted next,
    then (`merge_later`) the others. Nothing else is read or merged before both are done.

    Args:
        table: ``(num_rows, *row_shape)``, shared.
        wanted: ``(num_rows,)`` uint8, shared: the last step that is known to read each row.
        board: Of the feature.
        lock: Guards the board.
        areas: What ranks wrote.
        merge: What becomes of rows that several wrote.
        others: Who shares the table.
    """

    def __init__(
        self,
        table: torch.Tensor,
        wanted: NDArray[np.uint8],
        board: Board,
        lock: HostLock,
        areas: Areas,
        merge: Merge,
        others: Neighbours,
    ) -> None:
        self.table, self.board, self.areas = table, board, areas
        self.merge = merge
        self._wanted = wanted
        self._numbers = RowNumbers(len(table))
        self._lock, self._others = lock, others
        self._waits = Waits(board, lock, others)
        self._merging = threading.Lock()
        self._later: deque[tuple[Position, int, list[Round]]] = deque()

    @property
    def timeout(self) -> float:
        """Seconds without a sign of life after which a rank is given up."""
        return self._others.timeout

    def want(self, rows: NDArray[np.int64], step: Position) -> None:
        """Say that a rank reads rows in a step; only before it closes the one before."""
        # Clipped: who reads rows that there are not hears of it when they are read.
        self._wanted.put(rows, _mark(step), mode="clip")

    def advance(self, to: Position, patience: float = PATIENCE) -> None:
        """Block until all steps before a position are committed, and help to do so.

        Args:
            to: The position.
            patience: How many times the timeout to wait for a rank that lives.

        Raises:
            PeerError: A rank that has to end its step has ended, or one that merged has.
            PeerTimeoutError: It gave no sign of life, or did not come for very long.
        """
        while (step := self._settled()) < to:
            self._wait_closed(step, patience)
            self._commit(step)

    def make_ready(self, to: Position) -> None:
        """Block until the rows that the step at a position wants are merged, and help to do so.

        All that this rank merges besides is left to `merge_later`.

        Raises:
            PeerError: See `advance`.
        """
        while (step := self._settled()) < to and self.board.ready < to:
            if self.board.ready > step:
                self.advance(step + 1)
                continue
            self._wait_closed(step, PATIENCE)
            self._commit(step, is_later_left=True)

    def merge_later(self) -> None:
        """Merge what `make_ready` left; any thread may, and somebody has to soon."""
        while self._later:
            try:
                step, share, rounds = self._later.popleft()
            except IndexError:  # another thread was faster
                return
            with self._given_up_if_it_fails():
                self.merge.apply(self.table, rounds, self._numbers)
            with self._lock.hold(self._others.timeout):
                self.board.finish(share, step)

    def rows_written(self, step: Position) -> NDArray[np.int64]:
        """The rows that a step wrote, which is committed while the next is not; may repeat."""
        calls = [call.rows for of_rank in self.areas.written(step) for call in of_rank]
        # Copied: the areas will be used again.
        return np.concatenate(calls) if calls else np.empty(0, np.int64)

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

    def _settled(self) -> Position:
        self._waits.check()
        with self._lock.hold(self._others.timeout):
            return self.board.settle()

    def _wait_closed(self, step: Position, patience: float) -> None:
        for rank in range(self.board.num_ranks):
            signal = self.board.closed_signal(rank)
            self._waits.wait(signal, step + 1, rank, "end its step", patience)

    def _commit(self, step: Position, is_later_left: bool = False) -> None:
        """Merge shares of a step that all have closed, until it is committed, or ready."""
        signal = READY if is_later_left else COMMITTED
        while self.board.signals.value(signal) <= step:
            if not is_later_left:
                self.merge_later()
            with self._lock.hold(self._others.timeout):
                share, busy = self._claim(step, signal)
            if share is not None:
                self._merge(step, share, is_later_left)
            else:
                self._wait_for(busy)

    def _claim(self, step: Position, signal: int) -> tuple[int | None, list[_Awaited]]:
        """Take a share to merge, or tell what to wait for; under the lock."""
        if self.board.signals.value(signal) > step:
            return None, []
        free = self.board.free_shares(step)
        if len(free) == 0:
            done = self.board.done_now if signal == READY else self.board.done
            # All of them: the first to be seen may be this one, whose worker is at it.
            ranks = partial(_still_at_it, done, self.board.claimed_by, step)
            return None, [(signal, step + 1, ranks)]
        if holding := self._holding():
            return None, holding
        self.board.claims[free[0]] = step + 1
        self.board.claimed_by[free[0]] = self._others.rank
        return int(free[0]), []

    def _holding(self) -> list[_Awaited]:
        held = self.board.holders()
        return [(self.board.ended_signal(r), count, partial(list, [r])) for r, count in held]

    def _wait_for(self, busy: list[_Awaited]) -> None:
        for signal, count, ranks in busy:
            self._waits.wait_for_all(signal, count, ranks, "finish with the table")

    def _merge(self, step: Position, share: int, is_later_left: bool) -> None:
        later: list[Round] = []
        with self._given_up_if_it_fails():
            calls = [call for of_rank in self.areas.written(step) for call in of_rank]
            rounds = list(rounds_of(calls, share, self.board.num_shares))
            if is_later_left:
                mark = _mark(step + 1)
                pairs = [part.split(self._wanted.take(part.rows) == mark) for part in rounds]
                rounds, later = [now for now, _ in pairs], [after for _, after in pairs]
            self.merge.apply(self.table, rounds, self._numbers)
        with self._lock.hold(self._others.timeout):
            self.board.finish_now(share, step)
            if not later:
                self.board.finish(share, step)
        if later:
            self._later.append((step, share, later))

    @contextmanager
    def _given_up_if_it_fails(self) -> Iterator[None]:
        """Work on a claimed share: one thread at a time, and if it fails the table is lost."""
        try:
            with self._merging:
                yield
        except BaseException:
            self.board.give_up(self._others.rank)
            raise

    def _begin_hold(self) -> Position | None:
        """Hold commits off, unless one is under way."""
        with self._lock.hold(self._others.timeout):
            step = self.board.settle()
            if self.board.is_merging(step):
                return None
            signal = self.board.begun_signal(self._others.rank)
            self.board.signals.advance(signal, self.board.signals.value(signal) + 1)
            return step


def _still_at_it(
    done: NDArray[np.int64], claimed_by: NDArray[np.int64], step: Position
) -> list[int]:
    return [int(rank) for rank in np.unique(claimed_by[done != step + 1])]


def _mark(step: Position) -> int:
    """A step, as a byte: of old ones some look new, and their rows are merged a little early."""
    return step % 251 + 1
