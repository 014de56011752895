"""The lookahead policy: nearest next use first, what the window does not see by score."""

from __future__ import annotations

import numpy as np

from featsync.retention.arrays import Ids, Mask, Score, Slots, refuse_outsiders, scatter
from featsync.retention.contract import Keep, Retention
from featsync.retention.known_uses import DROPPED, NO_NEXT, NOWHERE, KnownUses
from featsync.retention.levels import CountedLevels, Levels, ScoreLevels
from featsync.retention.reservations import Reservations
from featsync.retention.slots import SlotPool
from featsync.retention.tail import Tail


class WindowRetention(Retention):
    """Holds the rows that pushed batches use next; the slots that are left hold the best scores.

    Every decision falls when it can first be made:

    - ``push``: a row of the new batch that was used in a pending batch, or lies in the tail, gets a
      slot reserved from there to here, as far as there are slots. What gets none is dropped
      right after its last use: a certain miss never takes a slot (`Reservations`).
    - ``settle``: rows of the oldest batch with a reserved next use stay. Those without a known next
      use compete with the tail by score, or by counted use (`Tail`).

    Inside the window this is Belady's rule with bypass. Work is proportional to the ids of the
    batch, apart from two passes over bytes: halving the use counts, at most once in 32 batches,
    and looking through the slots when the tail's threshold rises. 5 bytes a table row, 13 a slot,
    9 an id of the largest batch times ``window + 1``.
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
        self._levels: Levels = (
            CountedLevels(num_rows, num_slots) if score is None else ScoreLevels(score, num_slots)
        )
        self._uses = KnownUses(num_rows, window)
        self._reservations = Reservations(num_slots)
        self._tail = Tail(SlotPool(num_slots))
        self._steps_with_drops = 0

    @property
    def resident(self) -> Ids:
        """``(num_slots,)``: the row that each slot holds, or -1."""
        return self._tail.resident

    def clear(self) -> None:
        """Empty all slots; pushed batches stay known."""
        residents = self._tail.resident
        residents = residents[residents >= 0]
        # A row with a pending use is found by its position, which stays; the others are gone.
        gone = residents[self._uses.whereabouts.take(residents) < 0]
        self._uses.whereabouts[gone] = NOWHERE
        for step in range(len(self._pending)):
            self._uses.slots_of(step)[:] = -1
        self._tail.clear()

    def _learn(self, ids: Ids) -> Mask:
        refuse_outsiders(ids, self.num_rows)
        self._uses.make_room(len(ids), list(self._pending))
        arrival = self._uses.add(ids)
        self._levels.count(ids)
        in_tail = np.flatnonzero(arrival.slots >= 0)
        self._tail.reserve(arrival.slots.take(in_tail))
        ended = self._reservations.add_batch(len(in_tail), self._uses.num_by_step(arrival))
        lost = None
        if ended:
            # Of the tail, these could not stay until their use: better free them at once.
            unlucky = in_tail[ended.granted if ended.step < 0 else 0 :]
            self._tail.release(arrival.slots.take(unlucky))
            arrival.slots[unlucky] = -1
            if ended.step >= 0:
                lost = self._uses.is_lost(arrival, ended.step, ended.granted)
                self._steps_with_drops = max(self._steps_with_drops, ended.step + 1)
        self._uses.link(arrival, lost)
        is_promised: Mask = arrival.previous > 0
        if lost is not None:
            is_promised &= ~lost
        is_promised |= arrival.slots >= 0
        return is_promised

    def _find(self, ids: Ids) -> Slots:
        return self._uses.oldest()[0].copy()

    def _settle(self, ids: Ids) -> Keep:
        slots, links = self._uses.oldest()
        is_outside = slots < 0
        if self._steps_with_drops:
            self._steps_with_drops -= 1
            dropped = np.flatnonzero((links == DROPPED) & ~is_outside)
            self._tail.release(slots.take(dropped))

        last = np.flatnonzero(links == NO_NEXT)
        last_ids = ids.take(last)
        room = self.num_slots - self._reservations.settle_oldest()
        levels = self._levels.of(last_ids)
        admission = self._tail.admit(last_ids, slots.take(last), levels, room)
        self._uses.whereabouts[admission.evicted_rows] = NOWHERE
        # -1 - slot, which is NOWHERE for a row that stays in no slot, -1.
        scatter(self._uses.whereabouts, last_ids, np.int32(-1) - admission.slots)

        promised = np.flatnonzero(is_outside & (links > DROPPED))
        promised_slots = self._tail.reserve_new(ids.take(promised))
        slots[promised] = promised_slots
        self._uses.settle_oldest()
        if self._levels.halve_if_due(admission.cut // 2):
            self._tail.halve()

        admitted = admission.admitted
        return Keep(
            np.concatenate([promised, last.take(admitted)]),
            np.concatenate([promised_slots, admission.slots.take(admitted)]),
        )

    def _forget(self) -> None:
        steps = [(ids, self._uses.slots_of(step)) for step, ids in enumerate(self._pending)]
        for ids, _ in steps:
            self._uses.whereabouts[ids] = NOWHERE
        for ids, slots in steps:
            inside = np.flatnonzero(slots >= 0)
            residents = ids.take(inside)
            self._uses.whereabouts[residents] = np.int32(-1) - slots.take(inside)
            self._tail.put_back(slots.take(inside), self._levels.of(residents))
        self._uses.clear()
        self._reservations.clear()
        self._steps_with_drops = 0
