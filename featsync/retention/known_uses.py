"""Who is used when: each known use of a row, linked to its next known use.

The pending batches lie in a ring of ``window + 1`` stretches, one position an id::

    position   0        1        2 ... stride+1   stride+2 ...
    slots      dummy    dummy    [ batch       ]  [ batch      ] ...
    links      dummy    dummy    [ batch       ]  [ batch      ] ...

``slots`` at the first pending use of a row: the slot that holds it now, or -1. ``links``: position
of its next use, or `NO_NEXT`, or `DROPPED`. ``whereabouts`` of each table row: the position of its
last pending use, or without one -1 - slot, or `NOWHERE` if it lies in no slot either.

4 bytes a table row and 8 a position, of which there is up to an eighth more than the largest batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from featsync.errors import CapacityError
from featsync.retention.arrays import Bytes, Ids, Mask, Slots, exchange, histogram, scatter

NOWHERE = 0
NO_NEXT = 0
DROPPED = 1
_HEADER = 2
_GRANULE = 16
_NO_STRETCH = 255


@dataclass(frozen=True, eq=False)
class Arrival:
    """A batch that has just become known.

    Attributes:
        previous: ``(ids,)``: position of the last pending use, 0 if there is none.
        stretches: ``(ids,)``: stretch of that position, 255 if there is none.
        start: Position of the batch itself.
        slots: ``(ids,)``: where rows without a pending use lie, or -1. Write it to move them.
    """

    previous: Ids
    stretches: Bytes
    start: int
    slots: Slots


class KnownUses:
    """The ring of pending uses, and where each row of the table is found."""

    def __init__(self, num_rows: int, window: int) -> None:
        self.whereabouts = np.zeros(num_rows, np.int32)
        self._stretches = window + 1
        self._stride = 0
        self._slots = np.zeros(_HEADER, np.int32)
        self._links = np.zeros(_HEADER, np.int32)
        self._oldest = 0
        self._lengths: list[int] = []

    def add(self, ids: Ids) -> Arrival:
        """Append a batch for which `make_room` has made room.

        Raises:
            PlanError: Ids repeat; nothing has changed.
        """
        start = self._start(len(self._lengths))
        found = exchange(self.whereabouts, ids, start)
        slots = self._slots[start : start + len(ids)]
        np.maximum(np.int32(-1) - found, np.int32(-1), out=slots)
        self._links[start : start + len(ids)] = NO_NEXT
        self._lengths.append(len(ids))
        np.maximum(found, np.int32(0), out=found)
        stretches = ((found - np.int32(_HEADER)) // np.int32(self._stride)).astype(np.uint8)
        return Arrival(found.astype(np.int64), stretches, start, slots)

    def num_by_step(self, arrival: Arrival) -> Ids:
        """Count the rows of a new batch by the pending batch of their previous use."""
        counts = histogram(arrival.stretches)
        return counts[[self._stretch(step) for step in range(len(self._lengths) - 1)]]

    def is_lost(self, arrival: Arrival, step: int, granted: int) -> Mask:
        """Mark rows last used before a step, and those in it beyond the first ``granted``."""
        is_before = np.zeros(256, np.bool_)
        is_before[[self._stretch(earlier) for earlier in range(step)]] = True
        lost = is_before.take(arrival.stretches)
        in_step = np.flatnonzero(arrival.stretches == np.uint8(self._stretch(step)))
        lost[in_step[granted:]] = True
        return lost

    def link(self, arrival: Arrival, lost: Mask | None) -> None:
        """Lead from each previous use to the new one, or to `DROPPED` where it is lost."""
        size = len(arrival.previous)
        links = np.arange(arrival.start, arrival.start + size, dtype=np.int32)
        if lost is not None:
            links *= ~lost
            links += lost * np.int32(DROPPED)
        scatter(self._links, arrival.previous, links)

    def oldest(self) -> tuple[Slots, Slots]:
        """Return slots and links of the oldest batch, as views."""
        return self._batch(0)

    def settle_oldest(self) -> None:
        """Hand the slots of the oldest batch on to the next uses, and forget the batch."""
        slots, links = self._batch(0)
        scatter(self._slots, links.astype(np.int64), slots)
        self._lengths.pop(0)
        self._oldest = (self._oldest + 1) % self._stretches

    def slots_of(self, step: int) -> Slots:
        """Return the slots of a pending batch, as a view; -1 also where an earlier use has it."""
        return self._batch(step)[0]

    def clear(self) -> None:
        """Forget all batches; the caller has put ``whereabouts`` right."""
        self._lengths.clear()

    def make_room(self, size: int, pending: list[Ids]) -> None:
        """Widen the stretches if a batch is too large for them.

        The new ones are at least an eighth wider than the old, so all widening together costs at
        most nine times the last one: one pass over the ring and the pending ids.

        Args:
            size: Ids of the batch to come.
            pending: Ids of the batches in the ring.

        Raises:
            CapacityError: Positions would not fit into 32 bits; nothing has changed.
        """
        if size <= self._stride:
            return
        wider = size if not self._stride else max(size, self._stride + self._stride // 8)
        wider = -(-wider // _GRANULE) * _GRANULE
        positions = _HEADER + wider * self._stretches
        if positions > np.iinfo(np.int32).max:
            raise CapacityError(
                f"a batch of {size} ids times a window of {self._stretches - 1} does not fit into "
                "32-bit positions: choose a smaller lookahead or batch"
            )
        old = [self._batch(step) for step in range(len(pending))]
        old_stride, self._stride = max(self._stride, 1), wider
        self._slots = np.zeros(positions, np.int32)
        self._links = np.zeros(positions, np.int32)
        for step, (ids, (old_slots, old_links)) in enumerate(zip(pending, old, strict=True)):
            slots, links = self._batch(step)
            slots[:] = old_slots
            stretch, offset = np.divmod(old_links - np.int32(_HEADER), np.int32(old_stride))
            moved = stretch * np.int32(wider) + offset + np.int32(_HEADER)
            links[:] = np.where(old_links > DROPPED, moved, old_links)
            ends = np.flatnonzero(links == NO_NEXT)
            scatter(self.whereabouts, ids[ends], (ends + self._start(step)).astype(np.int32))

    def _stretch(self, step: int) -> int:
        return (self._oldest + step) % self._stretches

    def _start(self, step: int) -> int:
        return _HEADER + self._stretch(step) * self._stride

    def _batch(self, step: int) -> tuple[Slots, Slots]:
        here = slice(self._start(step), self._start(step) + self._lengths[step])
        return self._slots[here], self._links[here]
