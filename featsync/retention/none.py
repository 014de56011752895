"""The policy that keeps nothing: for tables that lie where their rows are wanted."""

from __future__ import annotations

import numpy as np

from featsync.retention.arrays import Ids, Mask, Slots
from featsync.retention.contract import Keep, Retention


class NoRetention(Retention):
    """Keeps nothing, allocates nothing and looks at no id, so it cannot refuse ids that repeat."""

    def clear(self) -> None:
        """Nothing to do."""

    @property
    def resident(self) -> Ids:
        """``(num_slots,)``, all -1."""
        return np.full(self.num_slots, -1, np.int64)

    def _learn(self, ids: Ids) -> Mask:
        return np.zeros(len(ids), np.bool_)

    def _find(self, ids: Ids) -> Slots:
        return np.full(len(ids), -1, np.int32)

    def _settle(self, ids: Ids) -> Keep:
        return Keep(np.empty(0, np.int64), np.empty(0, np.int32))
