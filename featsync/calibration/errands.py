"""Rows of partitioned tables, chosen at random, and fetched the way that a loader has them fetched.

Of a table with rows of each width every rank holds a part; each element of a row is the row's id,
so that what comes can be told right or wrong. Memory is warm: what rows are fetched into, and what
transports keep, is as large as the largest message from the warm-up on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from featsync.calibration.samples import LOCAL, Setting
from featsync.device import CpuDevice
from featsync.errors import PlanError
from featsync.exchange.engine import Engine
from featsync.exchange.split import split_by_rank
from featsync.move import Gather
from featsync.partitioned_table import PartitionedTable
from featsync.parts import bring_together
from featsync.plan import FeatureKey
from featsync.transports import TRANSPORTS, Landing, Pull, Transport

__all__ = ["Errand", "Errands"]

_ELEMENT_BYTES = 4
# Of a part. More than caches hold, for wide rows; as many as a graph has nodes, for narrow ones.
_MOST_ROWS = 1_000_000
_MOST_BYTES = 1 << 26


@dataclass(frozen=True, eq=False)
class Errand:
    """Rows to be fetched, as often as wanted.

    Attributes:
        way: How they come.
        fetch: Brings them; they are in place on return.
        messages: That it takes.
        ids: ``(n,)``, of the rows.
        target: ``(n, row_width)``, where they go; the same memory for all errands.
    """

    way: str
    fetch: Callable[[], None]
    messages: int
    ids: torch.Tensor
    target: torch.Tensor

    def check(self) -> None:
        """Look at both ends of each row that was fetched last.

        Raises:
            PlanError: Some are wrong.
        """
        right = (self.target[:, 0] == self.ids) & (self.target[:, -1] == self.ids)
        if not bool(right.all()):
            raise PlanError(
                f"{int((~right).sum()):,} of {len(right):,} rows that came by {self.way} are wrong;"
                " featsync.testing.check_transport says more about a transport of your own, else "
                "please report it"
            )


class Errands:
    """Makes errands of one rank.

    Args:
        engine: Of the group.
        settings: What messages will carry.
        timeout: Seconds to wait for the other ranks, while tables are made.
        on_table: Called after each table.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Sequence[Setting],
        timeout: float,
        on_table: Callable[[], None],
    ) -> None:
        self._rank, self._num_ranks = engine.world.rank, engine.world.size
        self._device = CpuDevice()
        self._batches = itertools.count()
        self._tables: dict[int, PartitionedTable] = {}
        for row_bytes in dict.fromkeys(setting.row_bytes for setting in settings):
            self._tables[row_bytes] = _table(row_bytes, engine, timeout)
            on_table()
        session = engine.open_session()
        self._transports: dict[str, Transport] = {
            name: transport(engine, session)
            for name, transport in TRANSPORTS.items()
            if all(
                transport.reaches(table, rank)
                for table in self._tables.values()
                for rank in self._others
            )
        }
        most = max(setting.rows * setting.row_bytes for setting in settings)
        self._memory = torch.zeros((self._num_ranks - 1) * most, dtype=torch.uint8)

    @property
    def ways(self) -> list[str]:
        """How rows can come to this rank."""
        return [*self._transports, LOCAL]

    def make(self, way: str, setting: Setting, of: Iterable[int] | None = None) -> Errand:
        """Choose rows at random.

        Args:
            way: How they are to come.
            setting: How many of each rank, and of which width.
            of: Who holds them; ``None``: every other rank, each as many. Of no effect on ``local``.
        """
        table = self._tables[setting.row_bytes]
        holders = [self._rank] if way == LOCAL else list(self._others if of is None else of)
        ids = torch.cat([_ids(table, rank, setting.rows) for rank in holders])
        ids = ids[torch.randperm(len(ids))]
        num_bytes = len(ids) * setting.row_bytes
        target = self._memory[:num_bytes].view(torch.int32).view(len(ids), -1)
        fetch = self._local(table, ids, target)
        if way != LOCAL:
            fetch = self._remote(self._transports[way], table, ids, target)
        return Errand(way, fetch, len(holders), ids, target)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._num_ranks) if rank != self._rank]

    def _local(
        self, table: PartitionedTable, ids: torch.Tensor, target: torch.Tensor
    ) -> Callable[[], None]:
        rows = torch.from_numpy(table.parts.partition.locate(ids.numpy())[1])
        gather = Gather(str(table.key), table.parts.readable[self._rank], rows, target)
        return lambda: self._device.execute([gather])

    def _remote(
        self, transport: Transport, table: PartitionedTable, ids: torch.Tensor, target: torch.Tensor
    ) -> Callable[[], None]:
        pulls = [
            Pull(table, part.rank, part.rows, part.positions)
            for part in split_by_rank(str(table.key), [ids], table.parts.partition)
        ]
        landings = [Landing(pull, None, target) for pull in pulls]

        def fetch() -> None:
            batch = next(self._batches)
            transport.announce(batch, pulls)
            fetches = transport.fetch(batch, landings)
            self._device.execute([*fetches.first, *fetches.last])

        return fetch


def _table(row_bytes: int, engine: Engine, timeout: float) -> PartitionedTable:
    """Bring one table together, each row full of its id; collective."""
    rank, num_ranks = engine.world.rank, engine.world.size
    num_rows = min(_MOST_ROWS, _MOST_BYTES // row_bytes)
    bounds = [num_rows * one for one in range(num_ranks + 1)]
    ids = torch.arange(bounds[rank], bounds[rank + 1], dtype=torch.int32)
    rows = ids[:, None].expand(-1, row_bytes // _ELEMENT_BYTES)
    parts = bring_together(rows, bounds, engine, timeout)
    return PartitionedTable(FeatureKey("node", None, f"{row_bytes} bytes"), parts)


def _ids(table: PartitionedTable, rank: int, num_ids: int) -> torch.Tensor:
    """Some of the ids that a rank holds, each once."""
    size = table.parts.partition.sizes[rank]
    return rank * size + torch.randperm(size)[:num_ids]
