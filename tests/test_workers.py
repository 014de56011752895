"""The contract of a worker, for every name in WORKERS."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from featsync.device import CpuDevice
from featsync.errors import ConfigError, FeatureError, PeerError, PeerTimeoutError
from featsync.move import Call, Gather
from featsync.pool import Pool
from featsync.table import ForeignTable, TensorTable
from featsync.workers import WORKERS
from featsync.workers.thread import MoverThread, ThreadWorker, _end_threads
from support.sessions import TIMEOUT_S, in_shared_memory
from support.strategies import NODE, table_of

CALLING = ["inline", "thread"]  # process refuses what only this process can run
PROJECT = Path(__file__).parent.parent


class Bench:
    """A worker, a table that every kind of worker can read, and memory that it can fill."""

    def __init__(self, name, timeout=TIMEOUT_S):
        self.worker = WORKERS[name](CpuDevice(), timeout)
        self.source, self.segment = in_shared_memory(table_of(100, (3,), torch.float32))
        self.worker.admit(TensorTable(NODE, lambda: self.source, self.segment))
        self.pool = Pool(allocate=self.worker.allocate)

    def empty(self, num_rows):
        return self.pool.take((num_rows, 3), torch.float32)

    def gather(self, *rows, target=None, positions=None, source=None):
        target = self.empty(len(rows)) if target is None else target
        places = None if positions is None else torch.tensor(positions)
        source = self.source if source is None else source
        return Gather("node/None/feat", source, torch.tensor(rows), target, places)

    def expected(self, *rows):
        return self.source[list(rows)].tolist()


@pytest.fixture(params=sorted(WORKERS))
def bench(request):
    bench = Bench(request.param)
    yield bench
    bench.worker.close()


@pytest.fixture(params=CALLING)
def calling(request):
    bench = Bench(request.param)
    yield bench
    bench.worker.close()


def test_rows_are_there_once_they_were_waited_for(bench):
    move = bench.gather(5, 0, 99, 5)

    ticket = bench.worker.submit([move])
    ticket.wait()

    assert move.target.tolist() == bench.expected(5, 0, 99, 5)


def test_waiting_again_returns_at_once(bench):
    ticket = bench.worker.submit([bench.gather(1)])
    ticket.wait()

    ticket.wait()

    assert ticket.seconds > 0


def test_tickets_may_be_waited_for_in_any_order(bench):
    moves = [bench.gather(row, row + 1) for row in range(6)]
    tickets = [bench.worker.submit([move]) for move in moves]

    for index in (5, 0, 3, 4, 1, 2):
        tickets[index].wait()
        assert moves[index].target.tolist() == bench.expected(index, index + 1)


def test_moves_are_carried_out_in_the_order_of_submission(bench):
    slots, last = bench.empty(4), bench.empty(2)
    slots.zero_()
    bench.worker.submit([bench.gather(7, 8, target=slots, positions=[2, 0])])
    bench.worker.submit([bench.gather(9, target=slots, positions=[0])])

    bench.worker.submit([bench.gather(0, 2, target=last, source=slots)]).wait()

    assert last.tolist() == bench.expected(9, 7)
    assert slots[[1, 3]].eq(0).all()


def test_waiting_for_one_list_means_that_all_before_it_are_done(bench):
    first = bench.gather(3, 4)
    bench.worker.submit([first])

    bench.worker.submit([]).wait()

    assert first.target.tolist() == bench.expected(3, 4)


def test_a_list_without_moves_is_done(bench):
    ticket = bench.worker.submit([])

    ticket.wait()

    assert ticket.seconds >= 0


def test_no_rows_are_no_error(bench):
    empty = Gather(
        "node/None/feat",
        bench.source,
        torch.tensor([], dtype=torch.int64),
        torch.empty(0, 3),
    )

    bench.worker.submit([empty]).wait()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_may_have_32_or_64_bits(bench, dtype):
    target = bench.empty(2)
    move = Gather("node/None/feat", bench.source, torch.tensor([4, 9], dtype=dtype), target)

    bench.worker.submit([move]).wait()

    assert target.tolist() == bench.expected(4, 9)


def test_the_target_may_be_part_of_a_delivered_tensor(bench):
    whole = bench.empty(5)
    first, second = torch.split(whole, [2, 3])

    bench.worker.submit(
        [bench.gather(1, 2, target=first), bench.gather(7, 8, 9, target=second)]
    ).wait()

    assert whole.tolist() == bench.expected(1, 2, 7, 8, 9)


@pytest.mark.parametrize("bad", [-1, 100])
@pytest.mark.parametrize("positions", [None, [0, 1]])
def test_an_error_is_kept_for_whoever_waits_and_names_feature_id_and_table(bench, bad, positions):
    ticket = bench.worker.submit([bench.gather(1, bad, positions=positions)])
    bench.worker.submit([]).wait()

    for _ in range(2):
        with pytest.raises(FeatureError) as caught:
            ticket.wait()
        assert str(caught.value) == (
            f"feature node/None/feat: id {bad} is outside its table of 100 rows "
            "(allowed 0 to 99): table and graph do not match"
        )


def test_a_failed_list_does_not_stop_later_ones(bench):
    failing = bench.worker.submit([bench.gather(100)])
    move = bench.gather(6)
    ticket = bench.worker.submit([move])

    ticket.wait()

    assert move.target.tolist() == bench.expected(6)
    with pytest.raises(FeatureError):
        failing.wait()


def test_a_list_that_failed_unwaited_for_is_nobodys_error(bench):
    bench.worker.submit([bench.gather(100)])

    bench.worker.submit([]).wait()


def test_closing_is_idempotent(bench):
    bench.worker.submit([bench.gather(1)]).wait()

    bench.worker.close()
    bench.worker.close()


def test_closing_with_work_on_its_way_waits_for_nothing(bench):
    for _ in range(20):
        bench.worker.submit([bench.gather(*range(100))])

    bench.worker.close()


def test_what_was_on_its_way_at_the_end_is_done_or_an_error_and_never_silently_missing(bench):
    moves = [bench.gather(*range(100)) for _ in range(5)]
    for move in moves:
        move.target.fill_(-1)
    tickets = [bench.worker.submit([move]) for move in moves]

    bench.worker.close()

    for ticket, move in zip(tickets, moves, strict=True):
        try:
            ticket.wait()
        except PeerError as error:
            assert "closed before" in str(error)  # noqa: PT017 - either outcome is right
        else:
            assert move.target.tolist() == bench.source.tolist()


def test_closing_from_a_finalizer_is_safe(bench):
    class Owner:
        pass

    owner = Owner()
    weakref.finalize(owner, bench.worker.close)
    bench.worker.submit([bench.gather(1)])

    del owner

    bench.worker.close()


def test_memory_that_was_delivered_survives_the_worker(bench):
    move = bench.gather(1, 2)
    bench.worker.submit([move]).wait()

    bench.worker.close()

    assert move.target.tolist() == bench.expected(1, 2)


def test_a_ticket_lets_go_of_the_rows_that_it_moved(bench):
    move = bench.gather(1, 2)
    gone = weakref.ref(move.target)
    ticket = bench.worker.submit([move])
    ticket.wait()
    bench.worker.submit([]).wait()  # the thread holds no ticket but the one it runs

    del move

    assert gone() is None
    assert ticket.seconds > 0


@pytest.mark.parametrize("name", sorted(WORKERS))
def test_nothing_is_left_of_a_closed_worker(name):
    def descriptors():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    Bench(name).worker.close()  # what is opened once and for all is open now
    threads, before = set(threading.enumerate()), descriptors()

    for _ in range(3):
        bench = Bench(name)
        move = bench.gather(1)
        bench.worker.submit([move]).wait()
        bench.worker.close()
        del bench, move
    for thread in set(threading.enumerate()) - threads:
        thread.join(TIMEOUT_S)

    assert set(threading.enumerate()) <= threads
    assert descriptors() == before


def test_a_foreign_read_runs_and_stores_what_it_read(calling):
    seen = []
    calling.worker.admit(ForeignTable(NODE, lambda ids: ids))

    calling.worker.submit([Call("x", lambda: seen.append(1)), calling.gather(1)]).wait()

    assert seen == [1]


def test_the_error_of_a_foreign_read_is_raised_as_it_was(calling):
    error = KeyError("the user's own")

    def fail():
        raise error

    ticket = calling.worker.submit([Call("x", fail)])

    with pytest.raises(KeyError) as caught:
        ticket.wait()
    assert caught.value is error
    calling.worker.submit([]).wait()


def test_what_lies_in_this_process_alone_is_refused_by_a_process_with_the_features_name():
    worker = WORKERS["process"](CpuDevice(), TIMEOUT_S)
    try:
        for table in (TensorTable(NODE, lambda: torch.zeros(9)), ForeignTable(NODE, lambda x: x)):
            with pytest.raises(ConfigError, match=r"node/None/feat.*worker=\"thread\""):
                worker.admit(table)
        with pytest.raises(ConfigError, match=r"only-here.*worker=\"thread\""):
            worker.submit([Call("only-here", lambda: None)])
    finally:
        worker.close()


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


def test_a_thread_is_given_the_time_in_which_a_call_names_whom_it_waits_for():
    """Both have the same timeout, and the thread's begins earlier."""
    bench = Bench("thread", timeout=0.05)

    def wait_for_a_rank():
        time.sleep(0.3)
        raise PeerTimeoutError("rank 1 gave no sign of life", "rank 1")

    ticket = bench.worker.submit([Call("x", wait_for_a_rank, patience=TIMEOUT_S)])

    with pytest.raises(PeerTimeoutError) as caught:
        ticket.wait()

    bench.worker.close()
    assert caught.value.peer == "rank 1"


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
        from test_workers import Bench, Call, Gather
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
