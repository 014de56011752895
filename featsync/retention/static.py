"""By score alone: what a cache without lookahead can do."""

from __future__ import annotations

import numpy as np

from featsync.retention.arrays import (
    Ids,
    Mask,
    Score,
    Slots,
    refuse_outsiders,
    refuse_repeats,
    scatter,
)
from featsync.retention.contract import Keep, Retention
from featsync.retention.levels import CountedLevels
from featsync.retention.slots import SlotPool
from featsync.retention.tail import Tail

ABSENT = -1
UNWANTED = -2


class StaticRetention(Retention):
    """Holds the rows that score best.

    With a given score, the ``num_slots`` best rows of the table are the hot set (of equals at its
    edge, those with the lowest ids): a row of it is admitted on its first use and never leaves.
    Without, the rows used most often so far stay, so the cache adapts; of equals those inside stay.

    4 bytes a table row, one more without a score; 13 bytes a slot.
    """

    def __init__(
        self,
        num_rows: int,
        num_slots: int,
        window: int,
        score: Score | None = None,
    ) -> None:
        """Set up an empty cache; see `Retention`."""
        super().__init__(num_rows, num_slots, window, score)
        self._counts = CountedLevels(num_rows, num_slots) if score is None else None
        # The slot of a row, or ABSENT, or UNWANTED where a given score leaves it out for good.
        self._slot_of_row = np.full(num_rows, ABSENT, np.int32)
        if score is not None:
            self._slot_of_row[_all_but_best(score, num_slots)] = UNWANTED
        self._tail = Tail(SlotPool(num_slots))

    @property
    def resident(self) -> Ids:
        """``(num_slots,)``: the row that each slot holds, or -1."""
        return self._tail.resident

    def clear(self) -> None:
        """Empty all slots; pushed batches stay known."""
        residents = self._tail.resident
        self._slot_of_row[residents[residents >= 0]] = ABSENT
        self._tail.clear()

    def _learn(self, ids: Ids) -> Mask:
        refuse_outsiders(ids, self.num_rows)
        refuse_repeats(ids, self._slot_of_row, unused=self.num_slots)
        if self._counts is not None:
            return np.zeros(len(ids), np.bool_)
        is_hot: Mask = self._slot_of_row.take(ids) != UNWANTED
        return is_hot

    def _find(self, ids: Ids) -> Slots:
        slots: Slots = self._slot_of_row.take(ids)
        return np.maximum(slots, np.int32(ABSENT), out=slots)

    def _settle(self, ids: Ids) -> Keep:
        if self._counts is None:
            admitted = np.flatnonzero(self._slot_of_row.take(ids) == ABSENT)
            new_ids = ids.take(admitted)
            slots = self._tail.reserve_new(new_ids)
            scatter(self._slot_of_row, new_ids, slots)
            return Keep(admitted, slots)
        self._counts.count(ids)
        slots = self._slot_of_row.take(ids)
        self._tail.reserve(slots.take(np.flatnonzero(slots >= 0)))
        admission = self._tail.admit(ids, slots, self._counts.of(ids), self.num_slots)
        self._slot_of_row[admission.evicted_rows] = ABSENT
        scatter(self._slot_of_row, ids, admission.slots)
        if self._counts.halve_if_due(admission.cut // 2):
            self._tail.halve()
        return Keep(admission.admitted, admission.slots.take(admission.admitted))


def _all_but_best(score: Score, num_best: int) -> Mask:
    """Mark the rows that are not among the best ones; of equals at the edge the lowest ids are."""
    if num_best == 0:
        return np.ones(len(score), np.bool_)
    edge = np.partition(score, len(score) - num_best)[len(score) - num_best]
    is_out: Mask = score < edge
    tied = np.flatnonzero(score == edge)
    num_tied_in = num_best - int(np.count_nonzero(score > edge))
    is_out[tied[num_tied_in:]] = True
    return is_out
