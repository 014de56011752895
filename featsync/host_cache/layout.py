"""Where what lies in the memory of a host cache.

::

    progress │ state │ totals │ signals │ place_of_row │ row_of_place │ keys │ fillers │ landings │
    readings │ words of uses │ counted uses │ slots

Each begins on a line of 64 bytes. All is zeros at first.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.futex import LINE_BYTES
from featsync.host_cache.directory import DirectoryArrays
from featsync.host_cache.uses import Progress, word_type
from featsync.row_kind import RowKind
from featsync.signals import Signals

__all__ = ["CacheMemory", "CacheShape"]


@dataclass(frozen=True)
class CacheShape:
    """What the ranks of a machine have to agree on.

    Attributes:
        num_rows: Rows of the table.
        num_slots: Of the cache, of all ranks together.
        num_ranks: Ranks of the machine.
        window: Minibatches that each of them knows ahead.
    """

    num_rows: int
    num_slots: int
    num_ranks: int
    window: int


class CacheMemory:
    """The arrays of one host cache, in memory that ranks share or in that of one process.

    Args:
        shape: Their sizes.
        kind: What a row is.
        memory: ``(num_bytes(shape, kind),)`` uint8, zeros at first.

    Attributes:
        progress: For `UsesOfRanks`.
        state: ``(1,)`` int64: not 0 if the cache cannot be trusted any more.
        signals: Two a rank: landings that are over, and readings.
        directory: For `Directory`.
        words: For `UsesOfRanks`.
        counts: ``(num_rows,)`` uint8, uses so far.
        totals: ``(2,)`` int64, see `CountedLevels`.
        slots: ``(num_slots, *row_shape)``, the cached rows.
    """

    def __init__(self, shape: CacheShape, kind: RowKind, memory: NDArray[np.uint8]) -> None:
        taken = 0

        def take(dtype: Any, *sizes: int) -> Any:
            nonlocal taken
            num_bytes = prod(sizes) * np.dtype(dtype).itemsize
            array = memory[taken : taken + num_bytes].view(dtype).reshape(sizes)
            taken += _lines(num_bytes)
            return array

        num_ranks, num_rows, num_slots = shape.num_ranks, shape.num_rows, shape.num_slots
        self.progress = Progress(*(take(np.int64, num_ranks) for _ in Progress._fields))
        self.state = take(np.int64, 1)
        self.totals = take(np.int64, 2)
        self.signals = Signals(take(np.uint8, Signals.num_bytes(2 * num_ranks)), 2 * num_ranks)
        self.directory = DirectoryArrays(
            take(np.int32, num_rows),
            take(np.int64, num_slots + 1),
            take(np.uint8, num_slots + 1),
            take(np.uint8, num_slots + 1),
            take(np.int32, num_slots + 1),
            take(np.int32, num_ranks, num_slots + 1),
        )
        self.words = take(word_type(shape.window), num_ranks, num_rows)
        self.counts = take(np.uint8, num_rows)
        slots = take(np.uint8, num_slots * kind.num_bytes)
        self.slots = torch.from_numpy(slots).view(kind.dtype).view(num_slots, *kind.shape)

    @staticmethod
    def num_bytes(shape: CacheShape, kind: RowKind) -> int:
        """How much memory a cache needs."""
        word_bytes = np.dtype(word_type(shape.window)).itemsize
        sizes = (
            *[8 * shape.num_ranks] * len(Progress._fields),
            8,
            16,
            Signals.num_bytes(2 * shape.num_ranks),
            4 * shape.num_rows,
            8 * (shape.num_slots + 1),
            shape.num_slots + 1,
            shape.num_slots + 1,
            4 * (shape.num_slots + 1),
            4 * shape.num_ranks * (shape.num_slots + 1),
            word_bytes * shape.num_ranks * shape.num_rows,
            shape.num_rows,
            shape.num_slots * kind.num_bytes,
        )
        return sum(map(_lines, sizes))


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES
