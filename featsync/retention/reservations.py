"""How many slots are promised to known next uses, step by step."""

from __future__ import annotations

from dataclasses import dataclass

from featsync.retention.arrays import Ids


@dataclass(frozen=True)
class Grant:
    """Where reservations for a new batch ended because the slots were used up.

    Attributes:
        step: Pending batch of the last uses of which only some could be bridged, all of later ones
            and none of earlier ones; -1 stands for the rows of the tail.
        granted: How many of that step were.
    """

    step: int
    granted: int


class Reservations:
    """Counts the slots reserved across each pending batch.

    A row used in batch p and next in batch m needs a slot after p, ..., m - 1 is settled. With C
    slots, at most C rows can be promised one across any of these. Granting, as each batch becomes
    known, the nearest next uses first, and among the uses in that batch those with the latest
    previous use, is interval scheduling: as many hits as Belady's rule with bypass, when the
    window covers the stream.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._reserved: list[int] = []

    def add_batch(self, num_in_tail: int, num_by_step: Ids) -> Grant | None:
        """Reserve slots for the uses in a new batch of rows whose last use is known.

        Args:
            num_in_tail: Rows of the batch that lie in the tail now.
            num_by_step: ``(pending batches,)``: rows whose last use is in that batch.

        Returns:
            Where the slots ended, or None if all rows got theirs.
        """
        steps = len(self._reserved)
        granted = [0] * (steps + 1)  # by step; the last cell, index -1, is the tail
        peak = 0
        ended = None
        for step in range(steps - 1, -2, -1):
            if step >= 0:
                peak = max(peak, self._reserved[step])
            wanted = int(num_by_step[step]) if step >= 0 else num_in_tail
            granted[step] = min(wanted, self._num_slots - peak)
            peak += granted[step]
            if granted[step] < wanted:
                ended = Grant(step, granted[step])
                break
        across = granted[-1]
        for step in range(steps):
            across += granted[step]
            self._reserved[step] += across
        self._reserved.append(0)
        return ended

    def settle_oldest(self) -> int:
        """Forget the oldest batch and return the slots reserved across it."""
        return self._reserved.pop(0)

    def clear(self) -> None:
        """Forget all batches."""
        self._reserved.clear()
