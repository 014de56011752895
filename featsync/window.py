"""The pure half of the Planner: ids that are known ahead go in, plans come out.

::

        settled        delivered next        known ahead
    ... n-2, n-1   |        n         |  n+1, n+2 ... n+K-1  |   not known
                            ^ plan(): keep of n-1, fetch of n

Invariants: batches are pushed and planned in the same order, each once; at most K batches are
pushed and not planned; every wanted row has exactly one source.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.errors import FeatureError, PlanError
from featsync.plan import FeatureKey, FeaturePlan, Fetch, Keep, Plan, Want
from featsync.retention import Retention


class DistinctIds:
    """The ids of one want without repetition, and where each came from.

    Retention speaks of distinct rows; an edge may be sampled in several layers.

    Attributes:
        ids: ``(num_distinct,)`` int64.
    """

    def __init__(self, want: Want | None) -> None:
        self._inverse: NDArray[np.int64] | None = None
        self._first: NDArray[np.int64] | None = None
        if want is None or not want.ids:
            self.ids = np.empty(0, np.int64)
            return
        ids = want.ids[0] if len(want.ids) == 1 else torch.cat(want.ids)
        self.ids = ids.cpu().numpy().astype(np.int64, copy=False)
        if len(want.ids) > 1:
            self.merge()

    def merge(self) -> None:
        """Drop repetitions (sorts the ids)."""
        self.ids, self._first, self._inverse = np.unique(
            self.ids, return_index=True, return_inverse=True
        )

    def spread(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """From one slot a distinct id to one a wanted position."""
        return slots if self._inverse is None else slots[self._inverse]

    def positions(self, keep: Keep) -> Keep:
        """From positions among distinct ids to positions in the minibatch."""
        if self._first is None:
            return keep
        return Keep(self._first[keep.positions], keep.slots)


class PlanWindow:
    """Ids of the next K minibatches, and the plans made from them.

    Args:
        retentions: The policy of each feature that has a cache; the others are read from home, and
            none of their ids is looked at.

    Attributes:
        num_planned: Plans made so far.
    """

    def __init__(self, retentions: Mapping[FeatureKey, Retention]) -> None:
        self._retentions = dict(retentions)
        self._known: deque[tuple[Mapping[FeatureKey, Want], dict[FeatureKey, DistinctIds]]]
        self._known = deque()
        self._planned: dict[FeatureKey, DistinctIds] | None = None
        self.num_planned = 0

    def push(self, wants: Mapping[FeatureKey, Want]) -> None:
        """Make the ids of one more minibatch known.

        Raises:
            FeatureError: An id lies outside its feature's table.
        """
        distinct = {}
        for key, retention in self._retentions.items():
            distinct[key] = DistinctIds(wants.get(key))
            try:
                _push(retention, distinct[key])
            except FeatureError as error:
                raise FeatureError(f"feature {key}: {error}") from error
        self._known.append((wants, distinct))

    def plan(self) -> Plan:
        """Decide what stays of the minibatch planned last, and whence the next one's rows come."""
        start = time.perf_counter()
        wants, distinct = self._known.popleft()
        keeps: dict[FeatureKey, Keep] = {}
        if self._planned is not None:
            for key, retention in self._retentions.items():
                keeps[key] = self._planned[key].positions(retention.settle())
        features = {
            key: FeaturePlan(self._fetch(key, want, distinct), keeps.get(key))
            for key, want in wants.items()
        }
        for key in keeps.keys() - features.keys():  # wanted by the last minibatch, not by this one
            features[key] = FeaturePlan(Fetch(0), keeps[key])
        batch, self._planned = self.num_planned, distinct
        self.num_planned += 1
        return Plan(batch, features, time.perf_counter() - start)

    def _fetch(
        self, key: FeatureKey, want: Want, distinct: Mapping[FeatureKey, DistinctIds]
    ) -> Fetch:
        retention = self._retentions.get(key)
        if retention is None:
            return Fetch(want.num_rows)
        slots = distinct[key].spread(retention.hits())
        is_cached = slots >= 0
        cached = np.flatnonzero(is_cached)
        return Fetch(
            want.num_rows,
            home_positions=torch.from_numpy(np.flatnonzero(~is_cached)),
            cached_positions=torch.from_numpy(cached),
            cached_slots=torch.from_numpy(slots.take(cached).astype(np.int64)),
        )


def _push(retention: Retention, distinct: DistinctIds) -> None:
    try:
        retention.push(distinct.ids)
    except PlanError:
        # The sampler's node ids are distinct; a user's own stage may repeat some.
        distinct.merge()
        retention.push(distinct.ids)
