"""How many of a rank's slots are its own, and how many it adds to those that a machine shares.

An own slot is the nearest; a row that several ranks want takes one of each. Shared, it takes one of
all, so more rows are held. Where ranks reach each other's slots as fast as their own, sharing is
always better; where they are as far as home, never. Between the two the split follows from the
costs (the insight of UGache, SOSP 2023).

What a split finds where is computed from how often each row is used. Minibatches are taken to be
independent, so that it follows how long the gaps between two uses of a row are. A cache that knows
uses ahead bridges the shortest gaps, as many as it has slots for; once it bridges all that it sees,
the slots that are left hold the rows used most for good. One that knows no use has only those. The
shared cache is left the uses that a rank does not find in its own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["RowCosts", "SharesFound", "num_held_by_each", "shares_found"]

_NUM_SPLITS = 64
_NUM_CLASSES = 400  # rows used about equally often are counted together
_LEAST_GAIN = 0.01  # a second cache to plan has to be worth it

Floats = NDArray[np.float64]


class RowCosts(NamedTuple):
    """Seconds that reading a row takes.

    Attributes:
        local: From a slot of the rank's own.
        peer: From a slot of another rank of the machine.
        home: From where it lies.
    """

    local: float
    peer: float
    home: float

    def shared(self, num_ranks: int) -> float:
        """From a slot of some rank of the machine."""
        return (self.local + (num_ranks - 1) * self.peer) / num_ranks


class SharesFound(NamedTuple):
    """Of the rows that ranks use, which shares they find where."""

    own: float
    shared: float
    home: float

    def seconds(self, num_ranks: int, costs: RowCosts) -> float:
        """What a row takes on average."""
        return (
            self.own * costs.local + self.shared * costs.shared(num_ranks) + self.home * costs.home
        )


def num_held_by_each(
    uses: NDArray[Any] | None, num_slots: int, num_ranks: int, window: int, costs: RowCosts
) -> int:
    """How many slots a rank keeps to itself.

    Args:
        uses: ``(rows,)``: how often each row that may be cached is used: the probability that a
            rank's minibatch has it, or, with numbers above 1, counts, of which the largest is taken
            to be a row of every minibatch. ``None``: nobody knows. Then it is all or nothing, since
            with even uses the best is at one of the ends.
        num_slots: Of each rank.
        num_ranks: Of the machine.
        window: Minibatches that a rank knows ahead; 0 where rows stay by score alone.
        costs: Of one row.
    """
    if uses is None:
        gained_shared = num_ranks * (costs.home - costs.shared(num_ranks))
        return num_slots if costs.home - costs.local >= gained_shared else 0
    classes = _classes_of(uses)
    splits = np.unique(np.linspace(0, num_slots, _NUM_SPLITS + 1).astype(np.int64))
    seconds = [
        _found(classes, int(own), num_ranks * (num_slots - int(own)), num_ranks, window).seconds(
            num_ranks, costs
        )
        for own in splits
    ]
    best, end = int(np.argmin(seconds)), 0 if seconds[0] < seconds[-1] else -1
    is_worth_it = seconds[best] < (1 - _LEAST_GAIN) * seconds[end]
    return int(splits[best if is_worth_it else end])


def shares_found(
    uses: NDArray[Any], num_own: int, num_shared: int, num_ranks: int, window: int
) -> SharesFound:
    """What ranks find where.

    Args:
        uses: See `num_held_by_each`.
        num_own: Slots of each rank's own cache.
        num_shared: Slots of the cache that they share.
        num_ranks: Of the machine.
        window: See `num_held_by_each`.
    """
    return _found(_classes_of(uses), num_own, num_shared, num_ranks, window)


class _Classes(NamedTuple):
    """Rows, by how often they are used.

    Attributes:
        chance: ``(classes,)``: that a rank's minibatch has a row.
        num_rows: ``(classes,)``.
    """

    chance: Floats
    num_rows: Floats


def _classes_of(uses: NDArray[Any]) -> _Classes:
    chance = uses[uses > 0].astype(np.float64)
    if len(chance) == 0:
        return _Classes(np.zeros(1), np.ones(1))
    chance /= max(1.0, float(chance.max()))
    heights = np.log(chance)
    lowest, width = heights.min(), max(float(np.ptp(heights)), 1e-9)
    numbers = ((heights - lowest) * ((_NUM_CLASSES - 1) / width)).astype(np.int64)
    num_rows, sums = np.bincount(numbers), np.bincount(numbers, weights=chance)
    is_there = num_rows > 0
    return _Classes(sums[is_there] / num_rows[is_there], num_rows[is_there].astype(np.float64))


class _Held(NamedTuple):
    """What a cache makes of the uses of each class of rows.

    Attributes:
        found: Share of the uses that find their row.
        for_good: Share of the rows that never leave.
        longest: The longest gap that is bridged.
    """

    found: Floats
    for_good: Floats
    longest: float


def _held(rate: Floats, num_rows: Floats, no_use_for: Floats, num_slots: float) -> _Held:
    """Fill slots.

    Args:
        rate: ``(classes,)``: uses of a row in a step.
        num_rows: ``(classes,)``.
        no_use_for: ``(window + 1, classes)``: that a row is not used for 0, 1, … steps after a use.
        num_slots: Of the cache.
    """
    window = len(no_use_for) - 1
    steps = np.arange(1, window + 1)[:, None]
    bridging = np.zeros_like(no_use_for)  # slots a row, when gaps up to a length are bridged
    bridging[1:] = rate * np.cumsum(steps * (no_use_for[:-1] - no_use_for[1:]), axis=0)
    needed = bridging @ num_rows
    if num_slots < needed[-1]:
        longest = float(np.interp(num_slots, needed, np.arange(window + 1)))
        before = int(longest)
        part = longest - before
        found = 1 - (1 - part) * no_use_for[before] - part * no_use_for[before + 1]
        return _Held(found, np.zeros_like(rate), longest)
    # The rows used most take a slot for all of their time.
    order = np.argsort(-rate)
    taken = ((1 - bridging[-1]) * num_rows)[order]
    left = num_slots - needed[-1] - (np.cumsum(taken) - taken)
    for_good = np.empty_like(rate)
    for_good[order] = np.clip(left / np.maximum(taken, 1e-12), 0, 1)
    return _Held(1 - (1 - for_good) * no_use_for[-1], for_good, window)


def _found(
    classes: _Classes, num_own: int, num_shared: int, num_ranks: int, window: int
) -> SharesFound:
    chance, num_rows = classes
    steps = np.arange(window + 1.0)[:, None]
    own = _held(chance, num_rows, (1 - chance) ** steps, num_own)
    left = chance * (1 - own.found)  # uses of a row in a step that one rank leaves
    any_left: Floats = 1 - (1 - left) ** float(num_ranks)
    shared = _held(
        any_left, num_rows, _no_use_left(left, own.longest, steps, num_ranks), num_shared
    )
    # Of ranks that want a row in one step, one finds it if it was there, the others if it comes.
    first, others = num_rows * any_left, num_rows * (num_ranks * left - any_left)
    by_several = num_rows @ (any_left - num_ranks * left * (1 - left) ** (num_ranks - 1))
    comes = min(1.0, num_shared / max(float(by_several), 1e-12)) if window else 0.0
    found = float(first @ shared.found + others @ np.maximum(shared.for_good, comes))
    uses = max(float(num_ranks * chance @ num_rows), 1e-12)
    of_own = float(num_ranks * (chance * own.found) @ num_rows)
    return SharesFound(of_own / uses, found / uses, 1 - (of_own + found) / uses)


def _no_use_left(left: Floats, bridged: float, steps: Floats, num_ranks: int) -> Floats:
    """``(steps, classes)``: that no rank leaves a use of a row for some steps after one did.

    What a rank leaves comes after longer gaps than it bridges: for so long it leaves none, and then
    with a chance that does not change.
    """
    chance = np.minimum(left / np.maximum(1 - left * bridged, 1e-9), 1.0)
    later = (1 - chance) ** np.maximum(steps - bridged, 0)
    of_others = np.where(steps <= bridged, 1 - left * steps, (1 - left * bridged) * later)
    no_use: Floats = later * np.maximum(of_others, 0.0) ** (num_ranks - 1)
    return no_use
