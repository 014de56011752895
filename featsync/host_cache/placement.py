"""Whether a hot row is held once on a machine, or by each of its ranks.

Held by each, a row is the nearest to all and takes a slot of all; held once, it leaves room for
others. Where ranks reach each other's slots as fast as their own, once is always better; where they
are as far as home, never. Between the two the best rows are held by each, the next ones once, and
the split follows from the costs (the insight of UGache, SOSP 2023)::

    rows by use   │ a: one slot of every rank │ R (C - a): one slot of the machine │ home │
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["RowCosts", "num_held_by_each", "seconds_a_row"]


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


def seconds_a_row(
    uses: NDArray[np.floating[Any]], num_slots: int, num_ranks: int, costs: RowCosts
) -> NDArray[np.float64]:
    """What a use of a row takes on average, for each way to split the slots.

    Args:
        uses: ``(num_rows,)``, how often each row is used, by any measure.
        num_slots: C, of each rank; at most ``num_rows``.
        num_ranks: R, of the machine.
        costs: Of one row.

    Returns:
        ``(num_slots + 1,)``: the seconds if as many rows are held by each rank.
    """
    by_use = np.sort(uses.astype(np.float64))[::-1]
    share = np.concatenate([[0.0], np.cumsum(by_use)])
    share /= max(share[-1], np.finfo(np.float64).tiny)
    by_each = np.arange(num_slots + 1)
    held = np.minimum(by_each + num_ranks * (num_slots - by_each), len(uses))
    once = (costs.local + (num_ranks - 1) * costs.peer) / num_ranks
    seconds: NDArray[np.float64] = (
        costs.local * share[by_each]
        + once * (share[held] - share[by_each])
        + costs.home * (1 - share[held])
    )
    return seconds


def num_held_by_each(
    uses: NDArray[np.floating[Any]] | None, num_slots: int, num_ranks: int, costs: RowCosts
) -> int:
    """How many of a rank's slots hold rows that all other ranks hold too.

    Args:
        uses: As for `seconds_a_row`; ``None`` where nothing is known of them. Then it is all or
            nothing, since with even uses the best is at one of the ends.
        num_slots: Of each rank.
        num_ranks: Of the machine.
        costs: Of one row.
    """
    if uses is None:
        once = (costs.local + (num_ranks - 1) * costs.peer) / num_ranks
        gained_once, gained_by_each = num_ranks * (costs.home - once), costs.home - costs.local
        return num_slots if gained_by_each >= gained_once else 0
    return int(seconds_a_row(uses, num_slots, num_ranks, costs).argmin())
