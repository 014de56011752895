"""What only workers of this process promise: when they move, and how a thread ends."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from featsync.device import CpuDevice
from featsync.errors import PeerError, PeerTimeoutError
from featsync.move import Call
from featsync.workers.thread import MoverThread, ThreadWorker, _end_threads
from support.moves import Bench
from support.sessions import TIMEOUT_S

PROJECT = Path(__file__).parent.parent


def mover_threads():
    return {thread for thread in threading.enumerate() if isinstance(thread, MoverThread)}


def test_inline_moves_nothing_before_it_is_waited_for():
    bench = Bench("inline")
    move = bench.gather(1)
    move.target.zero_()

    ticket = bench.worker.submit([move])

    assert not move.target.any()
    assert ticket.seconds == 0
    ticket.wait()
    assert move.target.tolist() == bench.expected(1)


def test_a_thread_moves_while_nobody_waits():
    bench = Bench("thread")
    is_moved = threading.Event()

    bench.worker.submit([Call("x", is_moved.set)])

    assert is_moved.wait(TIMEOUT_S)
    bench.worker.close()


def test_a_thread_that_does_not_finish_in_time_is_named_with_what_it_moves():
    bench = Bench("thread", timeout=0.05)
    may_go_on = threading.Event()
    ticket = bench.worker.submit(
        [Call("node/None/slow", lambda: may_go_on.wait(TIMEOUT_S)), bench.gather(1)]
    )

    with pytest.raises(PeerTimeoutError) as caught:
        ticket.wait()

    may_go_on.set()
    bench.worker.close()
    assert caught.value.peer == "mover thread"
    assert str(caught.value) == (
        "the mover thread did not finish 2 moves (node/None/slow, node/None/feat) in 0.05 s. Is a "
        "feature's read() stuck, or its disk? Raise sync_feature's timeout if it is slow."
    )


def test_a_thread_ends_after_the_moves_that_it_has():
    before = mover_threads()
    bench = Bench("thread")
    (thread,) = mover_threads() - before
    move = bench.gather(1)
    bench.worker.submit([move])

    bench.worker.close()
    thread.join(TIMEOUT_S)

    assert not thread.is_alive()
    assert move.target.tolist() == bench.expected(1)


def run_program(body):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(body)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.mark.parametrize("what", ["copies rows", "runs a foreign read"])
def test_an_interpreter_that_ends_while_its_thread_is_busy_ends_well(what):
    done = run_program(
        f"""
        import sys
        import threading
        sys.path.insert(0, "tests")
        import torch
        from featsync.move import Call, Gather
        from support.moves import Bench
        bench = Bench("thread")
        rows = torch.randint(0, 100, (1_000_000,))
        target = bench.empty(len(rows))
        has_begun = threading.Event()

        def read():
            for _ in range(60):
                torch.index_select(bench.source, 0, rows, out=target)

        copying = [Gather("feat", bench.source, rows, target)] * 60
        moves = copying if {what!r} == "copies rows" else [Call("feat", read)]
        bench.worker.submit([Call("first", has_begun.set), *moves])
        for _ in range(3):
            bench.worker.submit(copying)
        assert has_begun.wait(60)
        sys.stdout.write("the end")
        """
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "the end", "")


def test_at_exit_a_thread_that_is_stuck_is_waited_for_no_longer_than_its_timeout():
    bench = Bench("thread", timeout=0.05)
    has_begun, may_go_on = threading.Event(), threading.Event()
    never = []
    bench.worker.submit([Call("stuck", lambda: (has_begun.set(), may_go_on.wait(TIMEOUT_S)))])
    bench.worker.submit([Call("never begun", lambda: never.append(1))])
    assert has_begun.wait(TIMEOUT_S)
    (thread,) = (t for t in mover_threads() if t.timeout == 0.05)

    began = time.monotonic()
    _end_threads()
    took = time.monotonic() - began

    assert thread.is_alive()
    assert took < 4
    may_go_on.set()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert never == []


def test_a_closed_thread_worker_takes_no_more_moves():
    worker = ThreadWorker(CpuDevice(), 5.0)
    worker.close()

    with pytest.raises(PeerError, match="closed"):
        worker.submit([])
