"""The contract of a worker, for every name in WORKERS."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from featsync.device import CpuDevice
from featsync.errors import ConfigError, FeatureError, PeerError
from featsync.move import Call, Gather
from featsync.table import ForeignTable, TensorTable
from featsync.workers import WORKERS
from support.moves import Bench
from support.processes import open_descriptors
from support.sessions import IN_THIS_PROCESS, TIMEOUT_S
from support.strategies import NODE


@pytest.fixture(params=sorted(WORKERS))
def bench(request):
    bench = Bench(request.param)
    yield bench
    bench.worker.close()


@pytest.fixture(params=IN_THIS_PROCESS)
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
    Bench(name).worker.close()  # what is opened once and for all is open now
    threads, before = set(threading.enumerate()), open_descriptors()

    for _ in range(3):
        bench = Bench(name)
        move = bench.gather(1)
        bench.worker.submit([move]).wait()
        bench.worker.close()
        del bench, move
    for thread in set(threading.enumerate()) - threads:
        thread.join(TIMEOUT_S)

    assert set(threading.enumerate()) <= threads
    assert open_descriptors() == before


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
