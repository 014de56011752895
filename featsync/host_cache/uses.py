"""Who of a machine's ranks will use which rows, and when: what all windows know together.

Time counts minibatches, from 1. Each rank has its own clock, the time of the minibatch that it
plans next; a rank that begins starts at the clock of those that are under way, so that ranks in
step use rows at the same time. Bit ``time % num_bits`` of a row's word says that the rank uses it
then::

    words[rank, row]     0 0 1 0 0 1 0 0         planned at 5: used at 5 and at 10 (8 bits)

A word has room for the window, so no bit means two minibatches. Who asks is told how many steps
ahead of `now` a use lies, in one byte: wider arrays are what planning would spend its time on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from featsync.errors import ConfigError
from featsync.retention.arrays import Bytes, Ids, chunks

__all__ = ["MAX_HOST_WINDOW", "UNKNOWN", "NoUses", "Uses", "UsesOfRanks", "word_type"]

MAX_HOST_WINDOW = 32
UNKNOWN = 128  # this many steps ahead and more: nobody knows of a use
_MAX_LEAD = 96  # of a rank before the last one, as far as it counts
_WORDS = (np.uint8, np.uint16, np.uint32)
_EXPONENT_BITS, _EXPONENT_BIAS = np.uint32(23), np.uint8(127)

Words = NDArray[np.unsignedinteger[Any]]


def word_type(window: int) -> type[np.unsignedinteger[Any]]:
    """The smallest word that has a bit for each minibatch of a window.

    Raises:
        ConfigError: There is none.
    """
    for word in _WORDS:
        if window <= 8 * np.dtype(word).itemsize:
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

    def pass_by(self, rank: int, ids: Ids) -> Bytes:
        """A rank plans its next minibatch, of these ids: that use is past.

        Returns:
            ``(ids,)``: steps from `now`, as it is then, until any rank uses each row next;
            `UNKNOWN` or more where nobody knows of a use.
        """


class NoUses:
    """Knows of no use, so that rows stay by their level alone."""

    now = 0

    def begin(self, rank: int, abandoned: Sequence[Ids]) -> None:
        """Nothing to forget."""

    def end(self, rank: int) -> None:
        """Nothing to forget."""

    def push(self, rank: int, ids: Ids) -> None:
        """Nothing to note."""

    def pass_by(self, rank: int, ids: Ids) -> Bytes:
        """``(ids,)``: `UNKNOWN`."""
        return np.full(len(ids), UNKNOWN, np.uint8)


class UsesOfRanks:
    """Known uses of the rows of one table; whoever calls holds a lock, but for `end`.

    Args:
        words: ``(num_ranks, num_rows)`` of `word_type`, zeros at first.
        clocks: ``(num_ranks,)`` int64: when each rank plans next; 0 for a rank that does not.
    """

    def __init__(self, words: Words, clocks: NDArray[np.int64]) -> None:
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
        bit = self._bit(time)
        for part in chunks(len(ids)):
            words = self._words[rank].take(ids[part], mode="clip")
            words |= bit
            self._words[rank, ids[part]] = words
        self._num_pushed[rank] += 1
        return time

    def pass_by(self, rank: int, ids: Ids) -> Bytes:
        """A rank plans its next minibatch, of these ids: that use is past; see `Uses`."""
        keep = ~self._bit(int(self._clocks[rank]))
        self._clocks[rank] += 1
        self._num_pushed[rank] -= 1
        now = self.now
        clocks = {int(r): int(self._clocks[r]) for r in np.flatnonzero(self._clocks)}
        soonest = np.full(len(ids), UNKNOWN, np.uint8)
        for part in chunks(len(ids)):
            for other, clock in clocks.items():
                words = self._words[other].take(ids[part], mode="clip")
                if other == rank:
                    words &= keep
                    self._words[rank, ids[part]] = words
                ahead = self._steps_to_first(words, clock)
                ahead += np.uint8(min(clock - now, _MAX_LEAD))
                np.minimum(soonest[part], ahead, out=soonest[part])
        return soonest

    def _bit(self, time: int) -> np.unsignedinteger[Any]:
        bit: np.unsignedinteger[Any] = self._words.dtype.type(1 << time % self._num_bits)
        return bit

    def _steps_to_first(self, words: Words, clock: int) -> Bytes:
        """How long after a time the first bit of each word stands; `UNKNOWN` or more for none."""
        shift, num_bits = clock % self._num_bits, self._num_bits
        word = self._words.dtype.type
        ahead = (words >> word(shift)) | (words << word(num_bits - shift))
        ahead &= ~ahead + word(1)  # only the lowest bit stays
        # The exponent of a power of two tells which; that of 0 is the least there is.
        exponents = ahead.astype(np.float32).view(np.uint32) >> _EXPONENT_BITS
        steps: Bytes = exponents.astype(np.uint8)
        steps -= _EXPONENT_BIAS
        return steps
