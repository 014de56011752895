"""What every retention policy promises, and the checks they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass

import numpy as np

from featsync.errors import ConfigError, PlanError
from featsync.retention.arrays import Ids, Mask, Score, Slots

MAX_WINDOW = 64


@dataclass(frozen=True, eq=False)
class Keep:
    """Rows of the batch just settled that are to be written to slots now.

    Rows that already lie in a slot are not named: they stay where they are.

    Attributes:
        positions: Where the rows stand in their batch, each at most once.
        slots: Slot of each of them, distinct. What these slots held before is gone.
    """

    positions: Ids
    slots: Slots


class Retention(ABC):
    """Decides which rows of a table stay in a cache of slots. It touches no row itself.

    The caller makes batches known up to ``window`` ahead and settles them in order. At the
    delivery of batch n: ``push`` the ids of n + window, ``settle`` n and write what it keeps,
    read ``hits`` of n + 1 from their slots. In that order, a slot that ``hits`` names holds the
    row it is named for: no settling of an earlier batch gives it away.

    A policy implements the methods with an underscore; the oldest batch is ``self._pending[0]``.
    One thread at a time may use an object.
    """

    def __init__(
        self,
        num_rows: int,
        num_slots: int,
        window: int,
        score: Score | None = None,
    ) -> None:
        """Set up an empty cache.

        Args:
            num_rows: Rows of the table; ids lie below it.
            num_slots: Rows that fit into the cache, at most ``num_rows``.
            window: Batches that may be pushed ahead of the one to be settled next, 1 to 64.
            score: ``(num_rows,)``, higher is better to hold; ``None`` counts uses instead.

        Raises:
            ConfigError: An argument is out of its range.
        """
        if not 0 <= num_slots <= num_rows:
            raise ConfigError(
                f"num_slots = {num_slots} must lie in 0..{num_rows}, the table's rows"
            )
        if not 1 <= window <= MAX_WINDOW:
            raise ConfigError(f"window = {window} must lie in 1..{MAX_WINDOW}")
        if score is not None and score.shape != (num_rows,):
            raise ConfigError(
                f"score has shape {score.shape}; it needs one number a row: {num_rows}"
            )
        if score is not None and np.isnan(score).any():
            raise ConfigError("score holds NaN; every row needs a number that can be ranked")
        self.num_rows = num_rows
        self.num_slots = num_slots
        self.window = window
        self._pending: deque[Ids] = deque()

    def push(self, ids: Ids) -> Mask:
        """Make the ids of the next batch known.

        Args:
            ids: Distinct ids in any order. Kept by reference until the batch is settled: the
                caller must not change them.

        Returns:
            ``(ids,)``: rows that this cache is known to take care of, so that no other need hold
            them for this batch: they will lie in a slot when it is settled, or from then on for
            good. Other rows may lie in one, too.

        Raises:
            PlanError: Ids repeat or are not a vector of int64, or the window is full. Nothing
                has changed.
            FeatureError: An id lies outside the table. Nothing has changed.
        """
        if len(self._pending) > self.window:
            raise PlanError(
                f"batch pushed {len(self._pending)} ahead of the next settle(); the window is "
                f"{self.window}: settle first"
            )
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise PlanError(f"ids are {ids.dtype} of shape {ids.shape}; they must be (n,) int64")
        if not (ids.flags.c_contiguous and ids.flags.writeable):
            ids = ids.copy()  # torch reads neither without a warning
        is_promised = self._learn(ids)
        self._pending.append(ids)
        return is_promised

    def hits(self) -> Slots:
        """Say where the rows of the oldest batch lie, before it is settled.

        Returns:
            ``(ids,)``: the slot that holds the row now, or -1 for a row to be fetched from home.

        Raises:
            PlanError: Nothing is pushed.
        """
        return self._find(self._oldest())

    def settle(self) -> Keep:
        """Decide what of the oldest batch stays, and forget that batch.

        Raises:
            PlanError: Nothing is pushed.
        """
        keep = self._settle(self._oldest())
        self._pending.popleft()
        return keep

    def reset(self) -> None:
        """Forget the batches that are not settled: the loop was left, or the epoch has ended.

        Rows stay in their slots and use counts survive.
        """
        self._forget()
        self._pending.clear()

    @abstractmethod
    def clear(self) -> None:
        """Empty all slots: the table has changed. What is pushed stays known."""

    @property
    @abstractmethod
    def resident(self) -> Ids:
        """``(num_slots,)``: the row that each slot holds, or -1. A copy, for tests and stats."""

    @abstractmethod
    def _learn(self, ids: Ids) -> Mask:
        """Take note of a new batch before it joins ``_pending``, or refuse it; see `push`."""

    @abstractmethod
    def _find(self, ids: Ids) -> Slots:
        """Answer `hits` for the oldest batch, in an array of its own."""

    @abstractmethod
    def _settle(self, ids: Ids) -> Keep:
        """Answer `settle` for the oldest batch, while it still leads ``_pending``."""

    def _forget(self) -> None:  # noqa: B027 - most policies know nothing of pushed batches
        """Undo what `_learn` noted of all batches in ``_pending``."""

    def _oldest(self) -> Ids:
        if not self._pending:
            raise PlanError("no batch is pushed: push() one before hits() and settle()")
        return self._pending[0]
