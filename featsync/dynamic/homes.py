"""Which machine holds which rows of a feature that ranks of several machines share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.dynamic.away import AwayPart
from featsync.exchange.split import Repeats, RowsOfRank, split_by_rank
from featsync.partition import OwnerPartition, Partition, RangePartition

__all__ = ["Homes", "Split", "by_host"]

Rows = NDArray[np.int64]


class Split(NamedTuple):
    """Wanted rows, each once, by the machine that holds them.

    Attributes:
        near: Those of this machine; ``None``: none.
        away: Those of others.
        repeats: Further places of rows that are wanted in several.
    """

    near: RowsOfRank | None
    away: Sequence[tuple[AwayPart, RowsOfRank]]
    repeats: Sequence[Repeats]


@dataclass(frozen=True, eq=False)
class Homes:
    """Where rows lie.

    Attributes:
        partition: Of the rows over machines.
        host: This machine.
        away: The parts of the others.
    """

    partition: Partition
    host: int
    away: Mapping[int, AwayPart]

    def split(self, what: str, ids: Sequence[torch.Tensor]) -> Split:
        """Sort wanted rows by machine.

        Raises:
            FeatureError: An id lies outside the table.
        """
        found = split_by_rank(what, ids, self.partition)
        near = [rows for rows in found if rows.rank == self.host]
        away = [(self.away[rows.rank], rows) for rows in found if rows.rank != self.host]
        repeats = [rows.repeats for rows in found if rows.repeats is not None]
        return Split(near[0] if near else None, away, repeats)

    def near_rows(self, ids: Rows) -> Rows:
        """Which rows of this machine's part are among some ids, ``(n,)``; in order."""
        # Clipped: who reads rows that there are not hears of it when they are read.
        inside = ids.clip(0, max(0, self.partition.num_rows - 1))
        places = self.partition.places_of(inside) - self.partition.starts[self.host]
        near: Rows = places[(places >= 0) & (places < self.partition.sizes[self.host])]
        return near

    def num_away(self, ids: torch.Tensor) -> int:
        """How many rows of other machines are among some ids, ``(n,)``, each counted once."""
        rows = np.unique(ids.numpy())
        return int(np.count_nonzero(self.partition.ranks_of(rows) != self.host))

    def apart(self, ids: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, Rows]]:
        """Yield for each machine that holds some of the ids which, in order, and as which rows.

        Args:
            ids: ``(n,)`` int64 of the table, may repeat.
        """
        hosts, rows = self.partition.locate(ids.numpy())
        for host in np.unique(hosts).tolist():
            which = np.flatnonzero(hosts == host)
            yield host, torch.from_numpy(which), rows.take(which)


def by_host(partition: Partition, host_of_rank: Sequence[int]) -> Partition:
    """Give the rows of ranks to their machines.

    Example:
        >>> by_host(RangePartition([0, 3, 5, 9]), [0, 0, 1])
        RangePartition([0, 5, 9])
    """
    num_hosts = 1 + max(host_of_rank)
    if num_hosts == 1:
        return RangePartition([0, partition.num_rows])
    in_runs = [host for host, _ in groupby(host_of_rank)] == list(range(num_hosts))
    if isinstance(partition, RangePartition) and in_runs:
        sizes = np.bincount(host_of_rank, weights=partition.sizes, minlength=num_hosts)
        return RangePartition([0, *(int(bound) for bound in np.cumsum(sizes))])
    return OwnerPartition(np.asarray(host_of_rank, np.int16).take(partition.owners), num_hosts)
