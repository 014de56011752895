"""Least recently used: the yardstick that looks back where the window looks ahead."""

from __future__ import annotations

import numpy as np

from featsync.errors import PlanError
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
from featsync.retention.slots import SlotPool

ABSENT = -1


class LruRetention(Retention):
    """Holds the rows used last; of one batch, a later position counts as used later.

    This is exact: after each batch the cache holds the last ``num_slots`` distinct rows. Uses go
    into a log of slots, in which an entry counts only if it is its slot's latest. Evicting reads
    the log from its old end and passes over what no longer counts, so a use costs one write and
    one read, whatever the size of table and cache. When the log is full, what counts moves to its
    front: at most once per ``num_slots`` uses.

    4 bytes a table row, 24 a slot. The score is not looked at.
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
        self._slot_of_row = np.full(num_rows, ABSENT, np.int32)
        self._pool = SlotPool(num_slots)
        self._latest = np.full(num_slots, ABSENT, np.int32)
        self._log = np.empty(2 * num_slots, np.int32)
        self._log_start = 0
        self._log_end = 0

    @property
    def resident(self) -> Ids:
        """``(num_slots,)``: the row that each slot holds, or -1."""
        return np.where(self._latest == ABSENT, -1, self._pool.rows)

    def clear(self) -> None:
        """Empty all slots; pushed batches stay known."""
        residents = self.resident
        self._slot_of_row[residents[residents >= 0]] = ABSENT
        self._latest[:] = ABSENT
        self._log_start = self._log_end = 0
        self._pool.free_all()

    def _learn(self, ids: Ids) -> Mask:
        refuse_outsiders(ids, self.num_rows)
        refuse_repeats(ids, self._slot_of_row, unused=self.num_slots)
        return np.zeros(len(ids), np.bool_)

    def _find(self, ids: Ids) -> Slots:
        return self._slot_of_row.take(ids)

    def _settle(self, ids: Ids) -> Keep:
        # Of a batch larger than the cache only the end can stay.
        skipped = max(len(ids) - self.num_slots, 0)
        ids = ids[skipped:]
        slots = self._find(ids)
        self._make_room(len(ids))
        used_again = slots.take(np.flatnonzero(slots >= 0))
        self._latest[used_again] = np.iinfo(np.int32).max  # so that no entry counts for them

        admitted = np.flatnonzero(slots < 0)
        self._evict(len(admitted) - self._pool.num_free)
        new_ids = ids.take(admitted)
        new_slots = self._pool.take(new_ids)
        scatter(self._slot_of_row, new_ids, new_slots)
        slots[admitted] = new_slots

        end = self._log_end + len(ids)
        self._log[self._log_end : end] = slots
        self._latest[slots] = np.arange(self._log_end, end, dtype=np.int32)
        self._log_end = end
        return Keep(admitted + skipped, new_slots)

    def _evict(self, count: int) -> None:
        while count > 0:
            if self._log_start == self._log_end:
                raise PlanError(f"the log lacks {count} of the slots that are in use")
            end = min(self._log_start + 2 * count + 256, self._log_end)
            entries = np.arange(self._log_start, end, dtype=np.int32)
            slots = self._log[self._log_start : end]
            counting = np.flatnonzero(self._latest.take(slots) == entries)[:count]
            is_enough = len(counting) == count
            self._log_start = int(entries[counting[-1]]) + 1 if is_enough else end
            out = slots.take(counting)
            self._latest[out] = ABSENT
            self._slot_of_row[self._pool.rows.take(out)] = ABSENT
            self._pool.give_back(out)
            count -= len(counting)

    def _make_room(self, size: int) -> None:
        """Drop the entries of the log that do not count, if a batch does not fit behind it."""
        if self._log_end + size <= len(self._log):
            return
        entries = np.arange(self._log_start, self._log_end, dtype=np.int32)
        slots = self._log[self._log_start : self._log_end]
        slots = slots.take(np.flatnonzero(self._latest.take(slots) == entries))
        self._log_start, self._log_end = 0, len(slots)
        self._log[: len(slots)] = slots
        self._latest[slots] = np.arange(len(slots), dtype=np.int32)
