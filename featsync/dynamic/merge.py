"""Merges what several ranks wrote to rows of one table in one step; the order is fixed.

Entries of one row are ordered by (rank, call, position). Instead of sorting them all, calls are
taken one after the other, and a call that names a row repeatedly is cut into *rounds* of distinct
rows: the first mention of each row, then the second, and so on::

    rank 0, call 0   rows 3 5 3     ─▶ round 3 5, round 3
    rank 1, call 0   rows 5 9       ─▶ round 5 9

So each round is a few large operations, and for any single row the order is that of its entries.
Most calls name each row once; then nothing is ever sorted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.row_items import put_rows, take_rows

__all__ = [
    "MERGES",
    "Entries",
    "Last",
    "Mean",
    "Merge",
    "Numbered",
    "Round",
    "RowNumbers",
    "Sum",
    "rounds_of",
]

Rows = NDArray[np.int64]


class Entries(NamedTuple):
    """What one call wrote.

    Attributes:
        rows: ``(n,)`` int64, the rows.
        values: ``(n, *row_shape)``.
        is_distinct: Whether no row is named twice.
        factor: A number that came with them; for gradients, the learning rate.
    """

    rows: Rows
    values: torch.Tensor
    is_distinct: bool
    factor: float = 0.0


class Round(NamedTuple):
    """Entries of distinct rows.

    Attributes:
        rows: ``(n,)`` int64, distinct.
        values: ``(at least n, *row_shape)``.
        positions: ``(n,)`` int64, which of ``values`` is for which row; ``None``: all, in order.
        factor: That came with the call.
    """

    rows: Rows
    values: torch.Tensor
    positions: Rows | None
    factor: float = 0.0

    def split(self, is_first: NDArray[np.bool_]) -> tuple[Round, Round]:
        """Some of the entries, ``(n,)``, and the others."""
        return self.some(np.flatnonzero(is_first)), self.some(np.flatnonzero(~is_first))

    def some(self, which: Rows) -> Round:
        """The entries at these places."""
        if len(which) == len(self.rows):
            return self  # `which` ascends
        positions = which if self.positions is None else self.positions.take(which)
        return Round(self.rows.take(which), self.values, positions, self.factor)

    def taken(self) -> torch.Tensor:
        """``(n, *row_shape)``: the values in order of the rows; may be a view."""
        if self.positions is None:
            return self.values
        out = torch.empty((len(self.rows), *self.values.shape[1:]), dtype=self.values.dtype)
        self.take_into(out)
        return out

    def take_into(self, out: torch.Tensor) -> None:
        """Copy the values in order of the rows."""
        if self.positions is None:
            out.copy_(self.values)
        else:
            take_rows(self.values, torch.from_numpy(self.positions), out)


class RowNumbers:
    """Numbers the rows of some rounds; keeps 4 bytes for each row of the table.

    Args:
        num_rows: Of the table.
    """

    def __init__(self, num_rows: int) -> None:
        self._numbers = np.full(num_rows, -1, np.int32)

    def number(self, rounds: Sequence[Round]) -> Numbered:
        """Number rows in the order in which they first come."""
        numbers = []
        parts = []
        count = 0
        for part in rounds:
            found = self._numbers.take(part.rows)
            new = np.flatnonzero(found < 0)
            rows = part.rows if len(new) == len(found) else part.rows.take(new)
            found[new] = np.arange(count, count + len(new), dtype=np.int32)
            self._numbers[rows] = found[new]
            count += len(new)
            numbers.append(found.astype(np.int64))
            parts.append(rows)
        all_rows = np.concatenate(parts) if parts else np.empty(0, np.int64)
        self._numbers[all_rows] = -1
        return Numbered(all_rows, numbers)

    def are_distinct(self, rows: Rows) -> bool:
        """Whether no row is named twice."""
        if len(rows) < 2 or bool((rows[1:] > rows[:-1]).all()):
            return True
        order = np.arange(len(rows), dtype=np.int32)
        self._numbers[rows] = order
        is_distinct = bool((self._numbers.take(rows) == order).all())
        self._numbers[rows] = -1
        return is_distinct


class Numbered(NamedTuple):
    """Rows of some rounds.

    Attributes:
        rows: ``(num_distinct,)`` int64, each row once.
        numbers: For each round ``(n,)`` int64, where in ``rows`` each of its rows stands. What is
            new in a round is numbered on from the last, in the round's order.
    """

    rows: Rows
    numbers: Sequence[Rows]


def rounds_of(entries: Iterable[Entries], share: int = 0, num_shares: int = 1) -> Iterator[Round]:
    """Cut calls into rounds of distinct rows.

    Args:
        entries: In order of ranks and calls.
        share: Which rows: those whose id leaves it when divided by ``num_shares``.
        num_shares: Of all.
    """
    for call in entries:
        rows, positions = call.rows, None
        if num_shares > 1:
            positions = np.flatnonzero(rows % num_shares == share)
            rows = rows.take(positions)
        if len(rows) == 0:
            continue
        if call.is_distinct:
            yield Round(rows, call.values, positions, call.factor)
            continue
        for which in _occurrences(rows):
            at = which if positions is None else positions.take(which)
            yield Round(rows.take(which), call.values, at, call.factor)


def _occurrences(rows: Rows) -> Iterator[Rows]:
    """Places of the first mention of each row, then of the second, and so on."""
    order = np.argsort(rows, kind="stable")
    ordered = rows.take(order)
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(is_first)
    run = np.cumsum(is_first) - 1
    mention = np.arange(len(rows)) - starts.take(run)
    by_mention = order.take(np.argsort(mention, kind="stable"))
    ends = np.cumsum(np.bincount(mention))
    yield from np.split(by_mention, ends[:-1])


class Merge(ABC):
    """What becomes of rows that were written in one step.

    Attributes:
        needs_floats: Whether it adds and divides, so that rows have to be float or complex.
    """

    needs_floats = True

    @abstractmethod
    def apply(self, table: torch.Tensor, rounds: Sequence[Round], numbers: RowNumbers) -> None:
        """Write rows.

        Args:
            table: ``(num_rows, *row_shape)``; nobody reads the rounds' rows meanwhile.
            rounds: What was written, in order.
            numbers: Numbers rows of the table.
        """


class Last(Merge):
    """The last entry of a row stays."""

    needs_floats = False

    def apply(self, table: torch.Tensor, rounds: Sequence[Round], numbers: RowNumbers) -> None:
        """Write the rounds one after the other."""
        for part in rounds:
            put_rows(table, torch.from_numpy(part.rows), part.taken())


class Sum(Merge):
    """``start + Σ(v - start)``; what only one entry wrote is stored as it is, bit for bit."""

    def apply(self, table: torch.Tensor, rounds: Sequence[Round], numbers: RowNumbers) -> None:
        """Write single entries, then add up what several wrote."""
        rows, numbered = numbers.number(rounds)
        counts = np.zeros(len(rows), np.int64)
        for found in numbered:
            counts[found] += 1  # distinct within a round
        shared = np.flatnonzero(counts > 1)
        at = np.full(len(rows), -1, np.int64)
        at[shared] = np.arange(len(shared))
        rows = rows.take(shared)
        start = table.index_select(0, torch.from_numpy(rows))
        total = torch.zeros_like(start)
        for part, found in zip(rounds, numbered, strict=True):
            place = at.take(found)
            several = np.flatnonzero(place >= 0)
            if len(several) < len(place):
                single = part.some(np.flatnonzero(place < 0))
                put_rows(table, torch.from_numpy(single.rows), single.taken())
            if len(several):
                where = torch.from_numpy(place.take(several))
                change = part.some(several).taken() - start.index_select(0, where)
                put_rows(total, where, total.index_select(0, where) + change)
        if len(rows):
            changed = start + self._scaled(total, torch.from_numpy(counts.take(shared)))
            put_rows(table, torch.from_numpy(rows), changed)

    def _scaled(self, total: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return total


class Mean(Sum):
    """``start + Σ(v - start) ÷ entries``; what only one entry wrote is stored as it is."""

    def _scaled(self, total: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        real = total.real.dtype if total.is_complex() else total.dtype
        return total / counts.to(real).view(-1, *[1] * (total.ndim - 1))


MERGES: dict[str, Merge] = {"last": Last(), "mean": Mean(), "sum": Sum()}
