"""What ranks wrote, where all ranks of the machine find it.

A rank has several areas, each for one step, in shared memory that grows as it has to and stays
warm. Calls lie one after the other::

    area   kind n distinct factor │ rows, int64 │ values │ kind n distinct factor │ ...

The board says of each area: step + 1, bytes used, calls, and where its memory is.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.dynamic.board import AREAS, Board
from featsync.dynamic.merge import Entries
from featsync.dynamic.positions import Position
from featsync.errors import ConfigError
from featsync.futex import LINE_BYTES
from featsync.row_kind import RowKind
from featsync.segment import Segment, SegmentHandle

__all__ = ["Areas"]

_STEP, _USED, _PID, _FD, _SIZE, _DEVICE, _INODE = range(7)
_LEAST_BYTES = 1 << 16


class Areas:
    """One rank's own areas, and its view of the others'.

    Own areas are written by one thread at a time, and read by any thread of any rank once the rank
    has closed their step.

    Args:
        board: Of the feature.
        rank: This one.
        kind: What a row is.
    """

    def __init__(self, board: Board, rank: int, kind: RowKind) -> None:
        self._board, self._rank, self._kind = board, rank, kind
        self._own: dict[int, Segment] = {}
        self._seen: dict[tuple[int, int], tuple[SegmentHandle, Segment]] = {}
        self._current = -1

    def append(
        self,
        step: Position,
        rows: torch.Tensor,
        values: torch.Tensor,
        is_distinct: bool,
        factor: float = 0.0,
    ) -> None:
        """Write down one call of a step that this rank has not closed.

        Args:
            step: Which.
            rows: ``(n,)`` int64.
            values: ``(n, *row_shape)``, of the table's dtype; copied.
            is_distinct: Whether no row is named twice.
            factor: A number to go with them.

        Raises:
            CapacityError: There is no memory for it; nothing has changed.
            ConfigError: Too many steps of this rank wait to be merged.
        """
        where = self._area_of(step)
        fields = self._board.areas[self._rank, where]
        start, num_rows = int(fields[_USED]), len(rows)
        rows_end = start + LINE_BYTES + _padded(8 * num_rows)
        end = rows_end + _padded(num_rows * self._kind.num_bytes)
        memory = self._reserve(where, end)
        head = memory[start : start + 32]
        head.view(np.int64)[:2] = num_rows, is_distinct
        head.view(np.float64)[2] = factor
        memory[start + LINE_BYTES :][: 8 * num_rows].view(np.int64)[:] = rows.numpy()
        if num_rows:
            _values(memory, rows_end, num_rows, self._kind).copy_(values)
        fields[_USED] = end

    def written(self, step: Position) -> list[list[Entries]]:
        """All calls of a step that all ranks have closed, by rank; views of shared memory."""
        return [self._calls(rank, step) for rank in range(self._board.num_ranks)]

    def _area_of(self, step: Position) -> int:
        """The area of a step, an unused one if it has none yet."""
        fields = self._board.areas[self._rank]
        if self._current >= 0 and fields[self._current, _STEP] == step + 1:
            return self._current
        committed = self._board.committed
        # After commit n + 1 all ranks have read again what n wrote; see invariant 5.
        free = [i for i in range(AREAS) if not fields[i, _STEP] or fields[i, _STEP] < committed]
        if not free:
            raise ConfigError(
                f"{AREAS} steps of this rank wait for other ranks to end theirs: a feature cannot "
                f"be updated farther ahead. Use a staleness of at most {AREAS - 2}."
            )
        # A warm one, if there is.
        warm = [i for i in free if i in self._own]
        self._current = (warm or free)[0]
        fields[self._current, _USED] = 0
        fields[self._current, _STEP] = step + 1
        return self._current

    def _reserve(self, where: int, num_bytes: int) -> NDArray[np.uint8]:
        old = self._own.get(where)
        if old is not None and old.num_bytes >= num_bytes:
            return old.array
        new = Segment.create(max(_LEAST_BYTES, num_bytes + num_bytes // 4))
        fields = self._board.areas[self._rank, where]
        if old is not None:
            used = int(fields[_USED])
            new.array[:used] = old.array[:used]
        handle = new.handle
        fields[_PID : _SIZE + 1] = handle.pid, handle.fd, handle.num_bytes
        fields[_DEVICE : _INODE + 1] = handle.identity
        self._own[where] = new
        return new.array

    def _calls(self, rank: int, step: Position) -> list[Entries]:
        found = np.flatnonzero(self._board.areas[rank, :, _STEP] == step + 1)
        if len(found) == 0:
            return []
        where = int(found[0])
        used = int(self._board.areas[rank, where, _USED])
        memory = self._memory(rank, where) if used else np.empty(0, np.uint8)
        calls = []
        start = 0
        while start < used:
            head = memory[start : start + 32]
            num_rows, is_distinct = (int(number) for number in head.view(np.int64)[:2])
            factor = float(head.view(np.float64)[2])
            rows = memory[start + LINE_BYTES :][: 8 * num_rows].view(np.int64)
            start += LINE_BYTES + _padded(8 * num_rows)
            values = _values(memory, start, num_rows, self._kind)
            start += _padded(num_rows * self._kind.num_bytes)
            calls.append(Entries(rows, values, bool(is_distinct), factor))
        return calls

    def _memory(self, rank: int, where: int) -> NDArray[np.uint8]:
        if rank == self._rank:
            return self._own[where].array
        fields = self._board.areas[rank, where]
        pid, fd, size, device, inode = (int(field) for field in fields[_PID : _INODE + 1])
        handle = SegmentHandle(pid, fd, size, (device, inode))
        seen = self._seen.get((rank, where))
        if seen is None or seen[0] != handle:
            seen = self._seen[rank, where] = (handle, Segment.open(handle))
        return seen[1].array


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


def _values(memory: NDArray[np.uint8], start: int, num_rows: int, kind: RowKind) -> torch.Tensor:
    num_bytes = num_rows * kind.num_bytes
    if num_bytes == 0:
        return torch.empty((num_rows, *kind.shape), dtype=kind.dtype)
    flat = torch.from_numpy(memory[start : start + num_bytes])
    return flat.view(kind.dtype).view(num_rows, *kind.shape)
