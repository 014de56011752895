"""A message of rows in a few portions: while one travels, the next is gathered, the last put away.

::

    owner    gather 0 │ gather 1 │ gather 2 │
    link              │ rows 0   │ rows 1   │ rows 2   │
    who asked                    │ put 0    │ put 1    │ put 2

Both sides cut where `portion_ends` says. A cut may run through a row: the owner has gathered it
by then, and who asked puts it away with the next portion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.row_items import take_rows

__all__ = ["Read", "by_portion", "portion_ends"]

# Each portion costs the threads of both sides two changes of the GIL, and wakes two threads of the
# backend; it gains the time of all portions but one. Smaller ones than these gain nothing.
_MOST = 4
_LEAST_BYTES = 1 << 22
_ALIGNMENT = 64


class Read(NamedTuple):
    """Rows to be read.

    Attributes:
        source: ``(num_source_rows, *row_shape)``.
        rows: ``(n,)``, of the source.
        target: ``(n, *row_shape)``, contiguous.
    """

    source: torch.Tensor
    rows: NDArray[np.int64]
    target: torch.Tensor

    def carry_out(self) -> None:
        """Read them."""
        take_rows(self.source, torch.from_numpy(self.rows), self.target)

    def cut(self, count: int) -> tuple[Read, Read]:
        """The first rows, and the others."""
        first = Read(self.source, self.rows[:count], self.target[:count])
        return first, Read(self.source, self.rows[count:], self.target[count:])


def portion_ends(num_bytes: int) -> list[int]:
    """Say at which bytes the portions of a message end, the last of them where it ends."""
    count = max(1, min(_MOST, num_bytes // _LEAST_BYTES))
    length = -(-num_bytes // (count * _ALIGNMENT)) * _ALIGNMENT
    return [min(number * length, num_bytes) for number in range(1, count + 1)]


def by_portion(
    reads: Sequence[Read], buffer: torch.Tensor, ends: Sequence[int]
) -> Iterator[list[Read]]:
    """Yield for each portion what has to be read before it can be sent.

    Args:
        reads: Whose targets lie in ``buffer`` one after the other.
        buffer: ``(num_bytes,)`` uint8.
        ends: Of the portions, see `portion_ends`.
    """
    left = [read for read in reversed(reads) if read.target.numel()]
    for end in ends:
        now: list[Read] = []
        while left and (start := left[-1].target.data_ptr() - buffer.data_ptr()) < end:
            read = left.pop()
            row_bytes = read.target[0].numel() * read.target.element_size()
            first, rest = read.cut(-(-(end - start) // row_bytes))
            now.append(first)
            if len(rest.rows):
                left.append(rest)
        yield now
