"""Who of a machine's ranks will use which rows, and when: what all windows know together.

Time counts minibatches, from 1. Each rank has its own clock, the time of the minibatch that it
plans next; a rank that begins starts at the clock of those that are under way, so that ranks in
step use rows at the same time. Bit ``time % num_bits`` of a row's word says that the rank uses it
then::

    words[rank, row]     0 0 1 0 0 1 0 0         planned at 5: used at 5 and at 10 (8 bits)

A word has room for one more minibatch than the window, so no bit means two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from featsync.errors import ConfigError
from featsync.retention.arrays import Ids, chunks

__all__ = ["MAX_HOST_WINDOW", "NoUses", "Uses", "UsesOfRanks", "word_type"]

MAX_HOST_WINDOW = 31
_WORDS = (np.uint8, np.uint16, np.uint32)
_NEVER = np.iinfo(np.int64).max


def word_type(window: int) -> type[np.unsignedinteger[Any]]:
    """The smallest word that has a bit for each minibatch of a window, and one more.

    Raises:
        ConfigError: There is none.
    """
    for word in _WORDS:
        if window < 8 * np.dtype(word).itemsize:
            return word
    raise ConfigError(
        f"plan_feature.lookahead = {window}: with cache_scope=host it must be at most "
        f"{MAX_HOST_WINDOW}"
    )


class Uses(Protocol):
    """Tells when rows are used next."""

    @property
    def now(self) -> int:
        """The clock of the rank that is farthest behind."""

    def begin(self, rank: int, abandoned: Sequence[Ids]) -> None:
        """A rank starts; what it pushed before it stopped last, and never planned, is no use."""

    def end(self, rank: int) -> None:
        """A rank stops; takes no lock."""

    def push(self, rank: int, ids: Ids) -> int | None:
        """Note one more minibatch of a rank; returns its time, if times are known."""

    def pass_by(self, rank: int, ids: Ids) -> None:
        """A rank plans its next minibatch, of these ids: that use is past."""

    def next_of(self, ids: Ids) -> NDArray[np.int64]:
        """``(ids,)``: when each row is used next by any rank; -1 where nobody knows of a use."""


class NoUses:
    """Knows of no use, so that rows stay by their level alone."""

    now = 0

    def begin(self, rank: int, abandoned: Sequence[Ids]) -> None:
        """Nothing to forget."""

    def end(self, rank: int) -> None:
        """Nothing to forget."""

    def push(self, rank: int, ids: Ids) -> None:
        """Nothing to note."""

    def pass_by(self, rank: int, ids: Ids) -> None:
        """Nothing to forget."""

    def next_of(self, ids: Ids) -> NDArray[np.int64]:
        """``(ids,)``: -1."""
        return np.full(len(ids), -1)


class UsesOfRanks:
    """Known uses of the rows of one table; whoever calls holds a lock, but for `end`.

    Args:
        words: ``(num_ranks, num_rows)`` of `word_type`, zeros at first.
        clocks: ``(num_ranks,)`` int64: when each rank plans next; 0 for a rank that does not.
    """

    def __init__(self, words: NDArray[np.unsignedinteger[Any]], clocks: NDArray[np.int64]) -> None:
        self._words = words
        self._clocks = clocks
        self._num_bits = 8 * words.dtype.itemsize
        self._num_pushed = [0] * len(clocks)

    @property
    def now(self) -> int:
        """The clock of the rank that is farthest behind; 0 where none is under way."""
        running = self._clocks[self._clocks > 0]
        return int(running.min()) if len(running) else 0

    def begin(self, rank: int, abandoned: Sequence[Ids]) -> None:
        """A rank starts.

        Args:
            rank: The rank.
            abandoned: What it pushed before it stopped last, and never planned.
        """
        for ids in abandoned:
            self._words[rank, ids] = 0
        self._clocks[rank] = max(int(self._clocks.max()), 1)
        self._num_pushed[rank] = 0

    def end(self, rank: int) -> None:
        """A rank stops: what it will use does not count any more. Takes no lock."""
        self._clocks[rank] = 0

    def push(self, rank: int, ids: Ids) -> int:
        """Note one more minibatch of a rank; returns its time."""
        time = int(self._clocks[rank]) + self._num_pushed[rank]
        bit = self._words.dtype.type(1 << time % self._num_bits)
        words = self._words[rank]
        for part in chunks(len(ids)):
            found = words.take(ids[part], mode="clip")
            found |= bit
            words[ids[part]] = found
        self._num_pushed[rank] += 1
        return time

    def pass_by(self, rank: int, ids: Ids) -> None:
        """A rank plans its next minibatch, of these ids: that use is past."""
        keep = self._words.dtype.type(~(1 << int(self._clocks[rank]) % self._num_bits) & self._full)
        words = self._words[rank]
        for part in chunks(len(ids)):
            found = words.take(ids[part], mode="clip")
            found &= keep
            words[ids[part]] = found
        self._clocks[rank] += 1
        self._num_pushed[rank] -= 1

    def next_of(self, ids: Ids) -> NDArray[np.int64]:
        """``(ids,)``: when each row is used next by any rank; -1 where nobody knows of a use."""
        soonest = np.full(len(ids), _NEVER)
        full, num_bits = np.uint64(self._full), np.uint64(self._num_bits)
        for rank in np.flatnonzero(self._clocks):
            clock = int(self._clocks[rank])
            shift = np.uint64(clock % self._num_bits)
            words = self._words[rank].take(ids, mode="clip").astype(np.uint64)
            words = ((words >> shift) | (words << (num_bits - shift))) & full
            lowest = words & (~words + np.uint64(1))
            # The exponent of a power of two tells where its bit stands.
            ahead = np.frexp(lowest.astype(np.float64))[1].astype(np.int64) - 1
            np.minimum(soonest, np.where(lowest > 0, clock + ahead, _NEVER), out=soonest)
        soonest[soonest == _NEVER] = -1
        return soonest

    @property
    def _full(self) -> int:
        return (1 << self._num_bits) - 1
