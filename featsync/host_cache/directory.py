"""Which row lies in which slot of the cache that the ranks of a machine share, and what stays.

The rows that are used soonest stay, whichever rank uses them; then those that are used most. One
byte a slot ranks them (its *key*), so that a decision costs a few passes over bytes::

    key   0          free
          1 … 126    nobody knows a next use: the row's level (`featsync.retention.levels`)
          128 + t    used next at time t, of which the last 7 bits are kept

What a row with a key deserves (its *worth*) is a byte as well, read from a table of 256.

Inside the windows this is Belady's rule with bypass, over the minibatches of all ranks in the order
in which they are planned. A row that two ranks want in one step is brought by the one that plans
first, and is a hit for the other: its use is the soonest there is.

A slot belongs to a row from the moment that a rank decides to bring it. What has to be waited for
before a slot is read or filled follows from who named it last, and in which of its plans::

    fillers, landings   rank and plan that fill a slot     reading waits for that
    readings            last plan of each rank that reads  filling waits for that, and for landings
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from featsync.host_cache.uses import UNKNOWN, Uses
from featsync.retention.arrays import (
    Bytes,
    Ids,
    refuse_outsiders,
    scatter,
)
from featsync.retention.levels import Levels

__all__ = ["Directory", "DirectoryArrays", "Lookup"]

FREE = 0
DUE = 128
_LAST_BITS = 127
_MAX_AHEAD = 96  # what lies farther ahead is a use by a rank that has left: long past
_CLASSES = 256

PlanOfRank = Mapping[int, int]


def _worth_of_keys(now: int) -> Bytes:
    """``(256,)``: levels are worth less than uses, and those the more, the sooner they come."""
    worth = np.arange(_CLASSES)
    ahead = (worth[DUE:] - DUE - now) % (_LAST_BITS + 1)
    worth[DUE:] = np.where(ahead > _MAX_AHEAD, 1, _CLASSES - 1 - ahead)
    return worth.astype(np.uint8)


_WORTH = np.stack([_worth_of_keys(now) for now in range(_LAST_BITS + 1)])


class DirectoryArrays(NamedTuple):
    """What the ranks of a machine know together of one cache; zeros at first.

    A *place* is a slot plus one, and place 0 is that of rows without a slot. What is written there
    means nothing, but spares planning to pick out the rows that have one; landings stay 0.

    Attributes:
        place_of_row: ``(num_rows,)`` int32.
        row_of_place: ``(num_slots + 1,)`` int64, meaningless where the place is free.
        keys: ``(num_slots + 1,)`` uint8.
        fillers: ``(num_slots + 1,)`` uint8: the rank that fills the place.
        landings: ``(num_slots + 1,)`` int32: and in which of its plans.
        readings: ``(num_ranks, num_slots + 1)`` int32: the last plan in which a rank reads it.
    """

    place_of_row: NDArray[np.int32]
    row_of_place: NDArray[np.int64]
    keys: Bytes
    fillers: Bytes
    landings: NDArray[np.int32]
    readings: NDArray[np.int32]


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

    def spread(self, positions: Ids, num_ids: int) -> Lookup:
        """The same, where the ids are those at some positions of more ids."""
        slots = np.full(num_ids, -1, np.int32)
        slots[positions] = self.slots
        return replace(self, slots=slots, fill_positions=positions.take(self.fill_positions))


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
        return np.where(self._arrays.keys == FREE, -1, self._arrays.row_of_place)[1:]

    def push(self, ids: Ids) -> None:
        """Make one more minibatch of this rank known; ids may repeat.

        Raises:
            FeatureError: An id lies outside the table. Nothing has changed.
        """
        arrays = self._arrays
        refuse_outsiders(ids, len(arrays.place_of_row))
        time = self._uses.push(self._rank, ids)
        self._levels.count(ids)
        if time is None:
            return
        places = arrays.place_of_row.take(ids, mode="clip").astype(np.int64)
        keys = arrays.keys.take(places, mode="clip")
        worth = self._worth
        due = np.uint8(DUE | time & _LAST_BITS)
        is_sooner = worth.take(keys) < worth[due]
        keys += (due - keys) * is_sooner
        scatter(arrays.keys, places, keys)

    def plan(self, number: int, ids: Ids) -> Lookup:
        """Say where the rows of this rank's next minibatch come from, and which of them stay.

        Args:
            number: Of the plan, one more than of this rank's last.
            ids: What was pushed for it.
        """
        arrays = self._arrays
        keys = self._keys_of(ids, self._uses.pass_by(self._rank, ids))
        found = arrays.place_of_row.take(ids, mode="clip")
        places = found.astype(np.int64)
        scatter(arrays.keys, places, keys)
        arrays.readings[self._rank][places] = number
        read_after = self._landings_of(places)

        misses = np.flatnonzero(found == 0)
        chosen, filled, cut = self._choose(keys.take(misses))
        positions = misses.take(chosen)
        lookup = Lookup(
            found - np.int32(1),
            read_after,
            positions,
            filled - 1,
            self._landings_of(filled),
            self._readings_of(filled),
        )
        self._assign(number, ids.take(positions), filled, keys.take(positions))
        if self._levels.halve_if_due(cut if cut < DUE else 0):
            halved = np.maximum(arrays.keys >> 1, 1)
            is_level = (arrays.keys > FREE) & (arrays.keys < DUE)
            np.copyto(arrays.keys, halved, where=is_level)
        return lookup

    def _keys_of(self, ids: Ids, ahead: Bytes) -> Bytes:
        unknown = np.flatnonzero(ahead >= UNKNOWN)
        keys = ahead + np.uint8(self._uses.now & _LAST_BITS)
        keys |= np.uint8(DUE)
        keys[unknown] = self._levels.of(ids.take(unknown))
        return keys

    @property
    def _worth(self) -> Bytes:
        """``(256,)``: how much a row with each key deserves its slot."""
        worth: Bytes = _WORTH[self._uses.now & _LAST_BITS]
        return worth

    def _landings_of(self, places: Ids) -> PlanOfRank:
        """The last landing of each other rank in some places."""
        arrays = self._arrays
        fillers = arrays.fillers.take(places, mode="clip")
        landings = arrays.landings.take(places, mode="clip")
        last = {
            rank: int((landings * (fillers == rank)).max(initial=0))
            for rank in range(len(arrays.readings))
            if rank != self._rank
        }
        return {rank: number for rank, number in last.items() if number}

    def _readings_of(self, places: Ids) -> PlanOfRank:
        """The last plan of each other rank that reads some places."""
        last = {
            rank: int(readings.take(places).max(initial=0))
            for rank, readings in enumerate(self._arrays.readings)
            if rank != self._rank
        }
        return {rank: number for rank, number in last.items() if number}

    def _choose(self, keys: Bytes) -> tuple[Ids, Ids, int]:
        """Choose the misses that are worth more than as many rows that have slots now.

        Args:
            keys: ``(misses,)``.

        Returns:
            Which misses, a place for each of them, and what just did not suffice.
        """
        worth = self._worth
        misses, slots = worth.take(keys), worth.take(self._arrays.keys[1:])

        def suffices(edge: int) -> bool:
            return np.count_nonzero(slots <= edge) >= np.count_nonzero(misses > edge)

        edge = bisect_left(range(_CLASSES), True, key=suffices)
        better, worse = np.flatnonzero(misses > edge), np.flatnonzero(slots < edge)
        # Those at the edge leave, or come, until there are as many of one as of the other.
        equal_misses, equal_slots = np.flatnonzero(misses == edge), np.flatnonzero(slots == edge)
        chosen = np.concatenate([better, equal_misses[: max(0, len(worse) - len(better))]])
        places = np.concatenate([worse, equal_slots[: max(0, len(better) - len(worse))]])
        return chosen, places + 1, edge

    def _assign(self, number: int, rows: Ids, places: Ids, keys: Bytes) -> None:
        arrays = self._arrays
        evicted = places[arrays.keys.take(places) != FREE]
        arrays.place_of_row[arrays.row_of_place.take(evicted)] = 0
        arrays.row_of_place[places] = rows
        scatter(arrays.place_of_row, rows, places.astype(np.int32))
        # Where a row came twice, the place it got first is free again.
        keys *= arrays.place_of_row.take(rows) == places
        arrays.keys[places] = keys
        arrays.fillers[places] = self._rank
        arrays.landings[places] = number
