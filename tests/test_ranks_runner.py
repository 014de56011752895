"""The rank runner reports a rank that raises, dies or hangs, each in its own words."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

from support.ranks import run_ranks


def answer(rank, base):
    return base + rank, dist.get_world_size()


def misbehave(rank, how):
    if rank == 0:
        time.sleep(60)  # ended by the runner
    if how == "raise":
        raise ValueError(f"rank {rank} does not like {how}")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.multirank
def test_results_come_in_the_order_of_ranks():
    assert run_ranks(answer, 2, 10) == [(10, 2), (11, 2)]


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("how", "timeout_s", "text"),
    [
        ("raise", 60, r"rank 1 failed:\n(.|\n)*ValueError: rank 1 does not like raise"),
        ("die", 60, r"ranks died, exit codes \{1: -9\}"),
        ("hang", 6, r"ranks \[0, 1\] still running after 6 s"),
    ],
)
def test_a_rank_that_fails_fails_the_caller(how, timeout_s, text):
    start = time.monotonic()

    with pytest.raises(AssertionError, match=text):
        run_ranks(misbehave, 2, how, timeout_s=timeout_s)

    assert time.monotonic() - start < 40
