"""Counters in shared memory, between processes: they meet, and some of them are killed."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from featsync import futex
from featsync.errors import PeerError
from featsync.segment import Segment
from featsync.signals import Signals
from support.processes import assert_ends_well, other_process

LIMIT_S = 30.0
NEVER_S = 600.0
ROWS = 512


def meet_often(handle, rank, num_ranks, num_rounds):
    """Write own rows, say so, wait for the others and look at theirs; before the next, say that."""
    futex.SLICE_S = NEVER_S
    memory = Segment.open(handle).array
    signals = Signals(memory, 2 * num_ranks)
    rows = memory[Signals.num_bytes(2 * num_ranks) :].view(np.int64).reshape(num_ranks, ROWS)
    for step in range(1, num_rounds + 1):
        rows[rank] = step
        signals.advance(rank, step)
        for peer in range(num_ranks):
            assert signals.wait(peer, step, NEVER_S), f"rank {rank}: {peer} not at {step}"
        assert (rows == step).all(), f"rank {rank} saw old rows in step {step}"
        signals.advance(num_ranks + rank, step)
        for peer in range(num_ranks):
            assert signals.wait(num_ranks + peer, step, NEVER_S), f"rank {rank}: {peer} lost"


@pytest.mark.parametrize(("num_ranks", "num_rounds"), [(2, 3000), (3, 700)])
def test_processes_meet_thousands_of_times_and_see_what_was_written(num_ranks, num_rounds):
    segment = Segment.create(Signals.num_bytes(2 * num_ranks) + num_ranks * ROWS * 8)

    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                other_process(meet_often, segment.handle, rank, num_ranks, num_rounds)
            )
            for rank in range(num_ranks)
        ]
        for process in ranks:
            assert_ends_well(process, 120.0)


def advance_and_stay(handle):
    signals = Signals(Segment.open(handle).array, 2)
    signals.advance(0, 1)
    signals.wait(1, 1, LIMIT_S)


def test_a_killed_owner_leaves_its_counter_and_the_wait_ends_at_its_limit_or_by_the_check(
    monkeypatch,
):
    monkeypatch.setattr(futex, "SLICE_S", 0.005)
    segment = Segment.create(Signals.num_bytes(2))
    signals = Signals(Segment.open(segment.handle, writable=False).array, 2)

    with other_process(advance_and_stay, segment.handle) as owner:
        assert signals.wait(0, 1, LIMIT_S)
        owner.kill()

        def check():
            if not owner.is_alive():
                raise PeerError("rank 0 has ended", "rank 0")

        with pytest.raises(PeerError, match="rank 0 has ended"):
            signals.wait(0, 2, LIMIT_S, check)
        assert not signals.wait(0, 2, 0.05)
        assert signals.value(0) == 1
