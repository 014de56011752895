"""Carries out programs of reads and writes on clocks, as a session and a loop do; needs no DGL."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
import torch

from featsync.dynamic.clock import FeatureClock
from featsync.dynamic.iteration import Iteration
from featsync.dynamic.reading import EarlyRead
from support.dynamic_programs import Program, sequential
from support.tensors import same_bits


def run_program(
    clock: FeatureClock, program: Program, rank: int, staleness: int, seed: int = 0
) -> list[int]:
    """Iterate once over what a rank reads and write what it writes; check all that is delivered.

    What a commit leaves for later is merged before the next early read, or by whoever needs it.
    The early read of a minibatch begins while the one before is used and goes on while ranks merge:
    half of its rows are read before the step is closed, half after.

    Returns:
        How many steps each delivered minibatch lacked.
    """
    _, tables = sequential(program)
    pauses = random.Random(seed * 31 + rank)
    alive = [True]
    iteration = Iteration(clock, staleness, lambda: alive[0], trains=True)
    wants, calls = program.wants[rank], program.calls[rank]
    lags = []
    read: _Here | _Apart | None = None
    for step, ids in enumerate(wants):
        if step == 0:
            read = _begin(clock, iteration, ids)
        out = torch.empty((len(ids), *clock.kind.shape), dtype=clock.kind.dtype)
        iteration.ask()
        _pause(pauses)
        if read is not None:
            out = read.arrive(pauses.random() < 0.7)
            assert same_bits(out, tables[step][ids]), f"rank {rank}, step {step}"
            lags.append(0)
        else:
            own = iteration.step - (1 if step else 0)
            seen = iteration.read_whole(ids, out, own)
            lags.append(iteration.lag_of(seen))
            allowed = tables[max(0, step - staleness) : step + 1]
            assert any(same_bits(out, table[ids]) for table in allowed), f"rank {rank}, {step}"
            iteration.arrive()
        iteration.deliver(object())
        if staleness == 0 and pauses.random() < 0.3:
            assert same_bits(clock.read(), tables[step])
        if step + 1 < len(wants):
            read = _begin(clock, iteration, wants[step + 1])
        else:
            clock.commits.merge_later()
        for rows, values in calls[step]:
            _pause(pauses)
            clock.update(values, rows)
    iteration.end()
    alive[0] = False
    return lags


def _begin(clock: FeatureClock, iteration: Iteration, ids: torch.Tensor) -> _Here | _Apart | None:
    if not iteration.reads_early:
        return None
    return (_Here if clock.rows.homes is None else _Apart)(clock, iteration, ids)


class _Here:
    """An early read of rows that all lie on this machine."""

    def __init__(self, clock: FeatureClock, iteration: Iteration, ids: torch.Tensor) -> None:
        self._clock, self._iteration, self._ids = clock, iteration, ids
        iteration.begin_early(ids.numpy())
        clock.commits.merge_later()
        clock.commits.advance(iteration.step)
        self._out = clock.table[ids]

    def arrive(self, is_later_left: bool) -> torch.Tensor:
        table, ids, out = self._clock.table, self._ids, self._out
        out[len(ids) // 2 :] = table[ids[len(ids) // 2 :]]
        self._iteration.arrive(is_later_left)
        written = self._iteration.rows_to_patch()
        again = np.arange(len(ids)) if written is None else np.flatnonzero(np.isin(ids, written))
        out[again] = table[ids[again]]
        return out


class _Apart:
    """An early read of rows that lie on several machines."""

    def __init__(self, clock: FeatureClock, iteration: Iteration, ids: torch.Tensor) -> None:
        self._clock, self._iteration = clock, iteration
        self._out = torch.empty((len(ids), *clock.kind.shape), dtype=clock.kind.dtype)
        self._early = EarlyRead(clock.rows.part, clock.rows.homes, self._out)
        self._ids = ids
        iteration.begin_early(ids.numpy())
        self._step = iteration.step
        self._is_asked = False
        if iteration.step % 3:
            self._ask()

    def _ask(self) -> None:
        self._is_asked = True
        self._early.ask("x", [self._ids], self._step)
        self._clock.commits.merge_later()
        self._clock.commits.advance(self._step)
        self._early.land()

    def arrive(self, is_later_left: bool) -> torch.Tensor:
        if not self._is_asked:  # as a worker that is late
            self._ask()
        self._early.ask_patches(self._iteration.step)
        self._iteration.arrive(is_later_left)
        if not self._early.is_patched:
            self._clock.commits.merge_later()
        self._early.patch(self._iteration.rows_to_patch())
        return self._out


def _pause(pauses: random.Random) -> None:
    if pauses.random() < 0.3:
        time.sleep(pauses.random() * 0.002)


def ends(clocks: Sequence[FeatureClock], program: Program) -> None:
    """Check that the table is what the program leaves."""
    _, tables = sequential(program)
    for clock in clocks:
        assert same_bits(clock.read(), tables[-1])
