"""Which transport brings the rows of which rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from featsync.errors import ConfigError, PlanError
from featsync.partitioned_table import PartitionedTable
from featsync.retention.arrays import Ids, Mask
from featsync.table import TensorTable
from featsync.transports import TRANSPORTS

__all__ = ["Route", "route_of"]


@dataclass(frozen=True)
class Route:
    """How this rank gets at the rows of one table.

    Attributes:
        by_rank: For each other rank that holds rows the name of a transport.
        table: What to read: an ordinary table where this machine's memory holds all rows in order
            of their ids, so that nobody has to look where they are.
        why: The reason, in words.
        reads_whole: Whether all rows are read out of this machine's memory, by their places.
    """

    by_rank: Mapping[int, str]
    table: TensorTable | PartitionedTable
    why: str
    reads_whole: bool = False

    def is_far(self, ids: Ids) -> Mask:
        """``(ids,)``: which rows of a table that is split come from elsewhere, not from memory."""
        if not isinstance(self.table, PartitionedTable):
            raise PlanError(f"{self.table.key} is read as a whole: none of its rows is far")
        partition = self.table.parts.partition
        is_far = np.zeros(partition.num_ranks, np.bool_)
        for rank, name in self.by_rank.items():
            is_far[rank] = not TRANSPORTS[name].reads_memory
        mask: Mask = is_far.take(partition.ranks_of(ids))
        return mask

    @property
    def transport(self) -> str:
        """The transports in use, for people; ``local`` if there are none."""
        return "+".join(sorted(set(self.by_rank.values()))) or "local"


def route_of(table: PartitionedTable, transport: str) -> Route:
    """Choose transports.

    Args:
        table: The table.
        transport: ``auto``, or a name of `TRANSPORTS`, which is used for all ranks that it
            reaches; ranks on other machines are always asked by ``p2p``.

    Raises:
        ConfigError: The transport that was asked for reaches none of the ranks.
    """
    parts = table.parts
    others = [r for r, size in enumerate(parts.partition.sizes) if size and r != parts.rank]
    wanted, why = transport, "asked for"
    if transport == "auto":
        wanted, why = _cheapest(table, others)
    elif others and not _reaches_anybody(table, wanted):
        names = ", ".join(f"rank {rank}" for rank in others)
        raise ConfigError(
            f"sync_feature.transport = {wanted!r} reaches none of the ranks that hold rows of "
            f"{table.key} ({names}): they are on other machines. Use 'p2p', or 'auto'."
        )
    by_rank = {
        rank: wanted if TRANSPORTS[wanted].reaches(table, rank) else "p2p" for rank in others
    }
    reads_all = all(TRANSPORTS[name].reads_memory for name in by_rank.values())
    whole = parts.whole
    if whole is not None and reads_all:
        why = f"{why}; all parts lie in this machine's memory"
        if not parts.partition.is_in_order:
            return Route(by_rank, table, why, reads_whole=True)
        table_of_host = TensorTable(table.key, lambda: whole, parts.segment)
        return Route(by_rank, table_of_host, f"{why}, in order of their ids")
    how = ", ".join(f"rank {rank} by {name}" for rank, name in by_rank.items())
    return Route(by_rank, table, f"{how or 'this rank holds all rows'}: {why}")


def _reaches_anybody(table: PartitionedTable, transport: str) -> bool:
    reaches = TRANSPORTS[transport].reaches
    own = table.parts.rank
    return any(
        reaches(table, rank) for rank in range(table.parts.partition.num_ranks) if rank != own
    )


def _cheapest(table: PartitionedTable, others: Sequence[int]) -> tuple[str, str]:
    """What the profile says of the transports that reach some other rank."""
    engine = table.parts.engine
    names = [
        name
        for name, transport in TRANSPORTS.items()
        if any(transport.reaches(table, rank) for rank in others)
    ]
    if engine is None or not names:
        return "shared_memory", "nobody to ask"
    return engine.profile.cheapest(names, table.kind.num_bytes)
