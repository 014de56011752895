"""Rows that were just gathered for one rank, for others that want them in the same step.

A row that several ranks want in one step is read from its home once: for the first of them from the
table, for the others from what was gathered for the first, still warm::

    order of rank 1, step 7     table ──────────────────────▶ │ a b c d e │ ─▶ rank 1
    order of rank 2, step 7     rows of rank 1 ──▶ │ b d │
                                table ───────────▶       │ f g │           ─▶ rank 2

So rows do not come in the order in which they were asked for, but by where they were found; masks
tell (`arranged`). Finding them takes 20 to 30 ns a row, reading the rest in place saves as much.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.exchange.portions import Read

__all__ = ["RecentRows", "arranged"]

_MAX_STEPS = 2  # of which rows are kept: a rank that is farther behind has its rows read again


class _Gathered(NamedTuple):
    rows: NDArray[np.int64]  # never falling
    values: torch.Tensor


class RecentRows:
    """What was gathered of one table, by step; used by the engine's thread.

    Attributes:
        rows_read: Rows read from the table so far.
    """

    def __init__(self) -> None:
        self._steps: dict[int, list[_Gathered]] = {}
        self.rows_read = 0

    def find(
        self,
        step: int,
        table: torch.Tensor,
        rows: NDArray[np.int64],
        target: torch.Tensor,
        is_kept: bool,
    ) -> tuple[list[NDArray[np.bool_]], list[Read]]:
        """Say how to put rows of a table into a tensor, those first that were gathered already.

        Args:
            step: Which of the step's rows may be there.
            table: ``(num_rows, *row_shape)``.
            rows: ``(n,)``, never falling.
            target: ``(n, *row_shape)``.
            is_kept: Whether others will order the same step; then nobody may write to ``target``
                until `let_go`.

        Returns:
            How they are arranged, see `arranged`; and what is to be read, in the order in which it
            stands in ``target``, before this is called again.
        """
        masks = []
        reads = []
        start = 0
        for known in self._steps.get(step, ()):
            at, is_known = _find(rows, known.rows)
            end = start + int(np.count_nonzero(is_known))
            reads.append(Read(known.values, at[is_known], target[start:end]))
            start, rows = end, rows[~is_known]
            masks.append(is_known)
        reads.append(Read(table, rows, target[start:]))
        self.rows_read += len(rows)
        if is_kept:
            self._steps.setdefault(step, []).append(_Gathered(rows, target[start:]))
            while len(self._steps) > _MAX_STEPS:
                del self._steps[min(self._steps)]
        return masks, reads

    def let_go(self, steps: Collection[int]) -> None:
        """Keep rows of these steps only: nobody will order the others."""
        self._steps = {step: rows for step, rows in self._steps.items() if step in steps}


def arranged(num_rows: int, masks: Sequence[NDArray[np.bool_]]) -> NDArray[np.int64]:
    """Which of the rows that were asked for each row is that came.

    Args:
        num_rows: How many.
        masks: In turn, which of the rows that are left come next, in the order in which they were
            asked for; what is left after the last of them comes at the end.

    Example:
        >>> arranged(4, [np.array([False, True, False, True])])
        array([1, 3, 0, 2])
    """
    left = np.arange(num_rows)
    parts = []
    for mask in masks:
        parts.append(left[mask])
        left = left[~mask]
    return np.concatenate([*parts, left])


def _find(
    rows: NDArray[np.int64], among: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where rows stand among others, both never falling, and whether they are there at all."""
    if len(among) == 0:
        return np.zeros(len(rows), np.int64), np.zeros(len(rows), np.bool_)
    at = np.minimum(np.searchsorted(among, rows), len(among) - 1)
    return at, among.take(at) == rows
