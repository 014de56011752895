"""Transport ``p2p``: the owner's engine sends rows, one message a rank and minibatch.

Two-sided, for ranks on any machine. Ids travel ahead, as soon as they are known; a short order
later says when, and which of them have been cached meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.exchange.arrival import Arrival
from featsync.exchange.engine import Engine
from featsync.exchange.id_code import encode
from featsync.exchange.packing import packed_bytes, rows_within, unpack
from featsync.exchange.recent import arranged
from featsync.move import Call
from featsync.partitioned_table import PartitionedTable
from featsync.pool import Pool
from featsync.row_items import put_rows
from featsync.row_kind import RowKind
from featsync.transports.contract import Fetches, Landing, Pull, Transport

__all__ = ["PointToPoint"]


class PointToPoint(Transport):
    """Orders rows from their owners' engines."""

    def __init__(self, engine: Engine, session: int) -> None:
        super().__init__(engine, session)
        self._blocks = Pool()

    @staticmethod
    def reaches(table: PartitionedTable, rank: int) -> bool:
        """Every other rank of the group."""
        return rank != table.parts.rank

    def announce(self, batch: int, pulls: Sequence[Pull]) -> None:
        """Send the ids to their owners."""
        for rank, of_rank in _by_rank(pulls):
            coded = [(pull, *encode(pull.rows)) for pull in of_rank]
            parts = [
                [pull.table.parts.number, len(pull.rows), code, len(data)]
                for pull, code, data in coded
            ]
            self.engine.tell(
                rank,
                {"kind": "announce", "session": self.session, "batch": batch, "parts": parts},
                [data for _, _, data in coded],
            )

    def fetch(self, batch: int, landings: Sequence[Landing]) -> Fetches:
        """Order from all ranks at once, about 0.1 ms each; the moves take what they send.

        The worker may still be waiting for the minibatch before: behind that the order would leave
        the link idle from the end of one minibatch's rows to the order of the next.
        """
        orders = [_Order(self, self._blocks, rank, of_rank) for rank, of_rank in _by_rank(landings)]
        for order in orders:
            order.post(batch)
        what = ", ".join(dict.fromkeys(str(landing.pull.table.key) for landing in landings))
        return Fetches(last=[Call(what, order.land) for order in orders])


class _Order:
    """Rows of one rank for one minibatch.

    Args:
        transport: Who orders them.
        blocks: Memory for what comes.
        rank: Who holds them.
        landings: Where they go, in the order in which they were announced.
    """

    def __init__(
        self, transport: PointToPoint, blocks: Pool, rank: int, landings: Sequence[Landing]
    ) -> None:
        self._engine, self._session = transport.engine, transport.session
        self._blocks = blocks
        self._rank = rank
        self._landings = landings
        self._arrival: Arrival | None = None

    def post(self, batch: int) -> None:
        """Ask for the rows; does not wait."""
        num_bytes = packed_bytes(*self._layout())
        # Of nothing nobody hears: the owner forgets what was announced when the iteration ends.
        if num_bytes == 0:
            return
        masks = [None if one.mask is None else np.packbits(one.mask) for one in self._landings]
        words: dict[str, Any] = {
            "kind": "order",
            "session": self._session,
            "batch": batch,
            "masks": [None if mask is None else len(mask) for mask in masks],
        }
        buffer = self._blocks.take((num_bytes,), torch.uint8)
        given = [mask for mask in masks if mask is not None]
        self._arrival = self._engine.ask(self._rank, words, given, buffer)

    def land(self) -> None:
        """Wait for the rows and put them in place, those first that come first."""
        arrival, self._arrival = self._arrival, None
        if arrival is None:
            return
        layout = self._layout()
        views = list(unpack(arrival.buffer, *layout))
        places: list[torch.Tensor] = []
        placed = [0] * len(views)
        for num_bytes in self._engine.wait(arrival, self._session):
            if not places:
                places = [
                    torch.from_numpy(_arranged(landing.positions, masks))
                    for landing, masks in zip(self._landings, arrival.masks, strict=True)
                ]
            for i, end in enumerate(rows_within(num_bytes, *layout)):
                part = slice(placed[i], end)
                put_rows(self._landings[i].target, places[i][part], views[i][part])
                placed[i] = end

    def _layout(self) -> tuple[list[int], list[RowKind]]:
        counts = [len(landing.rows) for landing in self._landings]
        return counts, [landing.pull.table.kind for landing in self._landings]


def _arranged(
    positions: NDArray[np.int64], masks: Sequence[NDArray[np.bool_]]
) -> NDArray[np.int64]:
    """Where rows go, in the order in which they come."""
    return positions.take(arranged(len(positions), masks)) if masks else positions


def _by_rank(wanted: Sequence[Any]) -> list[tuple[int, list[Any]]]:
    """Group pulls or landings by who holds the rows; the same order on both sides."""

    def rank_of(one: Any) -> int:
        return (one if isinstance(one, Pull) else one.pull).rank

    ordered = sorted(wanted, key=rank_of)
    return [(rank, list(group)) for rank, group in itertools.groupby(ordered, key=rank_of)]
