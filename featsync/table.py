"""A feature's home: the rows themselves, as the Syncer reads them. Knows nothing of DGL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils.weak import TensorWeakRef

from featsync.dynamic.clock import FeatureClock
from featsync.partitioned_table import PartitionedTable
from featsync.plan import FeatureKey
from featsync.row_kind import RowKind
from featsync.segment import Segment


@dataclass(frozen=True, eq=False)
class Version:
    """What a tensor was when it was looked at; equal as long as nobody wrote or replaced it.

    Writes are seen through torch's version counter: in-place operations of this process, not those
    of other processes, nor writes through NumPy.

    Attributes:
        tensor: The tensor itself, and not its ``id``, which a later one may get.
        writes: How often it was written.
    """

    tensor: TensorWeakRef
    writes: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Version):
            return NotImplemented
        tensor = self.tensor()
        return tensor is not None and tensor is other.tensor() and self.writes == other.writes


@dataclass(frozen=True)
class TensorTable:
    """Rows in one tensor, in memory of any kind: private, shared, mapped from a file, on a device.

    Attributes:
        key: The feature.
        current: Gives the tensor ``(num_rows, *row_shape)`` as it is now; the host may replace it.
        segment: The shared memory that the tensor lies in, if any.
    """

    key: FeatureKey
    current: Callable[[], torch.Tensor] = field(repr=False)
    segment: Segment | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The rows, ``(num_rows, *row_shape)``."""
        return self.current()

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return len(self.tensor)

    @property
    def kind(self) -> RowKind:
        """What a row is."""
        tensor = self.tensor
        return RowKind(tuple(tensor.shape[1:]), tensor.dtype)

    @property
    def version(self) -> Version:
        """Changes whenever this process writes to the tensor or replaces it."""
        tensor = self.tensor
        # Tensors made in inference mode count no writes, so writes to them cannot be seen.
        return Version(TensorWeakRef(tensor), 0 if tensor.is_inference() else tensor._version)


@dataclass(frozen=True, eq=False)
class DynamicTable(TensorTable):
    """Rows that every step may change, in memory that the ranks of each machine share.

    Attributes:
        clock: Says when rows may be read, and which have to be read again.
    """

    clock: FeatureClock = field(kw_only=True, repr=False)

    @classmethod
    def of(cls, key: FeatureKey, clock: FeatureClock) -> DynamicTable:
        """The table of a feature."""
        return cls(key, lambda: clock.table, clock.rows.part.segment, clock=clock)

    @property
    def num_rows(self) -> int:
        """Rows of the whole table, of which ``tensor`` has those that this machine holds."""
        return self.clock.num_rows

    @property
    def version(self) -> Version:
        """Never changes: what is written is followed by the clock."""
        return Version(TensorWeakRef(self.tensor), 0)


@dataclass(frozen=True)
class ForeignTable:
    """Rows that only the user's own ``read`` can give; never cached, since their number is unknown.

    Attributes:
        key: The feature.
        read: ``(n,)`` ids to ``(n, *row_shape)`` rows; called on the worker's thread.
    """

    key: FeatureKey
    read: Callable[[torch.Tensor], torch.Tensor] = field(repr=False)


RowTable = TensorTable | PartitionedTable
Table = RowTable | ForeignTable
