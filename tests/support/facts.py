"""One launch of ranks establishes many facts, each reported as a test of its own.

Starting ranks is slow. A fact is a function of a test module, named for what it establishes: it
runs on all ranks of a launch, with their default process group, and raises where it does not hold.

    python -m support.facts MODULE:FACT...      on ranks that torchrun has started
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from support.loader_workers import end_loader_workers
from support.ranks import run_ranks

Fact = Callable[[int], None]


@dataclass(frozen=True)
class Launch:
    """Facts that some ranks establish in one go, when the first of them is asked for.

    Attributes:
        num_ranks: How many ranks.
        facts: In this order; the first that does not hold ends the launch.
        timeout_s: Seconds for all of them.
    """

    num_ranks: int
    facts: Sequence[Fact]
    timeout_s: float = 150

    @cached_property
    def failure(self) -> str | None:
        """How the launch failed, in words; ``None`` if all facts hold."""
        try:
            run_ranks(establish, self.num_ranks, self.facts, timeout_s=self.timeout_s)
        except AssertionError as error:
            return str(error)
        return None

    def check(self, fact: Fact) -> None:
        """Fail unless a fact was established: its launch went well, or failed at a later one."""
        assert_established(self.failure, fact, self.facts)


def assert_established(failure: str | None, fact: Fact, facts: Sequence[Fact]) -> None:
    """Fail unless a launch went well, or failed at a later fact."""
    if failure is None:
        return
    failed = [i for i, one in enumerate(facts) if f"in {one.__name__}\n" in failure]
    if not failed or facts.index(fact) >= failed[0]:
        pytest.fail(failure)


def establish(rank: int, facts: Sequence[Fact]) -> None:
    """Run facts in turn, all ranks each at the same time."""
    for fact in facts:
        dist.barrier()
        fact(rank)
        end_loader_workers()


def name_of(value: Any) -> str:
    """What a launch or a fact is called among the parameters of a test."""
    return str(value.num_ranks) if isinstance(value, Launch) else value.__name__


def establish_under_torchrun(facts: Sequence[Fact], num_ranks: int, timeout_s: float) -> None:
    """Fail unless the facts hold on ranks that torchrun starts, and all of these exit with 0."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [
            *(*command, f"--nproc-per-node={num_ranks}", "-m", "support.facts"),
            *(f"{fact.__module__}:{fact.__name__}" for fact in facts),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ends = sorted(line for line in done.stdout.splitlines() if line.startswith("done"))
    assert ends == [f"done {rank}" for rank in range(num_ranks)], done.stdout


def main(*names: str) -> None:
    """Establish facts on a rank that torchrun has started, say so, and exit at once."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    pairs = [name.split(":") for name in names]
    establish(rank, [getattr(importlib.import_module(module), fact) for module, fact in pairs])
    # In one write, and on a line of its own: all ranks, and gloo, say what they say to one pipe.
    os.write(sys.stdout.fileno(), f"\ndone {rank}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
