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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple, Protocol

import numpy as np
import torch

from featsync.errors import FeatureError, PlanError
from featsync.host_cache.directory import Lookup
from featsync.plan import FeatureKey, FeaturePlan, Fetch, Keep, Plan, Share, Want
from featsync.retention import Retention
from featsync.retention.arrays import Ids, Mask, Slots

IsFar = Callable[[Ids], Mask]


class SharedPlanner(Protocol):
    """Plans the cache that the ranks of a machine share; see `HostCache`."""

    def push(self, ids: Ids) -> None:
        """Make one more minibatch known; the ids are kept by reference."""

    @property
    def place(self) -> tuple[Sequence[int], int]:
        """Among all shared caches, in the same order on all ranks."""

    def hold(self) -> AbstractContextManager[None]:
        """Hold the lock under which `plan` is to be called."""

    def plan(self) -> tuple[int, Lookup]:
        """Plan the oldest minibatch that is pushed and not planned."""


class DistinctIds:
    """The ids of one want that a cache is good for, and where each came from.

    Caches speak of distinct rows; an edge may be sampled in several layers.

    Args:
        want: The want; ``None``: nothing is wanted.
        is_far: Which rows are worth caching; ``None``: all.

    Attributes:
        ids: ``(num_distinct,)`` int64.
    """

    def __init__(self, want: Want | None, is_far: IsFar | None = None) -> None:
        self._num_rows = 0
        self._far: Ids | None = None
        self._inverse: Ids | None = None
        self._first: Ids | None = None
        if want is None or not want.ids:
            self.ids = np.empty(0, np.int64)
            return
        ids = want.ids[0] if len(want.ids) == 1 else torch.cat(want.ids)
        self.ids = ids.cpu().numpy().astype(np.int64, copy=False)
        if is_far is not None:
            self._num_rows = len(self.ids)
            self._far = np.flatnonzero(is_far(self.ids))
            self.ids = self.ids.take(self._far)
        if len(want.ids) > 1:
            self.merge()

    def merge(self) -> None:
        """Drop repetitions (sorts the ids)."""
        self.ids, self._first, self._inverse = np.unique(
            self.ids, return_index=True, return_inverse=True
        )

    def spread(self, slots: Slots) -> Slots:
        """From one slot a distinct id to one a wanted position, -1 for those not worth caching."""
        spread = slots if self._inverse is None else slots[self._inverse]
        if self._far is None:
            return spread
        everywhere = np.full(self._num_rows, -1, np.int32)
        everywhere[self._far] = spread
        return everywhere

    def positions(self, distinct: Ids) -> Ids:
        """From positions among distinct ids to positions in the minibatch, one of each id."""
        positions = distinct if self._first is None else self._first.take(distinct)
        return positions if self._far is None else self._far.take(positions)


class _Known(NamedTuple):
    """A minibatch that is pushed.

    Attributes:
        wants: What it wants.
        distinct: Of each feature that has a cache.
        rest: Of each that has both kinds of cache: which of the distinct ids are the shared one's.
    """

    wants: Mapping[FeatureKey, Want]
    distinct: dict[FeatureKey, DistinctIds]
    rest: dict[FeatureKey, Ids]


class PlanWindow:
    """Ids of the next K minibatches, and the plans made from them.

    Args:
        retentions: The policy of each feature that has a cache of its own.
        shared: The caches that this machine's ranks share. What has no cache at all is read from
            home, and none of its ids is looked at.
        far: For partitioned features which rows are worth caching; the others lie near.

    Attributes:
        num_planned: Plans made so far.
    """

    def __init__(
        self,
        retentions: Mapping[FeatureKey, Retention],
        shared: Mapping[FeatureKey, SharedPlanner] | None = None,
        far: Mapping[FeatureKey, IsFar] | None = None,
    ) -> None:
        self._retentions = dict(retentions)
        self._shared = dict(shared or {})
        self._far = dict(far or {})
        self._known: deque[_Known] = deque()
        self._planned: dict[FeatureKey, DistinctIds] | None = None
        self.num_planned = 0

    def push(self, wants: Mapping[FeatureKey, Want]) -> None:
        """Make the ids of one more minibatch known.

        Raises:
            FeatureError: An id lies outside its feature's table.
        """
        known = _Known(wants, {}, {})
        for key in dict.fromkeys([*self._retentions, *self._shared]):
            known.distinct[key] = DistinctIds(wants.get(key), self._far.get(key))
            try:
                self._push(key, known)
            except FeatureError as error:
                raise FeatureError(f"feature {key}: {error}") from error
        self._known.append(known)

    def plan(self) -> Plan:
        """Decide what stays of the minibatch planned last, and whence the next one's rows come."""
        start = time.perf_counter()
        known = self._known.popleft()
        keeps: dict[FeatureKey, Keep] = {}
        if self._planned is not None:
            for key, retention in self._retentions.items():
                keep = retention.settle()
                keeps[key] = Keep(self._planned[key].positions(keep.positions), keep.slots)
        with ExitStack() as held:
            for shared in sorted(self._shared.values(), key=lambda shared: shared.place):
                held.enter_context(shared.hold())
            features = {
                key: FeaturePlan(self._fetch(key, known), keeps.get(key)) for key in known.wants
            }
        for key in keeps.keys() - features.keys():  # wanted by the last minibatch, not by this one
            features[key] = FeaturePlan(Fetch(0), keeps[key])
        batch, self._planned = self.num_planned, known.distinct
        self.num_planned += 1
        return Plan(batch, features, time.perf_counter() - start)

    def _fetch(self, key: FeatureKey, known: _Known) -> Fetch:
        num_rows = known.wants[key].num_rows
        if (distinct := known.distinct.get(key)) is None:
            return Fetch(num_rows)
        rest = known.rest.get(key)
        slots = -np.ones(num_rows, np.int32)
        if (retention := self._retentions.get(key)) is not None:
            hits = retention.hits()
            if rest is not None:
                hits[rest] = -1
            slots = distinct.spread(hits)
        is_home = slots < 0
        share = None
        if key in self._shared:
            number, lookup = self._shared[key].plan()
            lookup = lookup if rest is None else lookup.spread(rest, len(distinct.ids))
            shared = distinct.spread(lookup.slots)
            is_home &= shared < 0
            share = _share(number, lookup, shared, distinct)
        cached = np.flatnonzero(slots >= 0)
        return Fetch(
            num_rows,
            home_positions=torch.from_numpy(np.flatnonzero(is_home)),
            cached_positions=torch.from_numpy(cached),
            cached_slots=torch.from_numpy(slots.take(cached).astype(np.int64)),
            share=share,
        )

    def _push(self, key: FeatureKey, known: _Known) -> None:
        distinct = known.distinct[key]
        is_promised = None
        if (retention := self._retentions.get(key)) is not None:
            try:
                is_promised = retention.push(distinct.ids)
            except PlanError:
                # The sampler's node ids are distinct; a user's own stage may repeat some.
                distinct.merge()
                is_promised = retention.push(distinct.ids)
        if key not in self._shared or key not in known.wants:
            return
        ids = distinct.ids
        if is_promised is not None:
            known.rest[key] = np.flatnonzero(~is_promised)
            ids = ids.take(known.rest[key])
        self._shared[key].push(ids)


def _share(number: int, lookup: Lookup, slots: Slots, distinct: DistinctIds) -> Share:
    positions = np.flatnonzero(slots >= 0)
    return Share(
        number,
        torch.from_numpy(positions),
        torch.from_numpy(slots.take(positions).astype(np.int64)),
        lookup.read_after,
        torch.from_numpy(distinct.positions(lookup.fill_positions)),
        torch.from_numpy(lookup.fill_slots),
        lookup.fill_after_landings,
        lookup.fill_after_readings,
    )
