"""``featsync.DynamicFeature``: a GraphBolt feature whose rows change during training."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from featsync._graphbolt import gb
from featsync.dynamic.clock import FeatureClock
from featsync.dynamic.flushing import flush_rows, whole_file_of
from featsync.dynamic.opening import open_clock
from featsync.exchange.engines import engine_of
from featsync.exchange.traffic import Traffic

__all__ = ["DynamicFeature"]


class DynamicFeature(gb.Feature):  # type: ignore[misc]  # DGL has no types
    """Rows that every step may change, read ahead and exact all the same.

    Building one is collective: all ranks build theirs in the same order, with rows of the same
    shape and dtype. The rows are copied into memory that the ranks of a machine share, once; files
    that they came from are never touched, but by `flush`. On several machines each holds its part:
    the rows that the partition gives to its ranks, or, without one, a run of them.

    What an iteration of a loader delivers, on all ranks: step n shows all that was written in the
    steps before it, by any rank, and nothing that is written in n. A step ends when its loop asks
    for the next minibatch, ends or is left, or at `commit`. Entries of one row in one step are
    ordered by (rank, call, position) and merged.

    A loader *takes part* from its first update on: on several ranks that has to be in the first
    step of its epoch, where an update of no rows is enough. Its later epochs are collective from
    the start, and a rank that has no more minibatches holds nobody up; an iteration without any is
    such an epoch. Loaders that never update only read.

    With a ``staleness`` each feature of a loader shows a whole step, but two features may show
    different ones.

    What cannot be guarded against: a consumer behind ``sync_feature`` that reads ahead on the same
    thread, with updates that do not name their minibatch. They come a step late.

    Args:
        tensor: ``(num_rows, *row_shape)`` on any device. The values of the group's first rank are
            everybody's. With a partition the rows that this rank brings, by ascending id.
        merge: ``last``: the last entry of a row stays. ``sum``: start + Σ(v - start). ``mean``:
            start + Σ(v - start) ÷ entries. What one entry alone wrote is stored as it is.
        process_group: The ranks that take part; ``None``: all of the default group, or this one.
        partition: Which rank brings which rows: ``num_ranks + 1`` bounds, or an owner of each.
        timeout: Seconds to wait for other ranks, and without a sign of life later.

    Raises:
        ConfigError: It is no table of rows, or ranks disagree.
        CapacityError: The machine's shared memory is too small.
        PeerError: Another rank could not do its part.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        merge: str = "last",
        process_group: dist.ProcessGroup | None = None,
        partition: Any = None,
        timeout: float = 60.0,
    ) -> None:
        super().__init__()
        engine = engine_of(process_group, timeout)
        self.featsync_clock: FeatureClock = open_clock(tensor, merge, partition, engine, timeout)
        self._engine = engine
        self._file = whole_file_of(tensor) if partition is None else None

    def read(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Copy rows as of the last committed step; inside a step, of its start. Not collective.

        After a loop, what ranks of other machines wrote in its last step may still be on its way:
        `commit` waits for it.

        Args:
            ids: ``(n,)``; ``None``: all.

        Raises:
            FeatureError: An id lies outside the table.
            PeerError: The table is lost: a rank ended while it changed rows.
        """
        return self.featsync_clock.read(ids)

    def update(
        self,
        value: torch.Tensor,
        ids: torch.Tensor | None = None,
        minibatch: Any = None,
    ) -> None:
        """Write rows in the step that is under way.

        Outside of loops rows are written at once, as a step of its own: this rank sees them right
        away, others from their next iteration on.

        Args:
            value: ``(n, *row_shape)`` of the table's dtype; copied, and detached from any graph.
            ids: ``(n,)``, may repeat; ``None``: all rows.
            minibatch: That the values were computed for. It is refused if it is not the one that
                was delivered last.

        Raises:
            ConfigError: Shape, dtype, thread or minibatch do not fit. Nothing has changed.
            FeatureError: An id lies outside the table. Nothing has changed.
        """
        self.featsync_clock.update(value, ids, minibatch)

    def commit(self) -> None:
        """End the step that is under way, and block until all ranks did and it is committed.

        Collective inside a loop; what is written afterwards belongs to a further step. Outside of
        loops it blocks until all that this rank wrote is committed, and after a loop that it took
        part in until all ranks have ended it too and all is committed on all machines.

        Raises:
            PeerError: A rank that takes part has ended.
        """
        self.featsync_clock.commit()

    def flush(self, path: str | os.PathLike[str] | None = None) -> None:
        """Write the committed rows to a file; collective.

        The file is written beside its place, then renamed: whoever reads it sees the old rows or
        the new ones.

        Args:
            path: Of a ``.npy`` file; ``None``: the file that all rows were mapped from, on the
                first rank.

        Raises:
            ConfigError: No path, and the rows came from no file that could be written anew; or a
                dtype that such a file cannot hold.
            PeerError: Another rank could not do its part.
        """
        world = None if self._engine is None else self._engine.world
        flush_rows(self.featsync_clock, world, self._file, path)

    @property
    def traffic(self) -> Traffic:
        """Messages and bytes between this rank and the others of its group so far.

        Of all features of the group together; those about rows that change are of the kind
        ``dynamic``. Take the difference of two (``after - before``) for what went in between.
        """
        return Traffic() if self._engine is None else self._engine.traffic

    def size(self) -> torch.Size:
        """Shape of one row."""
        return torch.Size(self.featsync_clock.kind.shape)

    def count(self) -> int:
        """Rows of the table."""
        return self.featsync_clock.num_rows
