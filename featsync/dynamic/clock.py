"""The step clock of one feature: who drives it, which step it is, and what is written when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence, Sized
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.dynamic.checks import checked_rows, checked_values
from featsync.dynamic.positions import epoch_of
from featsync.dynamic.rows import FeatureRows
from featsync.dynamic.waits import Neighbours
from featsync.errors import ConfigError

if TYPE_CHECKING:
    from featsync.dynamic.iteration import Iteration
    from featsync.dynamic.merge import Merge

__all__ = ["FeatureClock"]

_HERE = "featsync.DynamicFeature"


class FeatureClock:
    """One rank's side of a feature whose rows change.

    Args:
        rows: On all machines.
        others: Who shares them.
        room: Gives named memory, zeros at first, that the ranks of this machine share.
    """

    def __init__(
        self,
        rows: FeatureRows,
        others: Neighbours,
        room: Callable[[str, int, object], NDArray[np.uint8]],
    ) -> None:
        self.rows, self.room = rows, room
        # Of this machine.
        self.table, self.board, self.commits = rows.part.table, rows.part.board, rows.part.commits
        self.kind = rows.part.kind
        self.rank = others.rank
        self.name_of = others.name_of
        self.learner: str | None = None
        # The thread of the loop that ended last, and its steps of which minibatches are in use.
        self.last_loop: tuple[int, Sized] = (0, ())
        self._driver: Iteration | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the whole table."""
        return len(self.rows)

    @property
    def driver(self) -> Iteration | None:
        """The iteration that drives this clock, if one is under way."""
        if self._driver is not None and not self._driver.is_alive():
            self._driver = None
        return self._driver

    def drive(self, iteration: Iteration) -> bool:
        """Make an iteration the driver, unless one is under way; says which it is."""
        if self.driver is not None:
            return False
        self._driver = iteration
        return True

    def learn(self, name: str, merge: Merge) -> None:
        """Have entries be gradients from now on.

        Args:
            name: Of the optimizer, for errors.
            merge: What it does to rows.

        Raises:
            ConfigError: The rows have an optimizer, or a loop is under way.
        """
        if self.learner is not None:
            raise ConfigError(f"{name}: these rows are trained by {self.learner} already")
        if self.driver is not None:
            raise ConfigError(f"{name}: a loop over these rows is under way; make it before")
        self.settle()
        self.commits.merge = merge
        self.learner = name
        self.rows.learn()

    def read(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Copy rows as of the last committed step; inside a step, of its start.

        Args:
            ids: ``(n,)``; ``None``: all.

        Raises:
            ConfigError: They are no row numbers.
            FeatureError: One of them lies outside the table.
            PeerError: The table is lost, or a rank that merges has ended.
        """
        rows = None if ids is None else checked_rows(ids, self.num_rows, _HERE)
        return self.copy(rows, [""])[""]

    def copy(self, rows: torch.Tensor | None, what: Sequence[str]) -> dict[str, torch.Tensor]:
        """Copy rows, or what lies beside them, as `read` does.

        Args:
            rows: ``(n,)`` int64, within the table; ``None``: all.
            what: Names of what lies beside; "" for the rows themselves.
        """
        driver = self.driver
        # Other machines may be slower to commit what this rank was delivered.
        takes_part = driver is not None and driver.has_trained and driver.is_exact
        return self.rows.copy(rows, self.rows.closed if takes_part else 0, what)

    def update(
        self, value: object, ids: torch.Tensor | None = None, minibatch: object = None
    ) -> None:
        """Write rows in the step that is under way, or, outside of loops, at once.

        Args:
            value: ``(n, *row_shape)`` of the table's dtype; copied, detached.
            ids: ``(n,)``, may repeat; ``None``: all rows.
            minibatch: That the values were computed for; refused unless it was delivered last.

        Raises:
            ConfigError: Shape or dtype, or the wrong thread, loader or minibatch. Nothing changed.
            FeatureError: A row lies outside the table. Nothing changed.
            CapacityError: There is no shared memory for it. Nothing changed.
        """
        rows = checked_rows(ids, self.num_rows, f"{_HERE}.update")
        values = checked_values(value, len(rows), self.kind, f"{_HERE}.update")
        driver = self.driver
        if driver is None:
            if minibatch is not None:
                raise ConfigError(f"{_HERE}.update: {_NO_LOOP} {_NOTHING}")
            self._check_nothing_waits()
            self.assign(rows, values)
            return
        if self.learner is not None:
            raise ConfigError(
                f"{_HERE}.update: these rows are trained by {self.learner}, whose gradients would "
                f"be lost. Update them outside of loops. {_NOTHING}"
            )
        self.write(driver, rows, values, minibatch)

    def _check_nothing_waits(self) -> None:
        reader, steps = self.last_loop
        if reader != threading.get_ident() and len(steps) > 1:
            raise ConfigError(
                f"{_HERE}.update: another thread has read a whole epoch ahead, and {len(steps)} of "
                "its minibatches are still in use: something behind sync_feature reads ahead "
                "(copy_to does), so this update would come late. Put copy_to before sync_feature, "
                f"or drop the minibatches. {_NOTHING}"
            )

    def write(
        self,
        driver: Iteration,
        rows: torch.Tensor,
        values: torch.Tensor,
        minibatch: object,
        factor: float = 0.0,
    ) -> None:
        """Write down entries of the step that is under way.

        Raises:
            ConfigError: The wrong thread, loader or minibatch.
        """
        driver.check_writer(minibatch)
        driver.take_part()
        values = values.to("cpu").resolve_conj().resolve_neg()
        self.rows.write(driver.step, rows, values, factor)

    def assign(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows at once, as a step of its own; blocks while other ranks end their epochs."""
        self.settle()
        values = values.to("cpu").contiguous().resolve_conj().resolve_neg()
        self.rows.assign(rows, values)

    def settle(self, patience: float = 1.0) -> None:
        """Block until all that this rank has closed is committed."""
        self.rows.settle(patience)

    def commit(self) -> None:
        """End the step that is under way and block until it is committed; collective in a loop.

        Raises:
            ConfigError: The wrong thread.
            PeerError: A rank that has to end its step as well has ended.
        """
        driver = self.driver
        if driver is None:
            self.settle()
            return
        driver.check_writer(None)
        driver.take_part()
        driver.commit()

    def begin_epoch(self) -> None:
        """Say that this rank takes part in the epoch that it has not begun.

        Raises:
            ConfigError: Another rank trains the rows by an optimizer, this one does not.
        """
        if self.board.learns and self.learner is None:
            raise ConfigError(
                f"{_HERE}: another rank trains these rows by an optimizer of featsync.optim, this "
                f"one has none. Make the same optimizer on all ranks. {_NOTHING}"
            )
        self.rows.begin_epoch()

    @property
    def epoch(self) -> int:
        """The epoch that this rank is in, or comes to next."""
        return epoch_of(self.rows.closed)


_NO_LOOP = "a minibatch was given, but no loop over a loader of this feature is under way."
_NOTHING = "Nothing was written."
