"""One iteration of a loader over a feature whose rows change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.dynamic.clock import FeatureClock
from featsync.dynamic.positions import Position, epoch_of, position, steps_of
from featsync.dynamic.waits import PATIENCE
from featsync.errors import ConfigError

__all__ = ["Iteration"]

_UPDATE = "update of a featsync.DynamicFeature"


class Iteration:
    """Steps of one loader; used by the thread that iterates, but for `read_whole` and `end`.

    The iteration that began first drives the clock; one beside it only reads. A driver *takes part*
    from its first update on: only then do other ranks wait for it, and it for them.

    Args:
        clock: Of the feature.
        staleness: Steps that a read may lag behind; ``"any"``: whole rows of any step, and no part
            in anything.
        is_alive: Whether the loader still iterates; safe to ask anywhere.
        trains: Whether this loader took part before, so that it does from its first step on.

    Raises:
        PeerError: Another rank has not ended the epoch before.
    """

    def __init__(
        self,
        clock: FeatureClock,
        staleness: int | str,
        is_alive: Callable[[], bool],
        trains: bool = False,
    ) -> None:
        self._clock, self.is_alive = clock, is_alive
        self._lag = staleness
        self._is_any = staleness == "any"
        self._reader = threading.get_ident()
        self._delivered = 0
        self._takes_part = False
        self._is_open = False
        self._token: object = None
        self._seen: Position = 0
        self._expected: Position = -1
        self._assigned = -1
        self._rows: list[NDArray[np.int64]] = []
        self.leaves: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.is_driver = not self._is_any and clock.drive(self)
        if self.is_driver:
            # Who trains waits as long as another rank's epoch takes; who may only validate hears
            # soon that others still train.
            clock.settle(PATIENCE if trains else 1.0)
            if trains or clock.board.num_ranks == 1:
                self.take_part()

    @property
    def reads_early(self) -> bool:
        """Whether rows are read while they may change, and patched; else in a hold."""
        return self._takes_part and self._lag == 0

    @property
    def is_exact(self) -> bool:
        """Whether delivered rows show all steps before."""
        return self._lag == 0

    @property
    def reader(self) -> int:
        """The thread that asked for the last minibatch."""
        return self._reader

    @property
    def has_trained(self) -> bool:
        """Whether it takes part."""
        return self._takes_part

    @property
    def step(self) -> Position:
        """The step that is under way."""
        return self._clock.rows.closed

    def take_part(self) -> None:
        """Have other ranks wait for this one, from this step on.

        Raises:
            ConfigError: It is too late for that.
        """
        if self._takes_part:
            return
        if self._delivered > 1:
            raise ConfigError(
                f"the first {_UPDATE} came in step {self._delivered - 1} of this loop, so its rows "
                "were delivered without waiting for what other ranks write. Update in the first "
                "step: one of no rows is enough, and in later epochs this loader needs none. "
                "Nothing was written."
            )
        self._clock.begin_epoch()
        self._takes_part = True
        self._seen = self._clock.board.committed

    def check_writer(self, minibatch: Any) -> None:
        """Refuse updates that would come to another step than they were meant for.

        Raises:
            ConfigError: Another thread reads than updates, or the minibatch is not the last one.
        """
        if threading.get_ident() != self._reader:
            raise ConfigError(
                f"{_UPDATE} from another thread than the one that iterates: something behind "
                "sync_feature reads ahead (copy_to does), so this update would come late. Put "
                "copy_to before sync_feature, or give sync_feature(device=...) instead. Nothing "
                "was written."
            )
        if minibatch is not None and _token_of(minibatch) is not self._token:
            raise ConfigError(
                f"{_UPDATE} for a minibatch that is not the last one delivered: something behind "
                "sync_feature reads ahead, so this update would come late. Nothing was written."
            )

    def ask(self) -> None:
        """The next minibatch is asked for: the step under way is over."""
        self.leaves.clear()
        if self._takes_part and self._is_open:
            self._clock.rows.close(self.step + 1)
        self._is_open = False

    def commit(self) -> None:
        """End the step under way, and block until it is committed; another one begins."""
        self._clock.rows.close(self.step + 1)
        self._catch_up(self.step)
        self._clock.settle(PATIENCE)

    def begin_early(self, ids: NDArray[np.int64]) -> None:
        """An early read is about to begin: what was written so far is no matter of its patches.

        Args:
            ids: ``(n,)``, what is read.
        """
        self._rows.clear()
        self._assigned = self._clock.board.assigned
        self._expected = self.step + 1
        homes = self._clock.rows.homes
        near = ids if homes is None else homes.near_rows(ids)
        self._clock.commits.want(near, self._expected)

    def arrive(self, is_later_left: bool = False) -> None:
        """Block until the table is as the next minibatch is to see it.

        Args:
            is_later_left: Whether rows that it does not want may be left to `merge_later`.

        Raises:
            PeerError: A rank that has to end its step has ended.
        """
        self._reader = threading.get_ident()
        if self.reads_early:
            # After a `commit` in between, what is wanted was marked for another step.
            self._catch_up(self.step, is_later_left and self.step == self._expected)

    def rows_to_patch(self) -> NDArray[np.int64] | None:
        """Rows written since an early read began, maybe repeated; ``None``: any may be."""
        if self._clock.board.assigned != self._assigned:
            return None
        return np.concatenate(self._rows) if self._rows else np.empty(0, np.int64)

    def is_current(self, seen: Position) -> bool:
        """Whether rows that were read in a hold are those of now, if they have to be."""
        return self._lag != 0 or seen == self._clock.board.committed

    def deliver(self, token: object) -> None:
        """The next step begins."""
        self._delivered += 1
        self._is_open = True
        self._token = token

    def read_whole(self, ids: torch.Tensor, out: torch.Tensor, own: Position) -> Position:
        """Read rows of one whole step, not older than allowed; blocks until it is committed.

        May run on a worker's thread.

        Args:
            ids: ``(n,)``.
            out: ``(n, *row_shape)``.
            own: The steps that this rank had closed when the read was asked for, one before those
                that it will have closed when the rows are delivered.

        Returns:
            Up to where the rows show all steps.
        """
        least = 0
        if self._takes_part and isinstance(self._lag, int) and self._lag:
            least = position(epoch_of(own), max(0, steps_of(own) + 1 - self._lag))
        return self._clock.rows.read_whole(ids, {"": out}, least)

    def lag_of(self, seen: Position) -> int:
        """How many of the steps that this rank has closed rows do not show."""
        return max(0, self.step - seen) if epoch_of(seen) == epoch_of(self.step) else 0

    def end(self) -> None:
        """The iteration is over; safe in a finalizer: sets words of shared memory."""
        self._token = None
        if not self.is_driver:
            return
        if self._takes_part:
            self._clock.rows.end_epoch(self.step + self._is_open)
        elif self._delivered == 0:
            self._clock.rows.excuse()
        self.is_driver = False
        self.leaves = []

    def _catch_up(self, to: Position, is_later_left: bool = False) -> None:
        commits = self._clock.commits
        if is_later_left:
            commits.make_ready(to)
        else:
            commits.advance(to)
        if self.reads_early:
            self._rows += [commits.rows_written(step) for step in range(self._seen, to)]
            self._seen = to


def _token_of(minibatch: Any) -> object:
    return getattr(minibatch, "_featsync_step", None)
