"""Who of a machine's ranks will use which rows, and when: what all windows know together.

Bit ``turn % num_bits`` of a row's word says that the rank uses the row in its minibatch of that
number::

    words[rank, row]     0 0 1 0 0 1 0 0         at turn 5: used at turns 5 and 10 (8 bits)

A word has room for the window, so no bit means two minibatches.

Time is what turns of several ranks have in common. It counts minibatches too, from 1, and each rank
has its own clock, the time of the minibatch that it plans next. Ranks that train together keep
step: whoever plans finds the others where it is, or one step ahead. One that seems to be farther
ahead was given too late a time when it began, or ran ahead and is no faster now: its clock is put
back. Otherwise rows that two ranks want in one step would seem to be wanted at different times.

Who asks is told how many steps ahead of `now` a use lies, in one byte: wider arrays are what
planning would spend its time on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from featsync.errors import ConfigError
from featsync.retention.arrays import Bytes, Ids, chunks

__all__ = [
    "MAX_HOST_WINDOW",
    "UNKNOWN",
    "NoUses",
    "Progress",
    "Uses",
    "UsesOfRanks",
    "word_type",
]

MAX_HOST_WINDOW = 32
UNKNOWN = 128  # this many steps ahead and more: nobody knows of a use
_MAX_LEAD = 96  # of a rank before the last one, as far as it counts: bytes have to do
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


class Progress(NamedTuple):
    """How far each rank is; ``(num_ranks,)`` int64 each, zeros at first.

    Attributes:
        running: Not 0 while a rank is under way; only that rank writes it.
        clocks: Time of the minibatch that it plans next.
        turns: Minibatches that it has planned.
    """

    running: Ids
    clocks: Ids
    turns: Ids


class Uses(Protocol):
    """Tells when rows are used next."""

    now: int  # clock of the rank that was farthest behind, at the last call

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
        progress: Of the ranks.

    Attributes:
        now: Clock of the rank that was farthest behind, at the last `push` or `pass_by`.
    """

    def __init__(self, words: Words, progress: Progress) -> None:
        self._words = words
        self._running, self._clocks, self._turns = progress
        self._num_bits = 8 * words.dtype.itemsize
        self._num_pushed = [0] * len(words)
        self.now = 0

    def begin(self, rank: int, abandoned: Sequence[Ids]) -> None:
        """A rank starts, at the time of those that are under way.

        Args:
            rank: The rank.
            abandoned: What it pushed before it stopped last, and never planned.
        """
        for ids in abandoned:
            self._words[rank, ids] = 0
        self._clocks[rank] = max(int(self._clocks.max()), 1)
        self._num_pushed[rank] = 0
        self._running[rank] = 1

    def end(self, rank: int) -> None:
        """A rank stops: what it will use does not count any more. Takes no lock."""
        self._running[rank] = 0

    def push(self, rank: int, ids: Ids) -> int:
        """Note one more minibatch of a rank; returns its time."""
        ahead = self._num_pushed[rank]
        bit = self._bit(int(self._turns[rank]) + ahead)
        for part in chunks(len(ids)):
            words = self._words[rank].take(ids[part], mode="clip")
            words |= bit
            self._words[rank, ids[part]] = words
        self._num_pushed[rank] += 1
        self.now = min(self._clocks_of_running(rank).values())
        return int(self._clocks[rank]) + ahead

    def pass_by(self, rank: int, ids: Ids) -> Bytes:
        """A rank plans its next minibatch, of these ids: that use is past; see `Uses`."""
        keep = ~self._bit(int(self._turns[rank]))
        # What is noted already by a clock that is put back seems later than it is, no worse.
        np.minimum(self._clocks, self._clocks[rank] + 1, out=self._clocks)
        self._clocks[rank] += 1
        self._turns[rank] += 1
        self._num_pushed[rank] -= 1
        clocks = self._clocks_of_running(rank)
        self.now = min(clocks.values())
        soonest = np.full(len(ids), UNKNOWN, np.uint8)
        for part in chunks(len(ids)):
            for other, clock in clocks.items():
                words = self._words[other].take(ids[part], mode="clip")
                if other == rank:
                    words &= keep
                    self._words[rank, ids[part]] = words
                ahead = self._steps_to_first(words, int(self._turns[other]))
                ahead += np.uint8(min(clock - self.now, _MAX_LEAD))
                np.minimum(soonest[part], ahead, out=soonest[part])
        return soonest

    def _clocks_of_running(self, rank: int) -> dict[int, int]:
        """The clock of each rank that is under way, the one that asks among them."""
        running = {rank, *np.flatnonzero(self._running).tolist()}
        return {other: int(self._clocks[other]) for other in running}

    def _bit(self, turn: int) -> np.unsignedinteger[Any]:
        bit: np.unsignedinteger[Any] = self._words.dtype.type(1 << turn % self._num_bits)
        return bit

    def _steps_to_first(self, words: Words, turn: int) -> Bytes:
        """How long after a turn the first bit of each word stands; `UNKNOWN` or more for none."""
        shift, num_bits = turn % self._num_bits, self._num_bits
        word = self._words.dtype.type
        ahead = (words >> word(shift)) | (words << word(num_bits - shift))
        ahead &= ~ahead + word(1)  # only the lowest bit stays
        # The exponent of a power of two tells which; that of 0 is the least there is.
        exponents = ahead.astype(np.float32).view(np.uint32) >> _EXPONENT_BITS
        steps: Bytes = exponents.astype(np.uint8)
        steps -= _EXPONENT_BIAS
        return steps
