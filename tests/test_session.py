"""One iteration: rows of every kind of table, whose memory they lie in, and what is counted."""

from __future__ import annotations

import gc

import pytest
import torch

from featsync.device import CpuDevice
from featsync.plan import Want
from featsync.session import Session
from featsync.table import ForeignTable, TensorTable
from support.memory import CountedMemory
from support.sessions import (
    IN_THIS_PROCESS,
    deliveries,
    in_shared_memory,
    mover,
    open_session,
    want,
    wrong_rows,
)
from support.strategies import EDGE, NODE, OTHER, table_of


def test_a_process_worker_delivers_the_same_rows_from_shared_memory():
    case_table, segment = in_shared_memory(table_of(50, (4,), torch.float32))
    loader = mover([NODE], "process")
    home = TensorTable(NODE, lambda: case_table, segment)
    loader.worker.admit(home)
    try:
        session = Session({NODE: home}, {}, loader)
        batches = [{NODE: want(*range(start, 50, 3))} for start in range(5)]
        for wants, rows in deliveries(session, batches, 2):
            assert wrong_rows(rows, wants, {NODE: case_table}) == []
        assert loader.stats.minibatches == 5
    finally:
        loader.worker.close()


@pytest.mark.parametrize("worker", IN_THIS_PROCESS)
def test_each_layer_gets_a_tensor_of_its_own_rows(worker):
    tables = {EDGE: table_of(9, (2,), torch.int16)}
    loader = mover(tables, worker)
    layers = Want((torch.tensor([8, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([3])))
    session = open_session(tables, {}, loader)

    ((_, rows),) = deliveries(session, [{EDGE: layers}], 1)

    assert [len(layer) for layer in rows[EDGE]] == [2, 0, 1]
    assert rows[EDGE][2].tolist() == tables[EDGE][[3]].tolist()
    loader.worker.close()


@pytest.mark.parametrize("worker", IN_THIS_PROCESS)
def test_rows_that_only_a_read_can_give_come_as_it_gives_them(worker):
    home = table_of(9, (2,), torch.float64)
    loader = mover([NODE], worker)
    session = Session({NODE: ForeignTable(NODE, lambda ids: home[ids])}, {}, loader)

    ((_, rows),) = deliveries(session, [{NODE: want(4, 4, 0)}], 1)

    assert rows[NODE][0].tolist() == home[[4, 4, 0]].tolist()
    loader.worker.close()


def test_features_that_a_minibatch_does_not_want_are_not_delivered():
    tables = {NODE: table_of(9, (), torch.float32), OTHER: table_of(9, (), torch.float32)}
    loader = mover(tables)
    session = open_session(tables, {}, loader)

    found = [set(rows) for _, rows in deliveries(session, [{NODE: want(1)}, {}], 1)]

    assert found == [{NODE}, set()]


def test_what_was_delivered_stays_the_callers_while_later_minibatches_come():
    tables = {NODE: table_of(50, (4,), torch.float32)}
    loader = mover(tables, "thread")
    batches = [{NODE: want(*range(start, start + 10))} for start in range(40)]

    kept = list(deliveries(open_session(tables, {}, loader), batches, 2))

    assert [wrong_rows(rows, wants, tables) for wants, rows in kept] == [[]] * 40
    loader.worker.close()


def test_a_loop_that_drops_its_minibatches_uses_a_few_blocks_again_and_again():
    tables = {NODE: table_of(50, (4,), torch.float32)}
    loader = mover(tables, "thread")
    loader.worker.allocate = memory = CountedMemory()
    batches = [{NODE: want(*range(10 + start % 7))} for start in range(60)]

    for _ in deliveries(open_session(tables, {}, loader), batches, 2):
        pass
    warm = len(memory.sizes)
    for _ in deliveries(open_session(tables, {}, loader), batches, 2):
        pass

    assert len(memory.sizes) == warm <= 12
    loader.worker.close()


def test_an_abandoned_flight_gives_its_memory_back():
    tables = {NODE: table_of(50, (4,), torch.float32)}
    loader = mover(tables, "thread")
    delivered = deliveries(open_session(tables, {}, loader), [{NODE: want(1, 2)}] * 9, 2)
    _, rows = next(delivered)
    delivered.close()
    del rows, delivered

    loader.worker.submit([]).wait()  # what was on its way is through
    gc.collect()

    pool = loader._pools[NODE]
    assert pool.free_blocks == 2
    loader.worker.close()


class RecordingDevice(CpuDevice):
    def __init__(self):
        super().__init__()
        self.handed_over = []

    def hand_over(self, delivered):
        self.handed_over += [tensor.tolist() for tensor in delivered]


def test_rows_are_handed_to_the_consumers_stream_when_they_are_delivered():
    tables = {NODE: torch.arange(9.0)}
    device = RecordingDevice()
    loader = mover(tables, "thread", device)
    session = open_session(tables, {}, loader)

    for _, rows in deliveries(session, [{NODE: want(1, 2)}, {NODE: want(3)}], 1):
        assert device.handed_over[-1] == rows[NODE][0].tolist()

    assert device.handed_over == [[1.0, 2.0], [3.0]]
    loader.worker.close()


def test_time_and_steps_are_counted():
    tables = {NODE: table_of(9, (2,), torch.float32)}
    loader = mover(tables)
    session = open_session(tables, {}, loader)

    list(deliveries(session, [{NODE: want(1)}] * 4, 2))

    assert session.clock.delivered == 4
    assert not session.clock.is_running()
    assert loader.stats.minibatches == 4
    assert min(loader.stats.plan_s, loader.stats.transfer_s, loader.stats.wait_s) > 0
