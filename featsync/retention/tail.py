"""The part of a cache whose rows have no known next use: the best levels stay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from featsync.errors import PlanError
from featsync.retention.arrays import Bytes, Ids, Slots, histogram
from featsync.retention.slots import SlotPool

FREE = 0
RESERVED = 255
HAND_STRIDE = 4096


@dataclass(frozen=True, eq=False)
class Admission:
    """What became of the rows that asked for a place in the tail.

    Attributes:
        slots: ``(ids,)``: the slot that holds the row from now on, or -1.
        admitted: Positions of the rows that got a new slot.
        evicted_rows: Rows of the tail that have left the cache for them.
        cut: Key that just did not suffice for every row that had it, or 0 if all got in.
    """

    slots: Slots
    admitted: Ids
    evicted_rows: Ids
    cut: int


class Tail:
    """Ranks rows by a key of one byte and evicts the lowest. 1 byte a slot beside the pool's.

    The key is twice the level, plus one for a row that lies in the cache: of equal levels those
    inside stay, which saves moves. A histogram of the keys gives the key to cut at without sorting
    or selecting among the slots. Of the slots at the cut, a clock hand takes the next ones, so
    that the rest of a level stays as long as it can.

    The byte of a slot is `FREE`, `RESERVED` (its row is not in the tail), or the row's key.
    """

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        # One cell more: index -1, a row without a slot, writes there.
        self._keys = np.zeros(len(pool.rows) + 1, np.uint8)
        self._counts = np.zeros(256, np.int64)
        self._hand = 0

    @property
    def resident(self) -> Ids:
        """``(num_slots,)``: the row of each slot, in the tail or reserved, or -1."""
        return np.where(self._keys[:-1] == FREE, -1, self._pool.rows)

    def reserve(self, slots: Slots) -> None:
        """Take rows out of the tail that keep their slots: their next use is known."""
        self._counts -= histogram(self._keys.take(slots, mode="clip"))
        self._keys[slots] = RESERVED

    def reserve_new(self, ids: Ids) -> Slots:
        """Take a free slot outside the tail for each id."""
        slots = self._pool.take(ids)
        self._keys[slots] = RESERVED
        return slots

    def release(self, slots: Slots) -> None:
        """Free slots that are reserved."""
        self._keys[slots] = FREE
        self._pool.give_back(slots)

    def put_back(self, slots: Slots, levels: Bytes) -> None:
        """Let rows with reserved slots join the tail, without a contest."""
        keys = np.left_shift(levels, np.uint8(1))
        keys |= np.uint8(1)
        self._keys[slots] = keys
        self._counts += histogram(keys)

    def admit(self, ids: Ids, slots: Slots, levels: Bytes, room: int) -> Admission:
        """Let rows compete with the tail for room.

        Args:
            ids: Rows outside the tail.
            slots: ``(ids,)``: the reserved slot of each row, or -1 if it lies in none.
            levels: ``(ids,)``: at least 1.
            room: Rows that the tail may have afterwards.

        Returns:
            Who is in. Slots of the others, and of evicted rows, are free.
        """
        is_inside = slots >= 0
        keys = np.left_shift(levels, np.uint8(1))
        keys |= is_inside.view(np.uint8)
        arriving = histogram(keys)
        cut, num_old, num_new = self._cut(arriving, room)

        evicted = self._evict(cut, num_old)
        stays = keys > np.uint8(cut)
        if num_new < arriving[cut]:
            stays[np.flatnonzero(keys == np.uint8(cut))[num_new:]] = True
        if num_new or arriving[:cut].any():
            self.release(slots.take(np.flatnonzero(is_inside & ~stays)))
        arriving[:cut] = 0
        arriving[cut] -= num_new
        self._counts[1::2] += arriving[::2] + arriving[1::2]  # who was outside is inside now

        admitted = np.flatnonzero(stays & ~is_inside)
        # As slots where a row stays, else -1; a mask in arithmetic is cheaper than np.where.
        slots = (slots + np.int32(1)) * stays - np.int32(1)
        slots[admitted] = self._pool.take(ids.take(admitted))
        keys |= np.uint8(1)
        self._keys[slots] = keys
        return Admission(slots, admitted, evicted, cut)

    def halve(self) -> None:
        """Follow the levels, which have been halved."""
        keys = self._keys[:-1]
        is_in_tail = (keys != FREE) & (keys != RESERVED)
        keys[:] = np.where(is_in_tail, ((keys >> 2) << 1) | np.uint8(1), keys)
        self._counts = histogram(keys)
        self._counts[[FREE, RESERVED]] = 0

    def clear(self) -> None:
        """Free all slots, in the tail and reserved."""
        self._keys[:] = FREE
        self._counts[:] = 0
        self._pool.free_all()

    def _cut(self, arriving: Ids, room: int) -> tuple[int, int, int]:
        """Find the key up to which rows have to go, so that tail and arrivals fit into room.

        Args:
            arriving: ``(256,)``: how many rows arrive with each key.
            room: Rows that may stay.

        Returns:
            The key, below which all go, and how many go that have it, of the tail and of the
            arrivals. All zero if nobody has to go.
        """
        ranked = np.cumsum(self._counts + arriving)
        surplus = int(ranked[-1]) - room
        if surplus <= 0:
            return 0, 0, 0
        cut = int(np.searchsorted(ranked, surplus))
        at_cut = surplus - int(ranked[cut - 1])
        num_old = min(at_cut, int(self._counts[cut]))
        return cut, num_old, at_cut - num_old

    def _evict(self, cut: int, at_cut: int) -> Ids:
        """Free the slots below a key, and some at it, from the hand on; return their rows."""
        keys = self._keys[:-1]
        found = []
        if self._counts[:cut].any():
            found.append(np.flatnonzero((keys < np.uint8(cut)) & (keys > np.uint8(FREE))))
            self._counts[:cut] = 0
        self._counts[cut] -= at_cut
        to_scan = 2 * len(keys)  # where the hand stands, a stretch may be seen twice
        while at_cut > 0:
            if to_scan <= 0:
                raise PlanError(f"{at_cut} slots of the tail are counted that are not there")
            end = min(self._hand + max(4 * at_cut, HAND_STRIDE), len(keys))
            ahead = np.flatnonzero(keys[self._hand : end] == np.uint8(cut))[:at_cut] + self._hand
            is_enough = len(ahead) == at_cut
            to_scan -= end - self._hand
            self._hand = (int(ahead[-1]) + 1 if is_enough else end) % len(keys)
            keys[ahead] = FREE
            at_cut -= len(ahead)
            found.append(ahead)
        slots = np.concatenate(found) if found else np.empty(0, np.int64)
        self.release(slots.astype(np.int32))
        rows: Ids = self._pool.rows.take(slots)
        return rows
