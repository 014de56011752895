"""Runs that are killed leave no memory and no process behind, and do not disturb the next ones."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from featsync.device import CpuDevice
from featsync.move import Gather
from featsync.plan import FeatureKey
from featsync.sharing import share_tensors
from featsync.transports import TRANSPORTS
from featsync.workers.process import ProcessWorker
from featsync.world import World
from support.exchange import Reader, tables_of
from support.processes import is_running, wait_until

KEY = FeatureKey("node", None, "feat")


def shared_run(rank, num_steps):
    """A small run with shared tables and a mover process; prints whom to kill."""
    world = World.join(timeout=200)
    table = torch.arange(4000.0).view(1000, 4)
    shared = share_tensors({KEY: table} if rank == 0 else None, world)[KEY]
    worker = ProcessWorker(CpuDevice(), 30.0)
    rows = torch.arange(0, 1000, 3)
    out = torch.from_numpy(worker.allocate(len(rows) * 16)).view(torch.float32).view(-1, 4)
    for step in range(num_steps):
        out.zero_()
        worker.submit([Gather("x", shared.tensor, rows, out)]).wait()
        assert torch.equal(out, table[rows])
        if step == 0:
            sys.stdout.write(f"running {os.getpid()} {worker.pid}\n")
            sys.stdout.flush()
        time.sleep(0.001)
    worker.close()
    world.exchange("end", None)
    return "ended"


def partitioned_run(rank, num_steps):
    """A small run with partitioned tables, read by every transport; prints whom to kill."""
    _, tables = tables_of(rank, 2, "mixed")
    readers = [Reader(tables, transport) for transport in TRANSPORTS]
    for step in range(num_steps):
        for reader in readers:
            reader.announce(step, seed=2 * step + rank)
            reader.fetch(step)
        if step == 0:
            sys.stdout.write(f"running {os.getpid()}\n")
            sys.stdout.flush()
    for reader in readers:
        reader.rows.close()
    return "ended"


def start_run(body, num_steps):
    folder = Path(__file__).parent
    code = (
        "from support.ranks import run_ranks; import test_killed_runs as t; "
        f"print(run_ranks(t.{body.__name__}, 2, {num_steps}, timeout_s=200))"
    )
    paths = [str(folder), str(folder.parent)]
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


@pytest.mark.multirank
@pytest.mark.timeout(400)  # nine processes import torch
@pytest.mark.parametrize(("body", "per_rank"), [(shared_run, 2), (partitioned_run, 1)])
def test_killed_runs_leave_nothing_and_the_next_ones_work(body, per_rank):
    """Case 25."""
    before = set(Path("/dev/shm").iterdir())
    killed = start_run(body, num_steps=10**9)
    pids = [killed.pid]
    for _ in range(2):
        pids += map(int, killed.stdout.readline().split()[1:])
    killed.stdout.close()

    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    killed.wait()
    following = [start_run(body, num_steps=50) for _ in range(2)]  # at once, side by side
    outputs = [process.communicate(timeout=250)[0] for process in following]

    for process, output in zip(following, outputs, strict=True):
        assert process.returncode == 0
        assert output.splitlines()[-1] == "['ended', 'ended']"
        pids += [int(word) for line in output.splitlines()[:2] for word in line.split()[1:]]
    assert len(pids) == 1 + 3 * 2 * per_rank
    assert wait_until(lambda: not any(map(is_running, pids)), 20.0)
    assert wait_until(lambda: set(Path("/dev/shm").iterdir()) <= before, 20.0)


@pytest.mark.multirank
def test_a_mover_does_not_outlive_its_killed_trainer():
    run = start_run(shared_run, num_steps=10**9)
    ranks = [tuple(map(int, run.stdout.readline().split()[1:])) for _ in range(2)]
    run.stdout.close()

    try:
        trainer, mover = ranks[0]
        os.kill(trainer, signal.SIGKILL)  # only the trainer: its mover has to notice

        assert wait_until(lambda: not is_running(mover), 5.0)
    finally:
        run.wait(60)
    assert wait_until(lambda: not any(is_running(pid) for pair in ranks for pid in pair))
