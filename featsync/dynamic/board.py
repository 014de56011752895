"""What the ranks of a machine know of each other's steps: counters and claims in shared memory.

::

    signals   committed       position up to which all is merged into the table   under the lock
              ready           the same for rows that are wanted next              under the lock
              closed[r]       position up to which rank r has ended its steps     r advances it
              begun[r]        reads that hold commits off                         under the lock
              ended[r]        those of them that are over                         under the lock
    words     steps[r][2]     steps of an epoch on r, by its parity               r, before closing
              excused[r]      1 + the epoch that r had no minibatch for           r, under the lock
              claims[s]       1 + the step whose share s somebody merges          under the lock
              done[s]         1 + the step whose share s is merged                under the lock
              done_now[s]     the same for rows that are wanted next              under the lock
              claimed_by[s]   who merges it                                       under the lock
              broken          1 + the rank that failed while it merged            that rank
              assigned        how often rows were written outside of loops        under the lock
              learns          whether some rank trains the rows by an optimizer   any rank
              areas           where what ranks wrote lies, see `Areas`            their rank
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from featsync.dynamic.positions import Position, after_epoch, epoch_of, steps_of
from featsync.signals import Signals

__all__ = ["AREAS", "AREA_WORDS", "COMMITTED", "READY", "Board"]

AREAS = 16  # steps of one rank that may wait to be merged
AREA_WORDS = 8
COMMITTED, READY = range(2)  # signals


class Board:
    """One rank's view of it.

    Args:
        memory: ``(at least num_bytes(num_ranks, num_shares),)``, zeros when it was made.
        num_ranks: That read and write the rows, here or from other machines.
        num_shares: Of a commit: as many as there are ranks to merge them.
    """

    def __init__(self, memory: NDArray[np.uint8], num_ranks: int, num_shares: int) -> None:
        size = Signals.num_bytes(2 + 3 * num_ranks)
        self.signals = Signals(memory[:size], 2 + 3 * num_ranks)
        self.num_ranks, self.num_shares = num_ranks, num_shares
        words = memory[size : self.num_bytes(num_ranks, num_shares)].view(np.int64)
        sizes = [2 * num_ranks, num_ranks, *[num_shares] * 4, 1, 1, 1]
        sizes.append(num_ranks * AREAS * AREA_WORDS)
        parts = np.split(words, np.cumsum(sizes)[:-1])
        self.steps = parts[0].reshape(num_ranks, 2)
        self.excused, self.claims, self.done, self.done_now, self.claimed_by = parts[1:6]
        self._broken, self._assigned, self._learns = parts[6:9]
        self.areas = parts[9].reshape(num_ranks, AREAS, AREA_WORDS)

    @staticmethod
    def num_bytes(num_ranks: int, num_shares: int) -> int:
        """How much memory a board needs."""
        words = 3 * num_ranks + 4 * num_shares + 3 + num_ranks * AREAS * AREA_WORDS
        return Signals.num_bytes(2 + 3 * num_ranks) + 8 * words

    def closed(self, rank: int) -> Position:
        """Up to where a rank has ended its steps."""
        return self.signals.value(self.closed_signal(rank))

    @property
    def committed(self) -> Position:
        """Up to where all is merged into the table."""
        return self.signals.value(COMMITTED)

    @property
    def ready(self) -> Position:
        """Up to where all rows are merged that the step after wants."""
        return self.signals.value(READY)

    def close(self, rank: int, where: Position) -> None:
        """A rank has ended its steps up to there."""
        self.signals.advance(self.closed_signal(rank), where)

    def end_epoch(self, rank: int, where: Position) -> None:
        """A rank has ended its epoch after so many steps; safe in a finalizer."""
        self.steps[rank, epoch_of(where) % 2] = steps_of(where)
        self.close(rank, after_epoch(where))

    def settle(self) -> Position:
        """Go on to the next epoch if all have ended this one; under the lock.

        Returns:
            The step that is to be committed next.
        """
        where = self.committed
        begun = epoch_of(where)
        for rank in np.flatnonzero(self.excused == begun + 1):
            # It came to this epoch with nothing to do and did not say so: nobody waits for it.
            if epoch_of(self.closed(int(rank))) == begun:
                self.end_epoch(int(rank), where - steps_of(where))
        is_over = all(epoch_of(self.closed(r)) > begun for r in range(self.num_ranks))
        if is_over and steps_of(where) >= self.steps[:, begun % 2].max():
            where = after_epoch(where)
            self.signals.advance(READY, where)
            self.signals.advance(COMMITTED, where)
        return where

    def is_closed(self, step: Position) -> bool:
        """Whether all ranks have ended a step."""
        return all(self.closed(rank) > step for rank in range(self.num_ranks))

    def free_shares(self, step: Position) -> NDArray[np.int64]:
        """Shares of a commit that nobody merges yet."""
        return np.flatnonzero(self.claims != step + 1)

    def is_merging(self, step: Position) -> bool:
        """Whether somebody has begun to merge a step."""
        return bool((self.claims == step + 1).any())

    def finish_now(self, share: int, step: Position) -> None:
        """The rows of a share are merged that are wanted next. Under the lock."""
        self.done_now[share] = step + 1
        if (self.done_now == step + 1).all():
            self.signals.advance(READY, step + 1)

    def finish(self, share: int, step: Position) -> None:
        """A share is merged; with the last one the step is committed. Under the lock."""
        self.done[share] = step + 1
        if (self.done == step + 1).all():
            self.signals.advance(COMMITTED, step + 1)

    def holders(self) -> list[tuple[int, int]]:
        """Reads that hold commits off: signals to wait for, and counts."""
        found = []
        for rank in range(self.num_ranks):
            begun = self.signals.value(self.begun_signal(rank))
            if self.signals.value(self.ended_signal(rank)) < begun:
                found.append((rank, begun))
        return found

    def closed_signal(self, rank: int) -> int:
        """Signal of how far a rank is."""
        return 2 + rank

    def begun_signal(self, rank: int) -> int:
        """Signal of reads begun."""
        return 2 + self.num_ranks + rank

    def ended_signal(self, rank: int) -> int:
        """Signal of reads ended."""
        return 2 + 2 * self.num_ranks + rank

    @property
    def broken_by(self) -> int | None:
        """Who failed in the middle of a commit: the table is lost."""
        return int(self._broken[0]) - 1 if self._broken[0] else None

    def give_up(self, rank: int) -> None:
        """A rank failed in the middle of a commit."""
        self._broken[0] = rank + 1

    @property
    def learns(self) -> bool:
        """Whether some rank trains the rows by an optimizer; then all have to."""
        return bool(self._learns[0])

    def learn(self) -> None:
        """A rank trains the rows by an optimizer."""
        self._learns[0] = 1

    @property
    def assigned(self) -> int:
        """How often rows were written outside of loops."""
        return int(self._assigned[0])

    def count_assignment(self) -> None:
        """Rows were written outside of loops; under the lock."""
        self._assigned[0] += 1
