"""Reads rows that change for one iteration of a loader: early, and again what was written since.

::

    asked for n      ask ─▶ step n-1 is closed
                     arrive ─▶ commit of what n reads ─▶ patch what was read early ─▶ deliver n
    beside step n    the rest of the commit ─▶ early reads of n+1

Rows that other machines hold are asked of them at each of these points.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.device import CpuDevice
from featsync.dynamic.clock import FeatureClock
from featsync.dynamic.iteration import Iteration
from featsync.dynamic.positions import Position
from featsync.dynamic.reading import EarlyRead
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


@dataclass
class _Work:
    """What is done beside a step, in this order.

    Attributes:
        asks: Asks other machines.
        waits: Blocks until rows may be read.
        reads: Blocks until rows are there.
        moves: Reads rows that lie here.
    """

    waits: list[Move]
    asks: list[Move] = field(default_factory=list)
    reads: list[Move] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)


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
        # Of reads in a hold, up to where they show all steps, and how many rows others sent.
        self._seen: dict[FeatureKey, tuple[Position, int]] = {}
        self._next: Flight | None = None
        # Of the flight that is delivered next, rows of which other machines hold some.
        self._apart: dict[FeatureKey, EarlyRead] = {}
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
        for key, early in self._apart.items():
            if early.is_asked:
                early.ask_patches(self._iteration_of(key).step)
        for iteration in self._iterations.values():
            iteration.arrive(self._leaves_later)

    def deliver(self, flight: Flight) -> None:
        """Read again what was written since, and begin with the minibatch after.

        Args:
            flight: Its early reads are done.
        """
        self.step = step = _Step()
        self._steps.add(step)
        for key, early in self._apart.items():
            early.ask_patches(self._iteration_of(key).step)
        if not all(early.is_patched for early in self._apart.values()):
            # While others are waited for. It has to be now: they may wait for these.
            for clock in self._iterations:
                clock.commits.merge_later()
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
        for early in self._apart.values():
            early.forget()
        self.step = None

    def _start(self, flight: Flight) -> None:
        """Have rows read while the minibatch before is used: early, or in a hold."""
        work = _Work(waits=self._later_moves())
        for clock, iteration in self._iterations.items():
            keys = [k for k in flight.wants if k in self._tables and self._tables[k].clock is clock]
            if iteration.reads_early:
                self._start_early(clock, iteration, keys, flight, work)
                continue
            for key in keys:
                read = partial(self._read_whole, key, iteration, flight, iteration.step)
                work.reads.append(Call(str(key), read))
        calls: list[Move] = [*work.asks, *work.waits, *work.reads]
        if self._leaves_later:
            calls += work.moves
        elif work.moves:
            flight.tickets.append(self._mover.worker.submit(work.moves))
        if calls:
            # They wait for other ranks, and watch over these.
            flight.tickets.append(self._mover.caller.submit(calls, is_watched=True))

    def _start_early(
        self,
        clock: FeatureClock,
        iteration: Iteration,
        keys: Sequence[FeatureKey],
        flight: Flight,
        work: _Work,
    ) -> None:
        ids = [_ids_of(flight.wants[key]).numpy() for key in keys]
        iteration.begin_early(np.concatenate(ids or [_NO_IDS]))
        homes, step = clock.rows.homes, iteration.step
        if self._leaves_later or homes is not None:
            # Early, but not before all ranks are through with the last commit.
            work.waits.append(Call("rows", partial(clock.commits.advance, step)))
        for key in keys:
            want, whole = flight.wants[key], flight.whole[key]
            if homes is None:
                fetch = Fetch(want.num_rows)
                work.moves += home_moves(key, self._tables[key].tensor, want, fetch, whole)
                continue
            early = self._apart[key] = EarlyRead(clock.rows.part, homes, whole)
            work.asks.append(Call(str(key), partial(early.ask, str(key), want.ids, step)))
            work.reads.append(Call(str(key), early.land))

    def _later_moves(self) -> list[Move]:
        if not self._leaves_later:
            return []
        return [Call("rows", clock.commits.merge_later) for clock in self._iterations]

    def _iteration_of(self, key: FeatureKey) -> Iteration:
        return self._iterations[self._tables[key].clock]

    def _read_whole(
        self, key: FeatureKey, iteration: Iteration, flight: Flight, own: Position
    ) -> None:
        ids = _ids_of(flight.wants[key])
        homes = self._tables[key].clock.rows.homes
        seen = iteration.read_whole(ids, flight.whole[key], own)
        # Counted by the trainer's thread: on this one, counts could get lost.
        self._seen[key] = seen, 0 if homes is None else homes.num_away(ids)

    def _settle(self, key: FeatureKey, flight: Flight) -> None:
        table, iteration = self._tables[key], self._iteration_of(key)
        stats = self._mover.stats.features[key]
        if (early := self._apart.pop(key, None)) is not None:
            stats.rows_patched += early.patch(iteration.rows_to_patch())
            stats.count_sent(early.num_away)
        elif (found := self._seen.pop(key, None)) is None:
            stats.rows_patched += self._patch(table, flight, iteration.rows_to_patch())
        else:
            seen, num_away = found
            stats.count_sent(num_away)
            if iteration.is_current(seen):
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
            clock = table.clock
            clock.rows.read_whole(ids, {"": whole}, clock.rows.closed)
            return len(ids)
        if len(written) == 0:
            return 0
        places = table.clock.rows.part.where_among(ids.numpy(), written)
        positions = torch.from_numpy(places)
        self._gather(Gather(str(table.key), table.tensor, ids[positions], whole, positions))
        return len(positions)

    def _gather(self, gather: Gather) -> None:
        if gather.target.device.type == "cpu":
            self._cpu.execute([gather])
        else:
            self._mover.worker.submit([gather]).wait()


def _ids_of(want: Want) -> torch.Tensor:
    """All ids of a minibatch, on the CPU."""
    return (want.ids[0] if len(want.ids) == 1 else torch.cat(want.ids)).cpu()
