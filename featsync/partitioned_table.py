"""A table of which each rank holds a part, as one of the ranks sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from featsync.partition import Partition
from featsync.plan import FeatureKey
from featsync.row_kind import RowKind

if TYPE_CHECKING:
    from featsync.exchange.engine import Engine
    from featsync.segment import Segment

__all__ = ["PartitionedTable", "Parts"]


@dataclass(frozen=True, eq=False)
class Parts:
    """The parts of one table, and how this rank gets at them.

    Attributes:
        partition: Who holds what.
        kind: What a row is.
        rank: This rank.
        readable: ``(sizes[r], *row_shape)``: the parts that this process can read, by rank: its own
            and those of ranks on this machine.
        whole: ``(num_rows, *row_shape)``, all rows by place, where this machine's memory holds them
            so; else ``None``.
        segment: The shared memory that ``whole`` lies in, if any.
        engine: Brings the other parts; ``None`` where there is only one rank.
        number: The table's, by which engines know it.
    """

    partition: Partition
    kind: RowKind
    rank: int
    readable: Mapping[int, torch.Tensor] = field(repr=False)
    whole: torch.Tensor | None = field(default=None, repr=False)
    segment: Segment | None = field(default=None, repr=False)
    engine: Engine | None = field(default=None, repr=False)
    number: int = 0

    @property
    def ranks_of_host(self) -> tuple[int, ...]:
        """The ranks on this machine, ascending, this one among them."""
        return (self.rank,) if self.engine is None else self.engine.world.ranks_of_host


@dataclass(frozen=True, eq=False)
class PartitionedTable:
    """The home of a partitioned feature; its rows never change.

    Attributes:
        key: The feature.
        parts: Where its rows lie.
    """

    key: FeatureKey
    parts: Parts

    @property
    def kind(self) -> RowKind:
        """What a row is."""
        return self.parts.kind

    @property
    def num_rows(self) -> int:
        """Rows of the whole table."""
        return self.parts.partition.num_rows

    @property
    def version(self) -> Parts:
        """Never changes: the rows do not."""
        return self.parts
