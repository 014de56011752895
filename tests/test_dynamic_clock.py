"""Ranks that read early and write, against the program that does one thing after the other."""

from __future__ import annotations

import dataclasses
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featsync.dynamic.iteration import Iteration
from featsync.dynamic.merge import MERGES
from featsync.errors import ConfigError, PeerError, PeerTimeoutError
from support.clock_programs import ends, run_program
from support.dynamic_programs import random_program, sequential
from support.local_clocks import local_clocks, on_threads
from support.tensors import same_bits

SEEDS = st.integers(0, 10_000)


@settings(max_examples=12)
@pytest.mark.parametrize("merge", MERGES)
@given(seed=SEEDS, num_ranks=st.integers(1, 4))
def test_exact_reads_are_those_of_the_sequential_program(merge, seed, num_ranks):
    program = random_program(seed, num_ranks, merge)
    clocks = local_clocks(num_ranks, program.start, merge)
    on_threads(lambda rank: run_program(clocks[rank], program, rank, 0, seed), num_ranks)
    ends(clocks, program)


@settings(max_examples=12)
@given(seed=SEEDS, num_ranks=st.integers(1, 4), staleness=st.integers(1, 3))
def test_stale_reads_show_a_whole_step_within_the_bound(seed, num_ranks, staleness):
    program = random_program(seed, num_ranks, "sum", num_steps=7)
    clocks = local_clocks(num_ranks, program.start, "sum")
    lags = on_threads(
        lambda rank: run_program(clocks[rank], program, rank, staleness, seed), num_ranks
    )
    ends(clocks, program)
    assert all(0 <= lag <= staleness for of_rank in lags for lag in of_rank)


@settings(max_examples=8)
@given(seed=SEEDS, num_ranks=st.integers(1, 3))
def test_epochs_follow_one_another_however_uneven(seed, num_ranks):
    first = random_program(seed, num_ranks, "mean")
    clocks = local_clocks(num_ranks, first.start, "mean")
    programs = [first]
    for epoch in range(3):
        on_threads(lambda rank: run_program(clocks[rank], programs[-1], rank, 0, seed), num_ranks)
        ends(clocks, programs[-1])
        after = random_program(seed + epoch + 1, num_ranks, "mean")
        programs.append(dataclasses.replace(after, start=clocks[0].read()))


def test_epochs_need_not_begin_at_the_same_time():
    """One rank is through its epoch, and waits for the end of the other's before it goes on."""
    programs = [random_program(seed, 2, "sum", num_steps=6) for seed in (5, 6)]
    start = programs[0].start
    clocks = local_clocks(2, start, "sum")
    between = sequential(programs[0])[1][-1]
    second = dataclasses.replace(programs[1], start=between)

    def body(rank):
        run_program(clocks[rank], programs[0], rank, 0)
        run_program(clocks[rank], second, rank, 0)

    on_threads(body, 2)
    ends(clocks, second)


def driver(clock, **options):
    return Iteration(clock, 0, lambda: True, **options)


def test_reading_alone_moves_nothing_and_waits_for_nobody():
    clocks = local_clocks(2, torch.zeros(4, 1), "last", timeout=0.2)
    iteration = driver(clocks[0])
    for _ in range(3):
        iteration.ask()
        iteration.arrive()
        iteration.deliver(object())
    iteration.end()
    assert clocks[0].board.closed(0) == clocks[0].board.committed == 0


def test_who_trains_waits_for_a_rank_that_does_not_come_and_names_it():
    clocks = local_clocks(2, torch.zeros(4, 1), "last", timeout=0.05)
    iteration = driver(clocks[0])
    iteration.deliver(object())
    clocks[0].update(torch.ones(4, 1))
    iteration.ask()
    with pytest.raises(PeerTimeoutError, match=r"1\.5 s for rank 1 to end its step"):
        iteration.arrive()
    assert clocks[1].read().sum() == 0


def test_a_rank_without_minibatches_holds_nobody_up_though_it_never_said_so():
    clocks = local_clocks(2, torch.zeros(4, 1), "last", timeout=5.0)
    nothing = driver(clocks[1])
    nothing.ask()
    nothing.end()
    iteration = driver(clocks[0])
    iteration.deliver(object())
    clocks[0].update(torch.ones(4, 1))
    iteration.ask()
    iteration.arrive()
    assert clocks[1].read().sum() == 4
    iteration.end()
    # Both go on to the same epoch.
    clocks[1].begin_epoch()
    assert clocks[0].epoch == clocks[1].epoch == 1


def test_the_first_update_has_to_come_in_the_first_step():
    clocks = local_clocks(2, torch.zeros(4, 1), "last", timeout=0.2)
    iteration = driver(clocks[0])
    for _ in range(2):
        iteration.ask()
        iteration.arrive()
        iteration.deliver(object())
    with pytest.raises(ConfigError, match=r"first update.*came in step 1.*one of no rows"):
        clocks[0].update(torch.ones(4, 1))
    assert clocks[0].read().sum() == 0


def test_updates_outside_of_loops_are_seen_at_once_and_are_steps_of_their_own():
    clocks = local_clocks(2, torch.zeros(4, 1), "sum")
    clocks[0].update(torch.tensor([[1.0], [2.0]]), torch.tensor([3, 3]))
    clocks[1].update(torch.tensor([[5.0]]), torch.tensor([0]))
    for clock in clocks:
        assert clock.read().flatten().tolist() == [5, 0, 0, 2]


def test_commit_ends_a_step_and_begins_another():
    clocks = local_clocks(2, torch.zeros(3, 1), "sum")

    def body(rank):
        iteration = driver(clocks[rank])
        iteration.deliver(object())
        iteration.take_part()
        iteration.begin_early(np.array([1]))
        for _ in range(4):
            before = clocks[rank].read()
            clocks[rank].update(before + 1, minibatch=None)
            clocks[rank].commit()
            assert same_bits(clocks[rank].read(), before + 2)
        clocks[rank].update(clocks[rank].read() + 1)
        iteration.ask()
        iteration.arrive(is_later_left=True)
        # It was wanted for another step than this has become, and is there all the same.
        assert clocks[rank].table[1] == 10
        # All that was written since the early read began is known.
        assert set(iteration.rows_to_patch().tolist()) == {0, 1, 2}
        iteration.deliver(object())
        iteration.end()

    on_threads(body, 2)
    assert clocks[0].read().flatten().tolist() == [10, 10, 10]


def test_a_rank_without_the_optimizer_that_another_has_is_told():
    clocks = local_clocks(2, torch.zeros(4, 1), "last")
    clocks[0].learn("an optimizer", MERGES["sum"])
    driver(clocks[1]).deliver(object())
    with pytest.raises(ConfigError, match=r"another rank trains.*this one has none"):
        clocks[1].update(torch.ones(4, 1))
    assert clocks[1].read().sum() == 0


def one_step(clock):
    iteration = driver(clock, trains=True)
    iteration.deliver(object())
    clock.update(torch.ones(4, 1))
    iteration.ask()
    return iteration


def test_a_commit_waits_for_reads_that_hold_the_table():
    clocks = local_clocks(2, torch.zeros(4, 1), "last")
    for clock in clocks:
        one_step(clock)
    # As of a read that began before the last rank closed its step.
    signals, begun = clocks[0].board.signals, clocks[0].board.begun_signal(0)
    signals.advance(begun, 1)
    committing = threading.Thread(target=clocks[1].commits.advance, args=(1,), daemon=True)
    committing.start()
    committing.join(0.2)
    assert committing.is_alive()
    assert clocks[1].table.sum() == 0
    signals.advance(clocks[0].board.ended_signal(0), 1)
    committing.join(10)
    assert clocks[1].table.sum() == 4


def test_a_read_waits_for_a_commit_of_which_one_share_is_claimed(monkeypatch):
    clocks = local_clocks(2, torch.zeros(4, 1), "last")
    for clock in clocks:
        one_step(clock)
    may_merge = threading.Event()
    apply = clocks[1].commits.merge.apply

    def wait_and_apply(*arguments):
        may_merge.wait(10)
        apply(*arguments)

    monkeypatch.setattr(clocks[1].commits, "merge", SimpleNamespace(apply=wait_and_apply))
    committing = threading.Thread(target=clocks[1].commits.help, daemon=True)
    committing.start()
    while not clocks[1].board.is_merging(0):
        time.sleep(0.001)
    found = []
    reading = threading.Thread(target=lambda: found.append(clocks[0].read().sum()), daemon=True)
    reading.start()
    reading.join(0.2)
    assert not found
    may_merge.set()
    reading.join(10)
    committing.join(10)
    assert found == [4]


def test_rows_that_nobody_reads_next_are_merged_later_and_before_anything_else():
    clocks = local_clocks(2, torch.zeros(4, 1), "last")
    iterations = [one_step(clock) for clock in clocks]
    for iteration in iterations:
        iteration._expected = 1  # as after an early read that began before the step was closed
    clocks[1].commits.want(np.array([2]), 1)
    on_threads(lambda rank: iterations[rank].arrive(is_later_left=True), 2)
    board = clocks[0].board
    assert (board.ready, board.committed) == (1, 0)
    assert clocks[0].table.flatten().tolist() == [0, 0, 1, 0]
    on_threads(lambda rank: clocks[rank].commits.merge_later(), 2)
    assert board.committed == 1
    assert clocks[0].table.flatten().tolist() == [1, 1, 1, 1]


def test_a_rank_that_fails_while_it_merges_leaves_a_table_that_nobody_may_use(monkeypatch):
    clocks = local_clocks(1, torch.zeros(3, 1), "sum")
    iteration = driver(clocks[0])
    iteration.deliver(object())
    clocks[0].update(torch.ones(3, 1))
    iteration.ask()

    def fail(table, rounds, numbers):
        table[0] = 7
        raise MemoryError

    monkeypatch.setattr(clocks[0].commits.merge, "apply", fail)
    with pytest.raises(MemoryError):
        iteration.arrive()
    for use in (clocks[0].read, lambda: clocks[0].settle()):
        with pytest.raises(PeerError, match="rank 0 failed while it changed rows"):
            use()
