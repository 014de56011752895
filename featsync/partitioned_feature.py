"""``featsync.PartitionedFeature``: a GraphBolt feature of which each rank holds only its part."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from featsync._graphbolt import gb
from featsync.device import CpuDevice
from featsync.errors import ConfigError
from featsync.exchange.engines import engine_of
from featsync.exchange.traffic import Traffic
from featsync.fetching import home_moves
from featsync.partitioned_table import PartitionedTable
from featsync.parts import bring_together
from featsync.plan import FeatureKey, Fetch, Want
from featsync.remote_rows import Delivery, RemoteRows
from featsync.routes import route_of
from featsync.table import TensorTable

__all__ = ["PartitionedFeature"]

_KEY = FeatureKey("partitioned", None, "feature")


class PartitionedFeature(gb.Feature):  # type: ignore[misc]  # DGL has no types
    """A static table that is split over the ranks of a group.

    Building one is collective: all ranks build theirs in the same order. Reading is not: a rank
    may iterate or read while the others do something else, or have left their loops. At the end of
    the process a rank waits, for ``timeout`` at most, until nobody can ask for its rows any more.

    Args:
        local_rows: ``(n, *row_shape)`` on the CPU, the rows that this rank holds, by ascending id;
            ``n`` may be 0. Parts that are mapped from files stay there. Others are copied into
            shared memory where ranks share a machine: let go of yours afterwards.
        partition: ``num_ranks + 1`` bounds as a list; or the owner of each row, as a tensor.
        process_group: The ranks that take part; ``None``: all of the default group.
        timeout: Seconds to wait for other ranks, and without a sign of life later.
        name: Of the feature, the same on all ranks. Features of equal rows and partition can only
            be told apart by it: without, ranks that build two of them in different orders mix them
            up, and nobody notices.

    Raises:
        ConfigError: The parts overlap or leave rows out, or ranks disagree. All ranks raise it.
        CapacityError: The machine's shared memory is too small.
        PeerError: Another rank could not do its part.
        PeerTimeoutError: Some ranks did not come in time; the message names them.
    """

    def __init__(
        self,
        local_rows: torch.Tensor,
        partition: Any,
        process_group: dist.ProcessGroup | None = None,
        timeout: float = 60.0,
        name: str | None = None,
    ) -> None:
        super().__init__()
        engine = engine_of(process_group, timeout)
        self.featsync_parts = bring_together(local_rows, partition, engine, timeout, name)

    def read(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Read rows, wherever they lie; blocks until they are there.

        Args:
            ids: ``(n,)``; ``None``: all, which brings the whole table here.

        Raises:
            FeatureError: An id lies outside the table.
            PeerError: A rank that holds some of the rows has ended.
        """
        parts = self.featsync_parts
        if ids is None:
            ids = torch.arange(parts.partition.num_rows)
        table, want, fetch = PartitionedTable(_KEY, parts), Want((ids,)), Fetch(len(ids))
        route = route_of(table, "auto")
        target = torch.empty((len(ids), *parts.kind.shape), dtype=parts.kind.dtype)
        if isinstance(route.table, TensorTable):
            CpuDevice().execute(home_moves(_KEY, route.table.tensor, want, fetch, target))
            return target
        rows = RemoteRows({_KEY: table}, {_KEY: route})
        try:
            rows.announce(0, {_KEY: want})
            fetches = rows.fetch(0, {_KEY: Delivery(fetch, target)})
            CpuDevice().execute([*fetches.first, *fetches.last])
        finally:
            rows.close()
        return target

    @property
    def traffic(self) -> Traffic:
        """Messages and bytes between this rank and the others of its group so far.

        Of all partitioned features of the group together, since their rows travel in the same
        messages. Take the difference of two (``after - before``) for what went in between.
        """
        engine = self.featsync_parts.engine
        return Traffic() if engine is None else engine.traffic

    def size(self) -> torch.Size:
        """Shape of one row."""
        return torch.Size(self.featsync_parts.kind.shape)

    def count(self) -> int:
        """Rows of the whole table."""
        return self.featsync_parts.partition.num_rows

    def update(self, value: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """Refuse.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "this feature cannot be updated: it is partitioned over ranks, which read it ahead. "
            "Make it a featsync.DynamicFeature with a partition"
        )
