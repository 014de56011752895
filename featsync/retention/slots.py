"""Which slots of a cache are free, and which row each of the others holds."""

from __future__ import annotations

import numpy as np

from featsync.retention.arrays import Ids, Slots, scatter


class SlotPool:
    """A stack of free slots. 12 bytes a slot.

    Attributes:
        rows: ``(num_slots,)``: the row of each slot that is taken; of a free slot, the last one.
        num_free: Slots on the stack.
    """

    def __init__(self, num_slots: int) -> None:
        self.rows = np.full(num_slots, -1, np.int64)
        self._stack = np.empty(num_slots, np.int32)
        self.num_free = 0
        self.free_all()

    def take(self, ids: Ids) -> Slots:
        """Take a slot for each id; there must be enough of them."""
        self.num_free -= len(ids)
        slots = self._stack[self.num_free : self.num_free + len(ids)].copy()
        scatter(self.rows, slots.astype(np.int64), ids)
        return slots

    def give_back(self, slots: Slots) -> None:
        """Free slots that are taken."""
        self._stack[self.num_free : self.num_free + len(slots)] = slots
        self.num_free += len(slots)

    def free_all(self) -> None:
        """Make every slot free; the lowest is taken first."""
        self.num_free = len(self._stack)
        self._stack[:] = np.arange(self.num_free - 1, -1, -1, dtype=np.int32)
