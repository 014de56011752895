"""Reads rows that change for one iteration of a loader: early, and again what was written since.

::

    asked for n      ask ─▶ step n-1 is closed
                     arrive ─▶ commit of what n reads ─▶ patch what was read early ─▶ deliver n
    beside step n    the rest of the commit ─▶ early reads of n+1
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.device import CpuDevice
from featsync.dynamic.clock import FeatureClock
from featsync.dynamic.iteration import Iteration
from featsync.dynamic.positions import Position
from featsync.errors import FeatsyncError
from featsync.fetching import home_moves
from featsync.flights import Flight, Mover
from featsync.move import Call, Gather, Move
from featsync.plan import FeatureKey, Fetch, Want
from featsync.table import DynamicTable

__all__ = ["DynamicReads"]

_Rows = NDArray[np.int64]
_NO_IDS = np.empty(0, np.int64)


class _Step:
    """Stands for a step; the minibatch that it delivered carries it."""


class DynamicReads:
    """The features of a loader whose rows change; used by the thread that iterates.

    Args:
        tables: Their homes.
        staleness: Steps that rows may lag behind, or ``"any"``.
        mover: Worker, memory and counts of the loader.
    """

    def __init__(
        self, tables: Mapping[FeatureKey, DynamicTable], staleness: int | str, mover: Mover
    ) -> None:
        self._tables, self._staleness, self._mover = dict(tables), staleness, mover
        self._iterations: dict[FeatureClock, Iteration] = {}
        self._seen: dict[FeatureKey, Position] = {}
        self._next: Flight | None = None
        self._is_written = {table.clock: np.zeros(0, np.bool_) for table in tables.values()}
        self._cpu = CpuDevice()
        self.step: object = None
        self._steps: weakref.WeakSet[_Step] = weakref.WeakSet()
        # What the next step does not want can be merged beside it, by whoever runs ahead of it.
        self._leaves_later = mover.worker.runs_ahead and mover.worker.runs_calls

    def open(self, is_alive: Callable[[], bool]) -> None:
        """Begin to iterate.

        Args:
            is_alive: Whether the loader still does; safe to ask anywhere.

        Raises:
            PeerError: Another rank has not ended the epoch before.
        """
        for clock in dict.fromkeys(table.clock for table in self._tables.values()):
            trains = clock in self._mover.trained
            self._iterations[clock] = Iteration(clock, self._staleness, is_alive, trains)

    def ask(self) -> None:
        """The next minibatch is asked for: the step under way is over, of all features first."""
        for iteration in self._iterations.values():
            iteration.ask()

    def begin(self, flight: Flight, is_next: bool) -> None:
        """Read a minibatch's rows as soon as they can be.

        Args:
            flight: Its rows.
            is_next: Whether no other minibatch is delivered before.
        """
        if is_next:
            self._start(flight)
        else:
            self._next = flight

    def arrive(self) -> None:
        """Block until the tables are as the next minibatch is to see them.

        Raises:
            PeerError: A rank that has to end its step has ended.
        """
        for iteration in self._iterations.values():
            iteration.arrive(self._leaves_later)

    def deliver(self, flight: Flight) -> None:
        """Read again what was written since, and begin with the minibatch after.

        Args:
            flight: Its early reads are done.
        """
        self.step = step = _Step()
        self._steps.add(step)
        for key in flight.wants:
            if key in self._tables:
                self._settle(key, flight)
        for iteration in self._iterations.values():
            iteration.deliver(self.step)
        following, self._next = self._next, None
        if following is not None:
            self._start(following)
        elif self._leaves_later:
            self._mover.caller.submit(self._later_moves(), is_watched=True)

    def fail(self) -> None:
        """The iteration failed: others wait for what was to be merged beside the next step."""
        for clock in self._iterations:
            # The error that the user is to see is another one.
            with suppress(FeatsyncError):
                clock.commits.merge_later()

    def end(self) -> None:
        """The iteration is over; safe in a finalizer."""
        for clock, iteration in self._iterations.items():
            if iteration.has_trained:
                self._mover.trained.add(clock)
            if iteration.is_driver:
                clock.last_loop = iteration.reader, self._steps
            iteration.end()
        self.step = None

    def _start(self, flight: Flight) -> None:
        """Have rows read while the minibatch before is used: early, or in a hold."""
        moves: list[Move] = []
        calls = self._later_moves()
        for clock, iteration in self._iterations.items():
            ids = [_ids_of(w) for k, w in flight.wants.items() if k in self._of(clock)]
            if iteration.reads_early:
                iteration.begin_early(np.concatenate([one.numpy() for one in ids] or [_NO_IDS]))
                if self._leaves_later:
                    # Early, but not before all ranks are through with the last commit.
                    calls.append(Call("rows", partial(clock.commits.advance, iteration.step)))
        for key, want in flight.wants.items():
            if (table := self._tables.get(key)) is None:
                continue
            iteration = self._iterations[table.clock]
            if iteration.reads_early:
                whole = flight.whole[key]
                moves += home_moves(key, table.tensor, want, Fetch(want.num_rows), whole)
            else:
                read = partial(self._read_whole, key, iteration, flight, iteration.step)
                calls.append(Call(str(key), read))
        if self._leaves_later:
            calls, moves = [*calls, *moves], []
        if moves:
            flight.tickets.append(self._mover.worker.submit(moves))
        if calls:
            # They wait for other ranks, and watch over these.
            flight.tickets.append(self._mover.caller.submit(calls, is_watched=True))

    def _later_moves(self) -> list[Move]:
        if not self._leaves_later:
            return []
        return [Call("rows", clock.commits.merge_later) for clock in self._iterations]

    def _of(self, clock: FeatureClock) -> list[FeatureKey]:
        return [key for key, table in self._tables.items() if table.clock is clock]

    def _read_whole(
        self, key: FeatureKey, iteration: Iteration, flight: Flight, own: Position
    ) -> None:
        ids = _ids_of(flight.wants[key])
        self._seen[key] = iteration.read_whole(ids, flight.whole[key], own)

    def _settle(self, key: FeatureKey, flight: Flight) -> None:
        table = self._tables[key]
        iteration = self._iterations[table.clock]
        stats = self._mover.stats.features[key]
        if (seen := self._seen.pop(key, None)) is None:
            stats.rows_patched += self._patch(table, flight, iteration.rows_to_patch())
        elif iteration.is_current(seen):
            stats.staleness = max(stats.staleness, iteration.lag_of(seen))
        else:
            stats.rows_patched += self._patch(table, flight, None)
        if table.clock.learner is not None:
            leaves = tuple(rows.detach().requires_grad_() for rows in flight.rows[key])
            flight.rows[key] = leaves
            iteration.leaves += zip(flight.wants[key].ids, leaves, strict=True)

    def _patch(self, table: DynamicTable, flight: Flight, written: _Rows | None) -> int:
        """Read rows again that were written; ``None``: all. Returns how many."""
        ids, whole = _ids_of(flight.wants[table.key]), flight.whole[table.key]
        if written is None:
            with table.clock.commits.hold():
                self._gather(Gather(str(table.key), table.tensor, ids, whole))
            return len(ids)
        if len(written) == 0:
            return 0
        positions = torch.from_numpy(self._hits(table, ids, written))
        self._gather(Gather(str(table.key), table.tensor, ids[positions], whole, positions))
        return len(positions)

    def _gather(self, gather: Gather) -> None:
        if gather.target.device.type == "cpu":
            self._cpu.execute([gather])
        else:
            self._mover.worker.submit([gather]).wait()

    def _hits(self, table: DynamicTable, ids: torch.Tensor, written: _Rows) -> _Rows:
        """Where a minibatch wants rows that were written."""
        mark = self._is_written[table.clock]
        if len(mark) == 0:
            mark = self._is_written[table.clock] = np.zeros(table.num_rows, np.bool_)
        mark[written] = True
        hits = np.flatnonzero(mark.take(ids.numpy()))
        mark[written] = False
        return hits


def _ids_of(want: Want) -> torch.Tensor:
    """All ids of a minibatch, on the CPU."""
    return (want.ids[0] if len(want.ids) == 1 else torch.cat(want.ids)).cpu()
