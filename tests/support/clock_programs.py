"""Carries out programs of reads and writes on clocks, as a session and a loop do; needs no DGL."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
import torch

from featsync.dynamic.clock import FeatureClock
from featsync.dynamic.iteration import Iteration
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
    out = torch.empty(0)
    for step, ids in enumerate(wants):
        if step == 0:
            out = _begin(clock, iteration, ids)
        iteration.ask()
        _pause(pauses)
        if staleness == 0:
            out[len(ids) // 2 :] = clock.table[ids[len(ids) // 2 :]]
            iteration.arrive(is_later_left=pauses.random() < 0.7)
            _patch(clock, iteration, ids, out)
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
            out = _begin(clock, iteration, wants[step + 1])
        else:
            clock.commits.merge_later()
        for rows, values in calls[step]:
            _pause(pauses)
            clock.update(values, rows)
    iteration.end()
    alive[0] = False
    return lags


def _begin(clock: FeatureClock, iteration: Iteration, ids: torch.Tensor) -> torch.Tensor:
    if iteration.reads_early:
        iteration.begin_early(ids.numpy())
        clock.commits.merge_later()
        clock.commits.advance(iteration.step)
    return clock.table[ids]


def _patch(clock: FeatureClock, iteration: Iteration, ids: torch.Tensor, out: torch.Tensor) -> None:
    written = iteration.rows_to_patch()
    again = np.arange(len(ids)) if written is None else np.flatnonzero(np.isin(ids, written))
    out[again] = clock.table[ids[again]]


def _pause(pauses: random.Random) -> None:
    if pauses.random() < 0.3:
        time.sleep(pauses.random() * 0.002)


def ends(clocks: Sequence[FeatureClock], program: Program) -> None:
    """Check that the table is what the program leaves."""
    _, tables = sequential(program)
    for clock in clocks:
        assert same_bits(clock.read(), tables[-1])
