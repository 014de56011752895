"""Rows that change on several machines, pretended in one process, as the sequential program."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featsync.dynamic.board import AREAS
from featsync.dynamic.iteration import Iteration
from featsync.dynamic.merge import MERGES
from featsync.dynamic.reading import EarlyRead
from featsync.errors import PlanError
from support.clock_programs import ends, run_program
from support.dynamic_programs import random_program
from support.local_clocks import local_clocks, on_threads
from support.tensors import same_bits


def driver(clock, **options):
    return Iteration(clock, 0, lambda: True, **options)


SEEDS = st.integers(0, 10_000)
# The machine of each rank.
HOSTS = st.sampled_from([[0, 1], [0, 0, 1], [0, 1, 0], [0, 1, 2], [0, 0, 1, 1], [0, 1, 1, 0]])


def clocks_of(program, hosts, seed, **options):
    owners = None
    if seed % 2:
        random = torch.Generator().manual_seed(seed)
        owners = torch.randint(0, len(hosts), (len(program.start),), generator=random)
    return local_clocks(
        len(hosts), program.start, program.merge, hosts=hosts, owners=owners, **options
    )


@settings(max_examples=12)
@pytest.mark.parametrize("merge", MERGES)
@given(seed=SEEDS, hosts=HOSTS)
def test_exact_reads_are_those_of_the_sequential_program(merge, seed, hosts):
    program = random_program(seed, len(hosts), merge)
    clocks = clocks_of(program, hosts, seed)
    on_threads(lambda rank: run_program(clocks[rank], program, rank, 0, seed), len(hosts))
    ends(clocks, program)


@settings(max_examples=12)
@given(seed=SEEDS, hosts=HOSTS, staleness=st.integers(1, 3))
def test_stale_reads_show_a_step_that_is_whole_on_all_machines(seed, hosts, staleness):
    program = random_program(seed, len(hosts), "sum", num_steps=7)
    clocks = clocks_of(program, hosts, seed)
    lags = on_threads(
        lambda rank: run_program(clocks[rank], program, rank, staleness, seed), len(hosts)
    )
    ends(clocks, program)
    assert all(0 <= lag <= staleness for of_rank in lags for lag in of_rank)


@settings(max_examples=8)
@given(seed=SEEDS, hosts=HOSTS)
def test_epochs_follow_one_another_however_uneven(seed, hosts):
    first = random_program(seed, len(hosts), "mean")
    clocks = clocks_of(first, hosts, seed)
    programs = [first]
    for epoch in range(3):
        on_threads(lambda rank: run_program(clocks[rank], programs[-1], rank, 0, seed), len(hosts))
        ends(clocks, programs[-1])
        after = random_program(seed + epoch + 1, len(hosts), "mean")
        programs.append(dataclasses.replace(after, start=clocks[0].read()))


def test_a_machine_whose_ranks_are_done_still_takes_what_others_write():
    """Rank 0 writes rows of machine 1 in more steps than may wait there, and reads none of them."""
    steps = 3 * AREAS
    clocks = local_clocks(2, torch.zeros(6, 1), "sum", hosts=[0, 1])
    driver(clocks[1], trains=True).end()
    iteration = driver(clocks[0], trains=True)
    for step in range(steps):
        iteration.ask()
        iteration.arrive()
        iteration.deliver(object())
        clocks[0].update(torch.full((1, 1), step + 1.0), torch.tensor([5]))
    iteration.ask()
    iteration.end()
    clocks[0].settle()
    assert clocks[0].read().flatten().tolist() == [0, 0, 0, 0, 0, steps]


def test_a_loop_that_is_left_waits_for_no_rows_and_keeps_none():
    clocks = local_clocks(2, torch.zeros(6, 1), "sum", hosts=[0, 1])
    iteration = driver(clocks[0], trains=True)
    homes, out = clocks[0].rows.homes, torch.empty(6, 1)
    early = EarlyRead(clocks[0].rows.part, homes, out)
    iteration.begin_early(np.arange(6))
    early.ask("x", [torch.arange(6)], iteration.step)
    early.land()
    iteration.deliver(object())
    again = EarlyRead(clocks[0].rows.part, homes, out)
    iteration.begin_early(np.arange(6))
    again.ask("x", [torch.arange(6)], iteration.step)
    again.forget()
    iteration.end()
    driver(clocks[1], trains=True).end()
    with pytest.raises(PlanError, match="a loop was left"):
        again.land()
    early.forget()
    (away,) = homes.away.values()
    clocks[0].read()
    assert away.num_awaited == 0


def test_updates_outside_of_loops_are_seen_at_once_by_all_machines():
    clocks = local_clocks(3, torch.zeros(6, 1), "sum", hosts=[0, 1, 2])
    clocks[0].update(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([3, 3, 5]))
    clocks[1].update(torch.tensor([[5.0]]), torch.tensor([0]))
    for clock in clocks:
        assert clock.read().flatten().tolist() == [5, 0, 0, 2, 0, 4]
        assert same_bits(clock.read(torch.tensor([5, 0, 5])), torch.tensor([[4.0], [5.0], [4.0]]))
