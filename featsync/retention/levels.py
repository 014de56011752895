"""How much a row deserves a slot when nobody knows its next use: one byte a row.

A level is 1 to `MAX_LEVEL`, so that twice a level, plus one bit, still leaves two bytes unused.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from featsync.retention.arrays import Bytes, Ids, Score, chunks, scatter

MAX_LEVEL = 126
HALVE_AT = 64


class Levels(Protocol):
    """Ranks rows by a level each."""

    def count(self, ids: Ids) -> None:
        """Take note of one use of each row."""

    def of(self, ids: Ids) -> Bytes:
        """Return ``(ids,)``: the level of each row, at least 1 for a row that was counted."""

    def halve_above(self, level: int) -> bool:
        """Halve all levels if ``level``, the one that just sufficed for a slot, is too high."""


class CountedLevels:
    """Level = uses so far. All are halved when it takes 64 of them to hold a slot.

    A level grows by one a batch and halving takes the threshold to 32, so the pass over all rows
    comes at most once in 32 batches: at 10M rows 1 ms (and 3 ms for 2M slots) of 32 * 15.
    """

    def __init__(self, num_rows: int) -> None:
        self._uses = np.zeros(num_rows, np.uint8)

    def count(self, ids: Ids) -> None:
        """Add one use to each row; counts stop at `MAX_LEVEL`."""
        for part in chunks(len(ids)):
            uses = self._uses.take(ids[part], mode="clip")
            uses += np.uint8(1)
            scatter(self._uses, ids[part], np.minimum(uses, np.uint8(MAX_LEVEL), out=uses))

    def of(self, ids: Ids) -> Bytes:
        """Return ``(ids,)``: uses so far; 1 also if halving left none."""
        uses: Bytes = self._uses.take(ids, mode="clip")
        return np.maximum(uses, np.uint8(1), out=uses)

    def halve_above(self, level: int) -> bool:
        """Halve all counts if ``level`` has reached 64, and say so."""
        if level < HALVE_AT:
            return False
        self._uses >>= 1
        return True


class ScoreLevels:
    """Level = rank of a given score, cut into 126 levels.

    Three quarters of the levels divide the rows that rank best, twice as many as fit into the
    cache: only there the order decides who stays. One level is 2 % of the cache. Equal scores
    have equal levels.
    """

    def __init__(self, score: Score, num_slots: int) -> None:
        ranked = np.sort(score)[::-1]
        contested = min(2 * num_slots, len(ranked))
        fine = 3 * MAX_LEVEL // 4
        ranks = np.concatenate(
            [
                np.linspace(0, contested, fine, endpoint=False),
                np.linspace(contested, len(ranked), MAX_LEVEL - 1 - fine, endpoint=False),
            ]
        ).astype(np.int64)
        edges = np.sort(ranked[np.minimum(ranks, len(ranked) - 1)]) if len(ranked) else ranked
        self._level = np.empty(len(score), np.uint8)
        for part in chunks(len(score)):
            self._level[part] = 1 + np.searchsorted(edges, score[part], side="right")

    def count(self, ids: Ids) -> None:
        """Nothing to do: a given score does not change."""

    def of(self, ids: Ids) -> Bytes:
        """Return ``(ids,)``: the level of each row."""
        return self._level.take(ids, mode="clip")

    def halve_above(self, level: int) -> bool:
        """Never: a given score does not change."""
        return False
