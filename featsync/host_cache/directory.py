"""Which row lies in which slot of the cache that the ranks of a machine share, and what stays.

The rows that are used soonest stay, whichever rank uses them; then those that are used most. One
byte a slot ranks them (its *key*), so that a decision costs a few passes over bytes::

    key   0          free
          1 … 126    nobody knows a next use: the row's level (`featsync.retention.levels`)
          128 + t    used next at time t, of which the last 7 bits are kept

Inside the windows this is Belady's rule with bypass, over the minibatches of all ranks in the order
in which they are planned. A row that two ranks want in one step is brought by the one that plans
first, and is a hit for the other: its use is the soonest there is.

A slot belongs to a row from the moment that a rank decides to bring it. What has to be waited for
before a slot is read or filled follows from who named it last, and in which of its plans::

    landings[slot]         rank and plan that fill it       reading waits for that
    readings[rank, slot]   last plan in which a rank reads  filling waits for that, and for landings
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featsync.host_cache.uses import Uses
from featsync.retention.arrays import (
    Bytes,
    Ids,
    Mask,
    refuse_outsiders,
    refuse_repeats,
    scatter,
)
from featsync.retention.levels import Levels

__all__ = ["Directory", "DirectoryArrays", "Lookup"]

FREE = 0
DUE = 128
_TIMES = 128
_MAX_AHEAD = 96  # what lies farther ahead is a use by a rank that has left: long past
_PLAN_BITS = 48
_CLASSES = 256

Worths = NDArray[np.int16]
PlanOfRank = Mapping[int, int]


class DirectoryArrays(NamedTuple):
    """What the ranks of a machine know together of one cache; zeros at first.

    Attributes:
        slot_of_row: ``(num_rows,)`` int32: the row's slot plus one, or 0.
        row_of_slot: ``(num_slots,)`` int64, meaningful unless the slot is free.
        keys: ``(num_slots,)`` uint8.
        landings: ``(num_slots,)`` int64.
        readings: ``(num_ranks, num_slots)`` int64.
    """

    slot_of_row: NDArray[np.int32]
    row_of_slot: NDArray[np.int64]
    keys: Bytes
    landings: NDArray[np.int64]
    readings: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Lookup:
    """What a rank does about one of its minibatches. Ranks are numbered within the machine.

    Attributes:
        slots: ``(ids,)`` int32: where to read each row, or -1 for one that is to be brought.
        read_after: Landings of other ranks that have to be over before that.
        fill_positions: Which of the ids are to be written to slots once they are here.
        fill_slots: Slot of each of them, distinct.
        fill_after_landings: Landings of other ranks that have to be over before that.
        fill_after_readings: Readings of other ranks that have to be over before that.
    """

    slots: NDArray[np.int32]
    read_after: PlanOfRank
    fill_positions: Ids
    fill_slots: Ids
    fill_after_landings: PlanOfRank
    fill_after_readings: PlanOfRank


class Directory:
    """Decides for one of the ranks of a machine; whoever calls holds a lock that they share.

    Args:
        arrays: Shared by the ranks.
        uses: Known uses of rows.
        levels: Ranks rows of which no use is known.
        rank: The caller's number within the machine.
    """

    def __init__(self, arrays: DirectoryArrays, uses: Uses, levels: Levels, rank: int) -> None:
        self._arrays = arrays
        self._uses = uses
        self._levels = levels
        self._rank = rank

    @property
    def resident(self) -> Ids:
        """``(num_slots,)``: the row that each slot holds or will hold, or -1."""
        return np.where(self._arrays.keys == FREE, -1, self._arrays.row_of_slot)

    def push(self, ids: Ids) -> None:
        """Make one more minibatch of this rank known.

        Raises:
            FeatureError: An id lies outside the table. Nothing has changed.
            PlanError: Ids repeat. Nothing has changed.
        """
        slot_of_row = self._arrays.slot_of_row
        refuse_outsiders(ids, len(slot_of_row))
        refuse_repeats(ids, slot_of_row, unused=len(self._arrays.keys) + 1)
        time = self._uses.push(self._rank, ids)
        self._levels.count(ids)
        if time is None:
            return
        keys = self._arrays.keys
        slots = slot_of_row.take(ids, mode="clip") - np.int32(1)
        slots = slots[slots >= 0]
        worth = self._worth()
        due = np.uint8(DUE + time % _TIMES)
        keys[slots[worth.take(keys.take(slots)) < worth[due]]] = due

    def plan(self, number: int, ids: Ids, wanted: Mask | None) -> Lookup:
        """Say where the rows of this rank's next minibatch come from, and which of them stay.

        Args:
            number: Of the plan, one more than of this rank's last.
            ids: What was pushed for it.
            wanted: ``(ids,)``: which of them the rank has not got otherwise; ``None``: all.
        """
        arrays = self._arrays
        self._uses.pass_by(self._rank, ids)
        slots = arrays.slot_of_row.take(ids, mode="clip") - np.int32(1)
        keys = self._keys_of(ids)
        is_inside = slots >= 0
        inside = np.flatnonzero(is_inside)
        arrays.keys[slots.take(inside)] = keys.take(inside)
        if wanted is not None:
            slots[~wanted] = -1
            is_inside |= ~wanted
            inside = inside[wanted.take(inside)]
        hits = slots.take(inside)
        read_after = self._landings_of(hits)
        arrays.readings[self._rank, hits] = number

        misses = np.flatnonzero(~is_inside)
        chosen, filled, cut = self._choose(keys.take(misses))
        positions = misses.take(chosen)
        lookup = Lookup(
            slots,
            read_after,
            positions,
            filled,
            self._landings_of(filled),
            self._readings_of(filled),
        )
        self._assign(number, ids.take(positions), filled, keys.take(positions))
        if self._levels.halve_if_due(cut if cut < DUE else 0):
            is_level = (arrays.keys > FREE) & (arrays.keys < DUE)
            arrays.keys[is_level] = np.maximum(arrays.keys[is_level] >> 1, 1)
        return lookup

    def _keys_of(self, ids: Ids) -> Bytes:
        times = self._uses.next_of(ids)
        keys = (DUE + times % _TIMES).astype(np.uint8)
        unknown = np.flatnonzero(times < 0)
        keys[unknown] = self._levels.of(ids.take(unknown))
        return keys

    def _worth(self) -> Worths:
        """``(256,)``: how much a row with each key deserves its slot."""
        worth = np.arange(_CLASSES, dtype=np.int16)
        ahead = (np.arange(_TIMES) - self._uses.now) % _TIMES
        worth[DUE:] = np.where(ahead > _MAX_AHEAD, 1, _CLASSES - 1 - ahead)
        return worth

    def _landings_of(self, slots: NDArray[np.integer[Any]]) -> PlanOfRank:
        """The last landing of each other rank in some slots."""
        arrays = self._arrays
        landings = arrays.landings.take(slots)
        landings = landings[landings > 0]
        ranks, numbers = landings >> _PLAN_BITS, landings & ((1 << _PLAN_BITS) - 1)
        return {
            int(rank): int(numbers[ranks == rank].max())
            for rank in range(len(arrays.readings))
            if rank != self._rank and (ranks == rank).any()
        }

    def _readings_of(self, slots: Ids) -> PlanOfRank:
        """The last plan of each other rank that reads some slots."""
        if len(slots) == 0:
            return {}
        last = [int(readings.take(slots).max()) for readings in self._arrays.readings]
        return {rank: n for rank, n in enumerate(last) if n and rank != self._rank}

    def _choose(self, keys: Bytes) -> tuple[Ids, Ids, int]:
        """Choose the misses that are worth more than as many rows that have slots now.

        Args:
            keys: ``(misses,)``.

        Returns:
            Which misses, a slot for each of them, and what just did not suffice.
        """
        worth = self._worth()
        misses, slots = worth.take(keys), worth.take(self._arrays.keys)
        num_misses = np.bincount(misses, minlength=_CLASSES)
        num_slots = np.bincount(slots, minlength=_CLASSES)
        as_good = np.cumsum(num_misses[::-1])[::-1]  # misses worth c or more
        worse = np.cumsum(num_slots) - num_slots  # slots worth less than c
        swaps = np.minimum(as_good, worse)
        num = int(swaps.max())
        return _largest(misses, num), _largest(-slots, num), int(swaps.argmax())

    def _assign(self, number: int, rows: Ids, slots: Ids, keys: Bytes) -> None:
        arrays = self._arrays
        evicted = slots[arrays.keys.take(slots) != FREE]
        arrays.slot_of_row[arrays.row_of_slot.take(evicted)] = 0
        arrays.row_of_slot[slots] = rows
        scatter(arrays.slot_of_row, rows, (slots + 1).astype(np.int32))
        arrays.keys[slots] = keys
        arrays.landings[slots] = (self._rank << _PLAN_BITS) | number


def _largest(values: Worths, num: int) -> Ids:
    """Positions of the ``num`` largest values, in any order."""
    if num >= len(values):
        return np.arange(len(values))
    if num == 0:
        return np.empty(0, np.int64)
    return np.argpartition(values, len(values) - num)[-num:]
