"""Belady's rule with bypass, computed offline: the most hits that any policy could have had."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NEVER = np.iinfo(np.int32).max


def belady_hits(
    batches: Sequence[npt.NDArray[np.int64]], num_rows: int, num_slots: int
) -> npt.NDArray[np.int64]:
    """Count the hits of each batch when the whole stream is known.

    After each batch the ``num_slots`` rows with the nearest next uses stay, of those inside and
    those just used. A row need not be admitted (bypass).

    Args:
        batches: Distinct ids each.
        num_rows: Rows of the table.
        num_slots: Rows that the cache holds.

    Returns:
        ``(batches,)``: rows of each batch that were inside when it came.
    """
    next_uses = _next_uses(batches, num_rows)
    hits = np.zeros(len(batches), np.int64)
    inside = np.empty(0, np.int32)  # of each row inside, its next use: that is all that matters
    for step, arriving in enumerate(next_uses):
        hits[step] = np.count_nonzero(inside == step)
        wanted = np.concatenate([inside[inside > step], arriving[arriving < NEVER]])
        if len(wanted) > num_slots:
            wanted = np.partition(wanted, num_slots)[:num_slots]
        inside = wanted
    return hits


def _next_uses(
    batches: Sequence[npt.NDArray[np.int64]], num_rows: int
) -> list[npt.NDArray[np.int32]]:
    """Find for each id of each batch the number of the next batch with that id, or NEVER."""
    coming = np.full(num_rows, NEVER, np.int32)
    next_uses: list[npt.NDArray[np.int32]] = []
    for step in range(len(batches) - 1, -1, -1):
        next_uses.append(coming.take(batches[step]))
        coming[batches[step]] = step
    return next_uses[::-1]
