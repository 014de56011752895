"""The rows of a feature that one machine holds, and how far all ranks are with them.

Laid out in one piece of memory that the machine's ranks share::

    lock │ board │ wanted, a byte a row │ rows
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.dynamic.areas import Areas
from featsync.dynamic.board import Board
from featsync.dynamic.commits import Commits
from featsync.dynamic.merge import Merge
from featsync.dynamic.waits import Neighbours
from featsync.futex import LINE_BYTES
from featsync.host_lock import HostLock
from featsync.row_items import take_rows
from featsync.row_kind import RowKind
from featsync.segment import Segment

__all__ = ["HostPart", "PartSize", "part_in", "rows_in"]

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class PartSize:
    """How large a part is.

    Attributes:
        num_rows: Of it.
        kind: What a row is.
        num_ranks: That read and write the rows.
        num_shares: Ranks of this machine, which merge them.
    """

    num_rows: int
    kind: RowKind
    num_ranks: int
    num_shares: int

    @property
    def num_bytes(self) -> int:
        """Of all of it, with its board and lock."""
        board = padded(Board.num_bytes(self.num_ranks, self.num_shares))
        rows = self.num_rows * self.kind.num_bytes
        return HostLock.NUM_BYTES + board + padded(self.num_rows) + rows


@dataclass(frozen=True, eq=False)
class HostPart:
    """The rows that this machine holds; all of them where there is but one machine.

    Rows are numbered within the part.

    Attributes:
        table: ``(num_rows, *row_shape)``.
        segment: The memory.
        board: How far ranks are.
        lock: Guards the board.
        commits: This process' hand in commits.
        beside: What lies beside each row, by name: states of an optimizer.
    """

    table: torch.Tensor
    segment: Segment = field(repr=False)
    board: Board = field(repr=False)
    lock: HostLock = field(repr=False)
    commits: Commits = field(repr=False)
    beside: dict[str, torch.Tensor] = field(default_factory=dict)
    _marks: list[NDArray[np.bool_]] = field(default_factory=list)
    _marking: threading.Lock = field(default_factory=threading.Lock)

    @property
    def kind(self) -> RowKind:
        """What a row is."""
        return RowKind(tuple(self.table.shape[1:]), self.table.dtype)

    def rows_of(self, what: str) -> torch.Tensor:
        """The rows, or what lies beside them."""
        return self.beside[what] if what else self.table

    def take(self, rows: Rows, what: str = "") -> torch.Tensor:
        """Copy rows, or what lies beside them, as they are now."""
        source = self.rows_of(what)
        out = torch.empty((len(rows), *source.shape[1:]), dtype=source.dtype)
        take_rows(source, torch.from_numpy(rows), out)
        return out

    def where_among(self, wanted: Rows, written: Rows) -> Rows:
        """Find which of some rows are among others.

        Args:
            wanted: ``(n,)``.
            written: ``(m,)``, may repeat.

        Returns:
            Their places in ``wanted``, ascending.
        """
        with self._marking:
            if not self._marks:
                self._marks.append(np.zeros(len(self.table), np.bool_))
            mark = self._marks[0]
            mark[written] = True
            hits = np.flatnonzero(mark.take(wanted))
            mark[written] = False
        return hits


def part_in(segment: Segment, size: PartSize, merge: Merge, others: Neighbours) -> HostPart:
    """See a part in memory of its size, with a lock laid at its beginning.

    Args:
        segment: The memory.
        size: Of the part.
        merge: What becomes of rows that several write.
        others: Who they are.
    """
    lock = HostLock(
        segment.array[: HostLock.NUM_BYTES], others.rank, "a dynamic feature", others.name_of
    )
    memory = segment.array[HostLock.NUM_BYTES :]
    board = Board(memory, size.num_ranks, size.num_shares)
    memory = memory[padded(Board.num_bytes(size.num_ranks, size.num_shares)) :]
    wanted, rows = memory[: size.num_rows], memory[padded(size.num_rows) :]
    table = rows_in(rows, size.num_rows, size.kind)
    areas = Areas(board, others.rank, size.kind)
    commits = Commits(table, wanted, board, lock, areas, merge, others)
    return HostPart(table, segment, board, lock, commits)


def rows_in(memory: NDArray[np.uint8], num_rows: int, kind: RowKind) -> torch.Tensor:
    """See ``(num_rows, *row_shape)`` at the beginning of some memory."""
    num_bytes = num_rows * kind.num_bytes
    if num_bytes == 0:
        return torch.zeros((num_rows, *kind.shape), dtype=kind.dtype)
    return torch.from_numpy(memory[:num_bytes]).view(kind.dtype).view(num_rows, *kind.shape)


def padded(num_bytes: int) -> int:
    """Up to the next line."""
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES
