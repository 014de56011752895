"""What a rank serves: its parts of tables, and which rows others said they will want."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.errors import PlanError
from featsync.exchange.frames import Frame
from featsync.exchange.id_code import decode
from featsync.exchange.packing import packed_bytes, unpack
from featsync.exchange.portions import Read
from featsync.exchange.recent import RecentRows
from featsync.exchange.rooms import Rooms, room_prefix
from featsync.row_kind import RowKind

__all__ = ["Listener", "Served"]

Mask = NDArray[np.bool_]
_Announced = list[tuple[int, NDArray[np.int64]]]


class Listener(Protocol):
    """Gets messages of the kind ``dynamic`` about one table; must not wait."""

    def hear(self, rank: int, frame: Frame) -> None:
        """A message came."""

    def lose(self, rank: int) -> None:
        """A rank is gone."""

    def close(self) -> None:
        """No rank will send another one."""

    def join(self, timeout: float) -> None:
        """Wait until all is done that was asked for, after `close`."""


@dataclass
class Served:
    """The owner's side of an exchange; used by the engine's thread, but for `add`.

    Attributes:
        tables: Own parts ``(num_rows, *row_shape)``, by number; equal numbers on all ranks mean
            parts of one table.
        rows_sent: Rows given to other ranks so far.
        rooms: Shared memory that this rank keeps for the others of its machine.
        listeners: Of tables whose rows change, by number.
    """

    tables: dict[int, torch.Tensor] = field(default_factory=dict)
    rows_sent: int = 0
    rooms: Rooms = field(default_factory=Rooms)
    listeners: dict[int, Listener] = field(default_factory=dict)
    _dropped_by: dict[int, set[int]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _announced: dict[tuple[int, int], dict[int, _Announced]] = field(default_factory=dict)
    _recent: dict[int, RecentRows] = field(default_factory=dict)

    @property
    def rows_read(self) -> int:
        """Rows read from tables for other ranks so far."""
        return sum(recent.rows_read for recent in self._recent.values())

    @property
    def num_announced(self) -> int:
        """Minibatches that were announced and neither ordered nor forgotten."""
        return sum(len(batches) for batches in self._announced.values())

    def new_number(self) -> int:
        """Number a table that is about to be made; all ranks make theirs in the same order."""
        return next(self._numbers)

    def add(self, number: int, part: torch.Tensor) -> None:
        """Serve one more part, from before any rank can ask for its rows."""
        self.tables[number] = part

    def drop(self, number: int, rank: int, num_ranks: int) -> None:
        """A rank will ask for no more rows of a table; when none will, its memory is let go."""
        ranks = self._dropped_by.setdefault(number, set())
        ranks.add(rank)
        if len(ranks) == num_ranks:
            self.tables.pop(number, None)
            self._recent.pop(number, None)
            self.rooms.forget(room_prefix(number))
            if (listener := self.listeners.pop(number, None)) is not None:
                listener.close()
            del self._dropped_by[number]

    def close(self, timeout: float) -> None:
        """The process ends: let listeners end what they are at."""
        for listener in self.listeners.values():
            listener.close()
        for listener in self.listeners.values():
            listener.join(timeout)

    def hear(self, rank: int, frame: Frame) -> None:
        """Hand a message to the table that it is about."""
        self.listeners[frame.words["number"]].hear(rank, frame)

    def announce(self, rank: int, frame: Frame) -> None:
        """Note which rows a rank will want for one of its minibatches."""
        words, numbers, start = frame.words, frame.numbers, 0
        parts: _Announced = []
        for number, num_ids, code, num_bytes in words["parts"]:
            parts.append((number, decode(code, numbers[start : start + num_bytes], num_ids)))
            start += num_bytes
        batches = self._announced.setdefault((rank, words["session"]), {})
        batches[words["batch"]] = parts

    def find(
        self, rank: int, frame: Frame, buffer: torch.Tensor
    ) -> tuple[list[list[Mask]], list[Read]]:
        """Say how to put rows that were announced into a buffer, but those the rank has by now.

        Args:
            rank: Who ordered.
            frame: The order: for each part a bit an id, or all of them.
            buffer: ``(num_bytes,)``, as many bytes as the order says; only to be read once it is
                full.

        Returns:
            How the rows of each part are arranged, see `arranged`; and what is to be read, in the
            order in which it stands in ``buffer``, before this is called again.

        Raises:
            PlanError: They were not announced, are not there, or are not as many as ordered.
        """
        words = frame.words
        batches: Mapping[int, Any] = self._announced.get((rank, words["session"]), {})
        if words["batch"] not in batches:
            raise PlanError(
                f"rows of minibatch {words['batch']} were ordered but not announced: please "
                "report it"
            )
        parts = self._announced[rank, words["session"]].pop(words["batch"])
        wanted = list(_masked(parts, words["masks"], frame.numbers))
        tables = [self._table(number) for number, _ in wanted]
        kinds = [RowKind(tuple(table.shape[1:]), table.dtype) for table in tables]
        counts = [len(rows) for _, rows in wanted]
        if packed_bytes(counts, kinds) != buffer.numel():
            raise PlanError(
                f"{buffer.numel()} bytes were ordered where {counts} rows of {kinds} are "
                f"{packed_bytes(counts, kinds)}: please report it"
            )
        for (_, rows), table in zip(wanted, tables, strict=True):
            if len(rows) and int(rows.max()) >= len(table):
                raise PlanError(
                    f"row {int(rows.max())} was ordered of a part of {len(table)} rows: please "
                    "report it"
                )
        targets = unpack(buffer, counts, kinds)
        ahead = self._steps_ahead()
        step = words["batch"]
        all_masks, all_reads = [], []
        for (number, rows), table, target in zip(wanted, tables, targets, strict=True):
            recent = self._recent.setdefault(number, RecentRows())
            masks, reads = recent.find(step, table, rows, target, is_kept=step in ahead)
            all_masks.append(masks)
            all_reads += reads
            recent.let_go(ahead)
            self.rows_sent += len(rows)
        return all_masks, all_reads

    def forget(self, rank: int, session: int) -> None:
        """Drop what a loader's iteration announced: it is over."""
        self._announced.pop((rank, session), None)
        self._let_go()

    def lose(self, rank: int) -> None:
        """Drop all that a rank announced: it is gone."""
        for key in [key for key in self._announced if key[0] == rank]:
            del self._announced[key]
        self._let_go()
        for listener in self.listeners.values():
            listener.lose(rank)

    def _table(self, number: int) -> torch.Tensor:
        if number not in self.tables:
            raise PlanError(
                f"rows of table {number} were ordered, which all ranks have let go of: please "
                "report it"
            )
        return self.tables[number]

    def _steps_ahead(self) -> set[int]:
        """The steps that some rank announced and has not ordered."""
        return {batch for batches in self._announced.values() for batch in batches}

    def _let_go(self) -> None:
        ahead = self._steps_ahead()
        for recent in self._recent.values():
            recent.let_go(ahead)


def _masked(parts: _Announced, masks: list[int | None], numbers: NDArray[np.uint8]) -> _Announced:
    """Leave out the rows whose bit is not set."""
    wanted: _Announced = []
    start = 0
    for (number, rows), num_bytes in zip(parts, masks, strict=True):
        if num_bytes is None:
            wanted.append((number, rows))
            continue
        bits = np.unpackbits(numbers[start : start + num_bytes], count=len(rows))
        wanted.append((number, rows[bits.view(bool)]))
        start += num_bytes
    return wanted
