"""The rows of a feature on all machines, as one rank reads and writes them.

This machine's part is used in place; others are written to and asked, see `AwayPart`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.dynamic.away import AwayPart
from featsync.dynamic.homes import Homes
from featsync.dynamic.merge import RowNumbers
from featsync.dynamic.part import HostPart
from featsync.dynamic.positions import Position, epoch_of
from featsync.dynamic.reading import read_whole
from featsync.row_items import put_rows, take_rows

__all__ = ["FeatureRows"]

_WHAT = "featsync.DynamicFeature"


class FeatureRows:
    """Hands what one rank does to all machines that hold rows.

    Args:
        part: The rows that this machine holds.
        rank: This one.
        homes: Where the other rows are; ``None`` if this machine holds all.
    """

    def __init__(self, part: HostPart, rank: int, homes: Homes | None = None) -> None:
        self.part, self.homes = part, homes
        self._rank = rank
        self._away = () if homes is None else tuple(homes.away.values())
        self._numbers = RowNumbers(len(part.table))

    def __len__(self) -> int:
        """Rows of the whole table."""
        return len(self.part.table) if self.homes is None else self.homes.partition.num_rows

    @property
    def closed(self) -> Position:
        """Up to where this rank has ended its steps."""
        return self.part.board.closed(self._rank)

    def begin_epoch(self) -> None:
        """This rank takes part in the epoch that it has not begun."""
        with self.part.lock.hold(self.part.commits.timeout):
            self.part.board.excused[self._rank] = 0
        for away in self._away:
            away.begin()

    def close(self, where: Position) -> None:
        """This rank has ended its steps up to a position."""
        self.part.board.close(self._rank, where)
        for away in self._away:
            away.close(where)

    def end_epoch(self, where: Position) -> None:
        """This rank has ended its epoch after so many steps; safe in a finalizer."""
        self.part.board.end_epoch(self._rank, where)
        for away in self._away:
            away.end_epoch(where)

    def excuse(self) -> None:
        """This rank came to an epoch with nothing to do; safe in a finalizer."""
        epoch = epoch_of(self.closed)
        self.part.board.excused[self._rank] = epoch + 1
        for away in self._away:
            away.excuse(epoch)

    def learn(self) -> None:
        """This rank trains the rows by an optimizer."""
        self.part.board.learn()
        for away in self._away:
            away.learn()

    def settle(self, patience: float) -> None:
        """Block until all that this rank has closed is committed, on all machines.

        Args:
            patience: How many times the timeout to wait for a rank that lives.
        """
        where = self.closed
        asked = [(away, away.ask_settled(where, patience)) for away in self._away]
        self.part.commits.advance(where, patience)
        for away, ticket in asked:
            away.wait(ticket)

    def read_whole(
        self, ids: torch.Tensor, out: Mapping[str, torch.Tensor], least: Position
    ) -> Position:
        """Read rows of one whole step; blocks until it is committed.

        Args:
            ids: ``(n,)``.
            out: ``(n, *row_shape)``, to be filled, by name of what lies beside the rows; "" for
                themselves.
            least: A position up to which all has to be committed.

        Returns:
            Up to where the rows show all steps.
        """
        if self.homes is not None:
            split = self.homes.split(_WHAT, [ids])
            return read_whole(split, self.part, out, least)
        with self.part.commits.hold(least) as seen:
            for what, target in out.items():
                if target.device.type == "cpu":
                    take_rows(self.part.rows_of(what), ids, target)
                else:
                    target.copy_(self.part.rows_of(what).index_select(0, ids))
        return seen

    def copy(
        self, rows: torch.Tensor | None, least: Position, what: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Copy rows, or what lies beside them, of one whole step; see `read_whole`.

        Args:
            rows: ``(n,)``; ``None``: all.
            least: A position up to which all has to be committed.
            what: Names.
        """
        if rows is None and self.homes is None:
            with self.part.commits.hold(least):
                return {name: self.part.rows_of(name).clone() for name in what}
        if rows is None:
            rows = torch.arange(len(self))
        out = {}
        for name in what:
            like = self.part.rows_of(name)
            out[name] = torch.empty((len(rows), *like.shape[1:]), dtype=like.dtype)
        self.read_whole(rows, out, least)
        return out

    def write(
        self, step: Position, rows: torch.Tensor, values: torch.Tensor, factor: float
    ) -> None:
        """Write down entries of a step that this rank has not closed; see `Areas.append`."""
        for host, own, own_values in self._apart(rows, values):
            if host is None:
                is_distinct = self._numbers.are_distinct(own)
                areas = self.part.commits.areas
                areas.append(step, torch.from_numpy(own), own_values, is_distinct, factor)
            else:
                is_distinct = len(np.unique(own)) == len(own)
                host.write(step, own, own_values, is_distinct, factor)

    def assign(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows at once, the last of each; blocks while others read or merge."""
        backwards, first = np.unique(rows.numpy()[::-1], return_index=True)
        if len(backwards) < len(rows):
            values = values[torch.from_numpy(len(rows) - 1 - first)]
            rows = torch.from_numpy(backwards)
        asked = []
        for host, own, own_values in self._apart(rows, values):
            if host is None:
                write = partial(put_rows, self.part.table, torch.from_numpy(own), own_values)
                self.part.commits.assign(write)
            else:
                asked.append((host, host.ask_assigned(own, own_values)))
        for host, ticket in asked:
            host.wait(ticket)

    def assign_beside(self, values: dict[str, torch.Tensor]) -> None:
        """Write all that lies beside the rows of this machine; other machines' ranks do theirs.

        Args:
            values: By name, ``(num_rows, ...)`` of the whole table.
        """
        homes, beside = self.homes, self.part.beside
        own = None if homes is None else torch.from_numpy(homes.partition.rows_of(homes.host))

        def write() -> None:
            for name, state in values.items():
                beside[name].copy_(state if own is None else state[own])

        self.part.commits.assign(write)

    def _apart(
        self, rows: torch.Tensor, values: torch.Tensor
    ) -> list[tuple[AwayPart | None, NDArray[np.int64], torch.Tensor]]:
        """Split what is written by who holds it: this machine, ``None``, comes first."""
        homes = self.homes
        if homes is None:
            return [(None, rows.numpy(), values)]
        found = [
            (homes.away.get(host), own, values.index_select(0, which))
            for host, which, own in homes.apart(rows)
        ]
        return sorted(found, key=lambda one: one[0] is not None)
