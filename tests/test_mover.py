"""The mover process is small, ends when it should, leaves nothing, and is named when it fails."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from featsync import mover
from featsync.device import CpuDevice
from featsync.errors import PeerError, PeerTimeoutError
from featsync.move import Gather
from featsync.pool import Pool
from featsync.workers.process import ProcessWorker
from support.processes import is_running, open_descriptors, wait_until

WHAT = "node/None/feat"


@pytest.fixture(scope="module")
def worker():
    worker = ProcessWorker(CpuDevice(), 30.0)
    yield worker
    worker.close()


def shared(worker, tensor):
    """Copy a tensor into a block of the worker."""
    block = worker.allocate(tensor.numel() * tensor.element_size())
    return torch.from_numpy(block).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def test_the_mover_is_small_and_knows_no_torch(worker):
    worker.submit([]).wait()

    libraries = Path(f"/proc/{worker.pid}/maps").read_text()
    status = Path(f"/proc/{worker.pid}/status").read_text().split()

    assert "numpy" in libraries
    assert "libtorch" not in libraries
    assert int(status[status.index("RssAnon:") + 1]) < 40_000  # KiB
    assert int(status[status.index("Threads:") + 1]) == 1


def test_an_interrupt_is_the_trainers_business(worker):
    fresh = ProcessWorker(CpuDevice(), 30.0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(worker.pid, number)
        os.kill(fresh.pid, number)  # also while it starts

    for each in (worker, fresh):
        each.submit([]).wait()

    assert is_running(worker.pid)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    fresh.close()


def test_a_thousand_batches_of_fresh_blocks_do_not_grow():
    worker = ProcessWorker(CpuDevice(), 30.0)
    source = shared(worker, torch.randn(100, 16))
    pool = Pool(allocate=worker.allocate)

    def state():
        fds = open_descriptors(), len(list(Path(f"/proc/{worker.pid}/fd").iterdir()))
        return *fds, len(Path(f"/proc/{worker.pid}/maps").read_text().splitlines())

    for step in range(1100):
        num_rows = 10 + step % 7
        rows = torch.arange(num_rows)
        pooled = pool.take((num_rows, 16), torch.float32)
        fresh = shared(worker, torch.zeros(num_rows, 16))
        worker.submit([Gather(WHAT, source, rows, t) for t in (pooled, fresh)]).wait()
        assert torch.equal(pooled, source[:num_rows])
        assert torch.equal(fresh, pooled)
        del pooled, fresh
        if step == 100:
            before = state()

    worker.submit([]).wait()
    assert all(now <= then + 3 for now, then in zip(state(), before, strict=True))
    worker.close()


def test_a_killed_mover_is_named_within_a_second():
    worker = ProcessWorker(CpuDevice(), 30.0)
    source, target = shared(worker, torch.randn(50, 8)), shared(worker, torch.zeros(9, 8))
    move = Gather(WHAT, source, torch.arange(9), target)
    worker.submit([move]).wait()
    os.kill(worker.pid, signal.SIGSTOP)
    pending = worker.submit([move])
    start = time.monotonic()
    os.kill(worker.pid, signal.SIGKILL)

    for ticket in (pending, worker.submit([move]), pending):
        with pytest.raises(PeerError, match="exit code -9, killed by SIGKILL") as caught:
            ticket.wait()
        assert caught.value.peer == f"mover process {worker.pid}"

    assert time.monotonic() - start < 1
    worker.close()


def test_a_mover_that_gives_no_sign_is_named_in_time():
    worker = ProcessWorker(CpuDevice(), 0.7)
    worker.submit([]).wait()
    os.kill(worker.pid, signal.SIGSTOP)
    start = time.monotonic()

    with pytest.raises(PeerTimeoutError, match=r"no sign of life for 0\.7 s"):
        worker.submit([]).wait()

    assert 0.6 < time.monotonic() - start < 3
    pid = worker.pid
    worker.close()  # also ends a stopped process
    assert not is_running(pid)


def test_closing_leaves_no_process_and_no_descriptor():
    before = open_descriptors()
    worker = ProcessWorker(CpuDevice(), 30.0)
    source, target = shared(worker, torch.randn(50, 8)), shared(worker, torch.zeros(9, 8))
    pending = worker.submit([Gather(WHAT, source, torch.arange(9), target)])
    pid = worker.pid

    worker.close()
    worker.close()

    assert not Path(f"/proc/{pid}").exists()  # not even a zombie
    for ticket in (pending, worker.submit([])):
        with pytest.raises(PeerError, match="was closed"):
            ticket.wait()
    del worker, source, target, pending, ticket
    assert open_descriptors() == before


def test_a_dropped_worker_ends_its_process():
    before = open_descriptors()
    worker = ProcessWorker(CpuDevice(), 30.0)
    worker.submit([]).wait()
    pid = worker.pid

    del worker
    gc.collect()

    assert not Path(f"/proc/{pid}").exists()
    assert open_descriptors() == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_end_its_parents_mover():
    worker = ProcessWorker(CpuDevice(), 30.0)
    pid = worker.pid
    child = os.fork()
    if child == 0:  # what a loader worker does with what it inherits
        worker.close()
        os._exit(0)
    os.waitpid(child, 0)

    worker.submit([]).wait()

    # The other way round: while the child lives, closing still ends the process.
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    worker.close()
    assert not is_running(pid)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize(
    "ending", ["pass", "sys.exit(3)", "raise KeyError", "os.kill(os.getpid(), 9)"]
)
def test_the_mover_ends_with_the_interpreter_however_that_ends(ending):
    code = f"""
        import os, sys, time
        from featsync.device import CpuDevice
        from featsync.workers.process import ProcessWorker
        worker = ProcessWorker(CpuDevice(), 30.0)
        worker.submit([]).wait()
        if os.fork() == 0:  # as a loader worker that holds on to what it inherited
            os.close(1)
            time.sleep(4)
            os._exit(0)
        print(worker.pid, flush=True)
        {ending}
    """

    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=60,
    )

    assert result.returncode == {"p": 0, "s": 3, "r": 1, "o": -9}[ending[0]]
    assert wait_until(lambda: not is_running(int(result.stdout)), 3.0)


def test_signs_are_given_between_chunks(monkeypatch):
    monkeypatch.setattr(mover, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(mover, "_SCRATCH_BYTES", 32)
    source = np.arange(40.0).view("V8")
    rows = np.arange(40)[::-1].copy()
    signs = []
    ordered, scattered = np.zeros(40).view("V8"), np.zeros(40).view("V8")

    mover.gather(source, rows, ordered, None, lambda: signs.append(1))
    mover.gather(source, rows, scattered, rows, lambda: signs.append(2))

    assert signs == [1] * 5 + [2] * 10
    assert np.array_equal(ordered.view(float), np.arange(40.0)[::-1])
    assert np.array_equal(scattered.view(float), np.arange(40.0))


@pytest.mark.parametrize("item", ["i4", "i8"])
def test_outside_is_below_zero_or_past_the_end(item):
    mover.check_inside("rows", np.array([0, 4], item), 5)
    mover.check_inside("rows", np.array([], item), 0)
    for bad in (-1, 5):
        with pytest.raises(mover.OutsideError) as caught:
            mover.check_inside("rows", np.array([0, bad], item), 5)
        assert (caught.value.kind, caught.value.row, caught.value.size) == ("rows", bad, 5)
