"""The wanted rows of a partitioned table, by who holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.errors import FeatureError
from featsync.partition import Partition

__all__ = ["RowsOfRank", "split_by_rank"]


@dataclass(frozen=True, eq=False)
class RowsOfRank:
    """What one minibatch wants of one rank.

    Attributes:
        rank: Who holds the rows.
        rows: ``(n,)`` int64, numbers among that rank's rows, never falling.
        positions: ``(n,)`` int64, where each stands among the wanted rows.
    """

    rank: int
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]


def split_by_rank(what: str, ids: Sequence[torch.Tensor], partition: Partition) -> list[RowsOfRank]:
    """Sort wanted rows by rank, and within a rank by row.

    Each position appears exactly once. Sorted rows are read in order of their addresses, and their
    numbers compress.

    Args:
        what: Name of the feature, for errors.
        ids: ``(n,)`` int32 or int64 each; positions count through all of them.
        partition: Who holds what.

    Returns:
        One entry for each rank that has any of the rows, by rank.

    Raises:
        FeatureError: An id lies outside the table.
    """
    joined = ids[0] if len(ids) == 1 else torch.cat(list(ids))
    wanted = joined.cpu().numpy().astype(np.int64, copy=False)
    if len(wanted) == 0:
        return []
    low, high = int(wanted.min()), int(wanted.max())
    if low < 0 or high >= partition.num_rows:
        outside = low if low < 0 else high
        raise FeatureError(
            f"feature {what}: id {outside} is outside its table of {partition.num_rows} rows "
            f"(allowed 0 to {partition.num_rows - 1}): table and graph do not match"
        )
    ranks, rows = partition.locate(wanted)
    # By row first, then stably by rank. Of 300,000 rows torch sorts in 4 ms, NumPy in 23; NumPy's
    # stable sort of 16 bits is a radix sort and takes 2.
    by_row = torch.sort(torch.from_numpy(rows)).indices.numpy()
    order = by_row[np.argsort(ranks[by_row], kind="stable")]
    counts = np.bincount(ranks, minlength=partition.num_ranks)
    ends = np.cumsum(counts)
    return [
        RowsOfRank(int(rank), rows[part], part)
        for rank in np.flatnonzero(counts)
        for part in [order[ends[rank] - counts[rank] : ends[rank]]]
    ]
