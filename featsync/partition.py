"""Who holds which row of a table that is split over ranks, and as which of its own rows.

Two kinds, told apart by what the user gives::

    bounds  (R+1,)          rank r holds rows bounds[r] up to bounds[r+1]     no memory a row
    owners  (num_rows,)     rank owners[i] holds row i                        6 bytes a row

A rank numbers the rows that it holds by ascending id. Parts laid one after the other, in order of
ranks, give each row of the table a *place*, which tells both: whose it is, and which of its rows.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.errors import ConfigError

__all__ = ["OwnerPartition", "Partition", "RangePartition", "as_partition"]

MAX_RANKS = 1 << 15

Ids = NDArray[np.int64]
Places = NDArray[Any]  # int32 where that is wide enough, else int64
Ranks = NDArray[np.int16]


class Partition(ABC):
    """Gives every row of a table to exactly one rank.

    Attributes:
        num_rows: Rows of the whole table.
        sizes: ``(num_ranks,)``: rows of each rank.
        starts: ``(num_ranks,)``: the place of each rank's first row.
        is_in_order: Whether the place of every row is its id.
    """

    is_in_order: ClassVar[bool] = False

    num_rows: int
    sizes: tuple[int, ...]
    starts: Ids

    @property
    def num_ranks(self) -> int:
        """Ranks that hold rows, or could."""
        return len(self.sizes)

    @abstractmethod
    def places_of(self, ids: NDArray[Any]) -> Places:
        """``(ids,)``: the place of each row; ids lie within the table."""

    def locate(self, ids: Ids) -> tuple[Ranks, Ids]:
        """Find rows.

        Args:
            ids: ``(n,)``, each within the table.

        Returns:
            ``(n,)`` the rank that holds each, and ``(n,)`` its number among that rank's rows.
        """
        ranks = self.ranks_of(ids)
        return ranks, self.places_of(ids) - self.starts.take(ranks)

    @abstractmethod
    def ranks_of(self, ids: Ids) -> Ranks:
        """``(ids,)``: the rank that holds each row; of ids outside the table, some rank."""

    @abstractmethod
    def rows_of(self, rank: int) -> Ids:
        """``(sizes[rank],)``: the ids that a rank holds, ascending."""

    @property
    def owners(self) -> Ranks:
        """``(num_rows,)``: the rank that holds each row; made on demand."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int16), self.sizes)

    @property
    @abstractmethod
    def digest(self) -> object:
        """A small value by which ranks see whether they were given the same partition."""


class RangePartition(Partition):
    """Each rank holds one run of consecutive rows, which may be empty.

    Args:
        bounds: ``(num_ranks + 1,)``, from 0, never falling.

    Raises:
        ConfigError: They are something else.

    Example:
        >>> RangePartition([0, 3, 5]).locate(np.array([4, 0, 3]))
        (array([1, 0, 1], dtype=int16), array([1, 0, 0]))
    """

    is_in_order = True

    def __init__(self, bounds: Sequence[int]) -> None:
        _check_bounds(bounds)
        self.bounds = tuple(int(bound) for bound in bounds)
        self.num_rows = self.bounds[-1]
        self.sizes = tuple(end - start for start, end in pairwise(self.bounds))
        self.starts = np.array(self.bounds[:-1], np.int64)
        self._ends = np.array(self.bounds[1:], np.int64)

    def places_of(self, ids: NDArray[Any]) -> Places:
        """The ids themselves."""
        return ids

    def ranks_of(self, ids: Ids) -> Ranks:
        """``(ids,)``: the rank that holds each row."""
        ranks = np.searchsorted(self._ends[:-1], ids, side="right")
        return ranks.astype(np.int16)

    def rows_of(self, rank: int) -> Ids:
        """The ids that a rank holds."""
        return np.arange(self.bounds[rank], self.bounds[rank + 1], dtype=np.int64)

    @property
    def digest(self) -> object:
        """The bounds."""
        return self.bounds

    def __repr__(self) -> str:
        return f"RangePartition({list(self.bounds)})"


class OwnerPartition(Partition):
    """Each row has the owner that a list names.

    Args:
        owners: ``(num_rows,)``, a rank for each row.
        num_ranks: How many ranks there are.

    Raises:
        ConfigError: A row is given to a rank that does not exist.

    Example:
        >>> OwnerPartition(np.array([1, 0, 1, 1]), num_ranks=2).locate(np.array([3, 1]))
        (array([1, 0], dtype=int16), array([2, 0]))
    """

    def __init__(self, owners: NDArray[Any], num_ranks: int) -> None:
        _check_owners(owners, num_ranks)
        self._owners: Ranks = owners.astype(np.int16)
        self.num_rows = len(owners)
        counts = np.bincount(self._owners, minlength=num_ranks)
        self.sizes = tuple(int(count) for count in counts)
        self.starts = np.cumsum(counts) - counts
        # Sorted by owner, ascending ids within each.
        by_place = np.argsort(self._owners, kind="stable")
        self._places: Places
        self._places = np.empty(self.num_rows, np.int64 if self.num_rows > 1 << 31 else np.int32)
        self._places[by_place] = np.arange(self.num_rows)

    def places_of(self, ids: NDArray[Any]) -> Places:
        """``(ids,)``: the place of each row."""
        return self._places.take(ids)

    def ranks_of(self, ids: Ids) -> Ranks:
        """``(ids,)``: the rank that holds each row."""
        ranks: Ranks = self._owners.take(ids, mode="clip")
        return ranks

    def rows_of(self, rank: int) -> Ids:
        """The ids that a rank holds."""
        return np.flatnonzero(self._owners == rank)

    @property
    def owners(self) -> Ranks:
        """``(num_rows,)``: the rank that holds each row."""
        return self._owners

    @property
    def digest(self) -> object:
        """Sizes, and a hash of the owners."""
        return (self.sizes, hashlib.blake2b(self._owners.tobytes(), digest_size=16).hexdigest())

    def __repr__(self) -> str:
        return f"OwnerPartition({self.num_rows} rows, {list(self.sizes)} by rank)"


def as_partition(value: object, num_ranks: int) -> Partition:
    """Understand a partition as users give it.

    Args:
        value: A `Partition`; or a list of ``num_ranks + 1`` bounds; or an owner per row, as a
            tensor or array ``(num_rows,)``. A list is always taken as bounds.
        num_ranks: Ranks that share the table.

    Raises:
        ConfigError: It is none of these, or not for that many ranks.
    """
    if isinstance(value, Partition):
        partition = value
    elif isinstance(value, torch.Tensor | np.ndarray):
        partition = OwnerPartition(np.asarray(value), num_ranks)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        partition = RangePartition(value)
    else:
        raise ConfigError(
            f"partition is {type(value).__name__}; give a list of {num_ranks + 1} bounds, or a "
            "tensor with the owner of each row"
        )
    if partition.num_ranks != num_ranks:
        raise ConfigError(
            f"partition {partition} is for {partition.num_ranks} ranks, but {num_ranks} take part: "
            f"give {num_ranks + 1} bounds, or owners from 0 to {num_ranks - 1}"
        )
    return partition


def _check_bounds(bounds: Sequence[int]) -> None:
    whole = all(isinstance(bound, int | np.integer) for bound in bounds)
    if not whole or len(bounds) < 2:
        raise ConfigError(
            f"partition = {list(bounds)}: bounds are whole numbers, one more than there are ranks"
        )
    if bounds[0] != 0:
        raise ConfigError(
            f"partition = {list(bounds)}: the bounds leave out rows 0 to {bounds[0] - 1}; they "
            "begin with 0"
            if bounds[0] > 0
            else f"partition = {list(bounds)}: the bounds begin with 0"
        )
    for rank, (start, end) in enumerate(pairwise(bounds)):
        if end < start:
            raise ConfigError(
                f"partition = {list(bounds)}: rank {rank}'s rows would end at {end}, before they "
                f"begin at {start}, so that parts overlap; bounds never fall"
            )
    if len(bounds) > MAX_RANKS:
        raise ConfigError(f"partition: {len(bounds) - 1} ranks are more than {MAX_RANKS - 1}")


def _check_owners(owners: NDArray[Any], num_ranks: int) -> None:
    if owners.ndim != 1 or owners.dtype.kind not in "iu":
        raise ConfigError(
            f"partition: owners have shape {owners.shape} and dtype {owners.dtype}; give one whole "
            "number a row, the rank that holds it"
        )
    if not 1 <= num_ranks < MAX_RANKS:
        raise ConfigError(f"partition: {num_ranks} ranks; there can be 1 to {MAX_RANKS - 1}")
    outside = np.flatnonzero((owners < 0) | (owners >= num_ranks))
    if len(outside):
        row = int(outside[0])
        raise ConfigError(
            f"partition: row {row} is given to rank {int(owners[row])} of {num_ranks} (ranks 0 to "
            f"{num_ranks - 1}), so it and "
            f"{len(outside) - 1} other rows would be left out"
        )
