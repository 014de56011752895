"""One iteration of a loader: which settings, tables and caches it uses, and how far it is.

The Planner and the Syncer bind to one session at ``iter()``. The Syncer drives it::

    minibatch n+1 planned ──begin──▶ Flight ──(moves in the background)──▶ finish ──▶ rows
                                       │
           its keep part writes rows of n to slots first, so finish(n) waits for that too
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from featsync.clock import StepClock
from featsync.counts import FeatureStats
from featsync.dynamic_reads import DynamicReads
from featsync.errors import ConfigError, PeerError
from featsync.fetching import cache_moves, home_moves, shared_moves
from featsync.flights import Flight, Mover, Rows
from featsync.host_cache.cache import HostCache
from featsync.move import Call, Gather, Move
from featsync.partitioned_table import PartitionedTable
from featsync.plan import FeatureKey, FeaturePlan, Fetch, Plan, Want
from featsync.remote_rows import Delivery, RemoteRows
from featsync.residency import Residency
from featsync.table import DynamicTable, ForeignTable, Table
from featsync.unchanged import Unchanged
from featsync.window import IsFar, PlanWindow
from featsync.workers import Ticket, Worker


class Session:
    """One iteration; used by the thread that iterates.

    Args:
        tables: Home of every feature that the loader delivers.
        residencies: Caches that may be used; those that nobody else drives are driven from here.
        mover: Worker, memory and counts of the loader.
        remote: Brings rows of other ranks, for partitioned features; ``None`` if there are none.
        shared: Caches of partitioned features that the ranks of this machine share; used as
            ``residencies`` are.
        far: For partitioned features which rows are worth caching.
        dynamic: Reads features whose rows change; ``None`` if there are none.

    Raises:
        ConfigError: A feature needs a gradient.
        PeerError: Another rank is in the way of beginning.
    """

    def __init__(
        self,
        tables: Mapping[FeatureKey, Table],
        residencies: Mapping[FeatureKey, Residency],
        mover: Mover,
        remote: RemoteRows | None = None,
        shared: Mapping[FeatureKey, HostCache] | None = None,
        far: Mapping[FeatureKey, IsFar] | None = None,
        dynamic: DynamicReads | None = None,
    ) -> None:
        self._unchanged = Unchanged(tables)
        self.clock = StepClock()
        self._tables, self._mover = tables, mover
        self._residencies = {
            key: residency
            for key, residency in residencies.items()
            if residency.drive(self.clock.is_running, self._unchanged.versions[key])
        }
        self._remote, self._dynamic = remote, dynamic
        self._shared: dict[FeatureKey, HostCache] = {}
        try:
            for key, cache in (shared or {}).items():
                if cache.begin(self.clock.is_running, partial(self._watch, key)):
                    self._shared[key] = cache
            if dynamic is not None:
                dynamic.open(self.clock.is_running)
        except BaseException:  # nobody closes a session that never was
            self._let_go(is_clean=True)  # nothing was planned: slots hold what they should
            raise
        retentions = {key: residency.retention for key, residency in self._residencies.items()}
        self.window = PlanWindow(retentions, self._shared, far)
        self._num_begun = self._num_pushed = 0
        self._has_failed = False
        self._announced: deque[Ticket] = deque()

    @property
    def is_dynamic(self) -> bool:
        """Whether some of its features' rows change."""
        return self._dynamic is not None

    @property
    def step(self) -> object:
        """The step that the minibatch delivered last began; another object for each."""
        return None if self._dynamic is None else self._dynamic.step

    def ask(self) -> None:
        """The next minibatch is asked for: the step of the last one is over."""
        if self._dynamic is not None:
            self._dynamic.ask()

    def push(self, wants: Mapping[FeatureKey, Want]) -> None:
        """Make the ids of one more minibatch known, to the plans and to the ranks that hold rows.

        Raises:
            FeatureError: An id lies outside its feature's table.
        """
        self.window.push(wants)
        if self._remote is not None and self._remote.keys:
            announce = partial(self._remote.announce, self._num_pushed, wants)
            self._announced.append(
                self._mover.caller.submit([Call("ids", announce)], is_watched=True)
            )
        self._num_pushed += 1

    def begin(self, plan: Plan, wants: Mapping[FeatureKey, Want], last: Flight | None) -> Flight:
        """Start carrying out a plan and return.

        Args:
            plan: Fetch for this minibatch, keep of the last.
            wants: What this minibatch wants.
            last: The flight of the minibatch before, not finished yet.

        Raises:
            ConfigError: The plan is not the next one.
        """
        if plan.batch != self._num_begun:
            raise ConfigError(
                f"sync_feature got plan {plan.batch} where plan {self._num_begun} was due: a stage "
                f"between plan_feature and sync_feature drops or reorders minibatches. Put that "
                f"stage before plan_feature or after sync_feature."
            )
        flight = Flight(wants)
        if last is not None:
            last.tickets += self._keep(plan, last)
        moves: list[Move] = []
        for key, want in wants.items():
            moves += self._fetch_moves(key, want, plan.features[key], flight)
        if moves:
            flight.tickets.append(self._mover.worker.submit(moves))
        if self._dynamic is not None:
            self._dynamic.begin(flight, is_next=last is None)
        sent = self._begin_remote(plan, flight)
        for key, part in plan.features.items():
            self._count(key).count(part, sent.get(key, 0))
        self._mover.stats.plan_s += plan.seconds
        self._num_begun += 1
        return flight

    def finish(self, flight: Flight) -> Mapping[FeatureKey, Rows]:
        """Block until the rows are there, and hand them over.

        Returns:
            Per feature one ``(num_rows, *row_shape)`` tensor for each of the want's ids. They are
            the caller's: their memory returns to the pool when nothing refers to it any more.

        Raises:
            FeatureError: An id outside a table.
            FeatureChangedError: A static feature was written while its rows were read ahead.
            PeerError: The worker is gone, or took too long.
        """
        stats = self._mover.stats
        start = time.perf_counter()
        if self._remote is not None:
            self._remote.check()
        if self._dynamic is not None:
            self._dynamic.arrive()
        flight.wait()
        if self._dynamic is not None:
            self._dynamic.deliver(flight)
        stats.wait_s += time.perf_counter() - start
        stats.transfer_s += sum(ticket.seconds for ticket in flight.tickets)
        stats.minibatches += 1
        self._unchanged.check(flight.wants)
        self._mover.device.hand_over([tensor for rows in flight.rows.values() for tensor in rows])
        self.clock.deliver()
        return flight.rows

    def fail(self, error: Exception) -> None:
        """Tell the ranks that share features with this one that the iteration failed."""
        self._has_failed = True
        if self._dynamic is not None:
            self._dynamic.fail()
        if self._remote is not None and not isinstance(error, PeerError):
            self._remote.fail(error)

    def close(self) -> None:
        """End the iteration: caches are free to be driven by another. Waits for nothing."""
        # What plan n keeps of n - 1 is in its slots if n was begun and n - 1 delivered. That is not
        # so if a minibatch failed, or a stage between Planner and Syncer.
        num_carried_out = min(self._num_begun, self.clock.delivered + 1)
        if self.clock.is_running() and num_carried_out < self.window.num_planned:
            for residency in self._residencies.values():
                residency.distrust()
        if self.clock.is_running():
            if self._dynamic is not None:
                self._dynamic.end()
            self._let_go(self._num_begun == self.window.num_planned and not self._has_failed)

    def _let_go(self, is_clean: bool) -> None:
        for cache in self._shared.values():
            cache.end(is_clean)
        if self._remote is not None:
            self._remote.close()
        self.clock.stop()

    def _count(self, key: FeatureKey) -> FeatureStats:
        return self._mover.stats.features[key]

    def _keep(self, plan: Plan, last: Flight) -> list[Ticket]:
        """Start writing rows to slots, each feature's by whoever brings and reads them."""
        moves: dict[Worker, list[Move]] = {}
        for key, part in plan.features.items():
            if part.keep is None or len(part.keep.positions) == 0:
                continue
            is_split = isinstance(self._tables[key], PartitionedTable)
            worker = self._mover.caller if is_split else self._mover.worker
            moves.setdefault(worker, []).append(
                Gather(
                    str(key),
                    source=last.whole[key],
                    rows=torch.from_numpy(part.keep.positions),
                    target=self._residencies[key].slots,
                    positions=torch.from_numpy(part.keep.slots).long(),
                )
            )
        return [worker.submit(keeps) for worker, keeps in moves.items()]

    def _fetch_moves(
        self, key: FeatureKey, want: Want, part: FeaturePlan, flight: Flight
    ) -> Sequence[Move]:
        """Make memory for one feature's rows, and the moves that fill it, if it is not split."""
        table = self._tables[key]
        if isinstance(table, ForeignTable):
            return [Call(str(key), _reader(table, want, flight, self._mover.device.torch_device))]
        kind = table.kind
        whole = self._mover.empty(key, (want.num_rows, *kind.shape), kind.dtype)
        flight.whole[key] = whole
        flight.rows[key] = torch.split(whole, [len(ids) for ids in want.ids])
        if isinstance(table, PartitionedTable | DynamicTable):
            return []
        home = home_moves(key, table.tensor, want, part.fetch, whole)
        return [*home, *self._cache_moves(key, part.fetch, whole)]

    def _cache_moves(self, key: FeatureKey, fetch: Fetch, whole: torch.Tensor) -> Sequence[Move]:
        residency = self._residencies.get(key)
        return [] if residency is None else cache_moves(key, residency.slots, fetch, whole)

    def _begin_remote(self, plan: Plan, flight: Flight) -> Mapping[FeatureKey, int]:
        """Start bringing the rows that have to be split by rank; how many others send."""
        if self._remote is None or not self._remote.keys:
            return {}
        self._announced.popleft().wait()
        deliveries = {
            key: Delivery(plan.features[key].fetch, flight.whole[key])
            for key in flight.wants
            if key in self._remote.keys
        }
        sent = self._remote.num_of_others(plan.batch, deliveries)
        fetches = self._remote.fetch(plan.batch, deliveries)
        shared = [
            shared_moves(key, self._shared[key], fetch.share, whole)
            for key, (fetch, whole) in deliveries.items()
            if fetch.share is not None
        ]
        moves = [
            *fetches.first,
            *(
                m
                for key, (f, whole) in deliveries.items()
                for m in self._cache_moves(key, f, whole)
            ),
            *(move for moves in shared for move in moves.read),
            *fetches.last,
            *(move for moves in shared for move in moves.fill),
        ]
        flight.tickets.append(self._mover.caller.submit(moves, is_watched=True))
        if shared:
            self._mover.caller.carry_out()
        return sent

    def _watch(self, key: FeatureKey, rank: int) -> Callable[[], None]:
        """Begin to wait for a rank of this machine."""
        table = self._tables[key]
        if self._remote is None or not isinstance(table, PartitionedTable):
            raise ValueError(f"{key} lies in no other rank")
        ranks = table.parts.ranks_of_host
        return self._remote.watch(table, ranks[rank])


def _reader(
    table: ForeignTable, want: Want, flight: Flight, device: torch.device
) -> Callable[[], None]:
    def read() -> None:
        flight.rows[table.key] = tuple(table.read(ids).to(device) for ids in want.ids)

    return read
