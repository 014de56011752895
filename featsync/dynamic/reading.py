"""Reads rows of a feature of which other machines hold some."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.device import CpuDevice
from featsync.dynamic.away import AwayPart
from featsync.dynamic.homes import Homes, Split
from featsync.dynamic.letters import rows_of, values_of
from featsync.dynamic.part import HostPart
from featsync.dynamic.positions import Position
from featsync.dynamic.waits import PATIENCE
from featsync.errors import PeerTimeoutError
from featsync.exchange.split import RowsOfRank
from featsync.move import Gather
from featsync.row_items import put_rows
from featsync.row_kind import RowKind

__all__ = ["EarlyRead", "read_whole"]

_Asked = Sequence[tuple[AwayPart, RowsOfRank, int]]


class EarlyRead:
    """Rows that are read while they may change, and then patched.

    Used by one thread at a time, in the order of its methods.

    Args:
        part: This machine's.
        homes: Where the others are.
        out: ``(n, *row_shape)``, where the rows go.

    Attributes:
        is_asked: Whether other machines were asked for their rows.
    """

    def __init__(self, part: HostPart, homes: Homes, out: torch.Tensor) -> None:
        self._part, self._homes, self._out = part, homes, out
        self._split = Split(None, (), ())
        self._early: _Asked = ()
        self._patches: _Asked | None = None
        self.is_asked = False

    @property
    def num_away(self) -> int:
        """Rows that other machines send."""
        return sum(len(rows.rows) for _, rows in self._split.away)

    def ask(self, what: str, ids: Sequence[torch.Tensor], step: Position) -> None:
        """Ask other machines for rows as they are when all before a step is committed.

        Args:
            what: Name of the feature, for errors.
            ids: ``(n,)`` each.
            step: That is under way, or ended since: then patches may be waited for longer.

        Raises:
            FeatureError: An id lies outside the table.
        """
        self._split = self._homes.split(what, ids)
        self._early = [
            (away, rows, away.ask_early(step, rows.rows)) for away, rows in self._split.away
        ]
        self.is_asked = True

    def land(self) -> None:
        """Read this machine's rows, and block until the others are there.

        Raises:
            PeerError: They cannot come.
        """
        if self._split.near is not None:
            _read_near(self._part.table, self._split.near, self._out)
        _land(self._early, [self._out])

    def ask_patches(self, to: Position) -> None:
        """Ask for those that are written before a position, and have been since they were read."""
        if self._patches is None:
            self._patches = [
                (away, rows, away.ask_patch(early, to)) for away, rows, early in self._early
            ]

    def forget(self) -> None:
        """The loop was left; takes no lock."""
        for away, _, ticket in (*self._early, *(self._patches or ())):
            away.forget(ticket)

    @property
    def is_patched(self) -> bool:
        """Whether `patch` would not block."""
        return all(away.is_answered(ticket) for away, _, ticket in self._patches or ())

    def patch(self, written: NDArray[np.int64] | None) -> int:
        """Block until all rows are as they were asked for.

        Before, this rank has to merge what it left for later: the patches may wait for that.

        Args:
            written: ``(m,)`` int64, rows of this machine that were written since; ``None``: any may
                be.

        Returns:
            How many were read again.

        Raises:
            PeerError: Some cannot come.
        """
        count = 0
        near = self._split.near
        if near is not None and written is None:
            with self._part.commits.hold():
                _read_near(self._part.table, near, self._out)
            count += len(near.rows)
        elif near is not None and written is not None and len(written):
            again = self._part.where_among(near.rows, written)
            some = RowsOfRank(near.rank, near.rows.take(again), near.positions.take(again))
            _read_near(self._part.table, some, self._out)
            count += len(again)
        for away, rows, ticket in self._patches or ():
            frame = away.wait(ticket)
            places = rows_of(frame)
            if places is not None and len(places):
                positions = torch.from_numpy(rows.positions.take(places))
                put_rows(self._out, positions, *values_of(frame, [away.kind]))
                count += len(places)
        _repeat(self._split, self._out)
        return count


def read_whole(
    split: Split, part: HostPart, out: Mapping[str, torch.Tensor], least: Position
) -> Position:
    """Read rows of one step, which is whole on all machines; blocks.

    Machines may be a step apart: whoever is behind is asked again for the step of the others, until
    all give the same one.

    Args:
        split: The rows.
        part: This machine's.
        out: ``(n, *row_shape)``, to be filled, by name of what lies beside the rows; "" for
            themselves.
        least: A position up to which all has to be committed.

    Returns:
        Up to where the rows show all steps.

    Raises:
        PeerError: A rank that has to end its step has ended, or a rank that serves rows.
        PeerTimeoutError: For very long, machines were never found at one step.
    """
    limit = PATIENCE * part.commits.timeout
    deadline = time.monotonic() + limit
    while True:
        asked = [(away, rows, away.ask_rows(rows.rows, least, [*out])) for away, rows in split.away]
        seen = []
        if split.near is not None:
            with part.commits.hold(least) as where:
                for what, target in out.items():
                    _read_near(part.rows_of(what), split.near, target)
            seen.append(where)
        seen += _land(asked, [*out.values()])
        if len(set(seen)) <= 1:
            break
        if time.monotonic() > deadline:
            names = ", ".join(away.name for away, _ in split.away)
            raise PeerTimeoutError(
                f"for {limit:g} s this machine and those of {names} were never seen at one step of "
                "rows that change: others train too fast to be read from here. Read between "
                "epochs, or raise the timeout of featsync.DynamicFeature.",
                names,
            )
        least = max(seen)
    for target in out.values():
        _repeat(split, target)
    return seen[0] if seen else max(least, part.board.committed)


def _land(asked: _Asked, out: Sequence[torch.Tensor]) -> list[Position]:
    """Put rows of other machines in place as they come; returns which steps they show, if said."""
    kinds = [RowKind(tuple(target.shape[1:]), target.dtype) for target in out]
    left = list(asked)
    seen = []
    try:
        while left:
            away, rows, ticket = left.pop(0)
            frame = away.wait(ticket)
            positions = torch.from_numpy(rows.positions)
            for target, values in zip(out, values_of(frame, kinds), strict=True):
                put_rows(target, positions, values)
            seen.append(frame.words.get("seen", 0))
    finally:
        for away, _, ticket in left:
            away.forget(ticket)
    return seen


def _read_near(table: torch.Tensor, near: RowsOfRank, out: torch.Tensor) -> None:
    rows, positions = torch.from_numpy(near.rows), torch.from_numpy(near.positions)
    if out.device.type == "cpu":
        CpuDevice().execute([Gather("rows", table, rows, out, positions)])
    else:
        put_rows(out, positions, table.index_select(0, rows))


def _repeat(split: Split, out: torch.Tensor) -> None:
    for repeats in split.repeats:
        sources = torch.from_numpy(repeats.sources).to(out.device)
        put_rows(out, torch.from_numpy(repeats.positions), out.index_select(0, sources))
