"""One iteration: the rows are the table's own, whatever is cached, left or broken in between."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings

from featsync.device import CpuDevice
from featsync.errors import ConfigError, FeatureChangedError, FeatureError, PlanError
from featsync.plan import FeaturePlan, Fetch, Plan, Want
from featsync.pool import private_block
from featsync.retention import RETENTION
from featsync.session import Session
from featsync.table import ForeignTable, TensorTable
from support.sessions import (
    deliveries,
    in_shared_memory,
    mover,
    open_session,
    plans,
    residency,
    table,
    wrong_rows,
)
from support.strategies import EDGE, NODE, OTHER, cases, table_of

WORKERS_HERE = ["inline", "thread"]  # process has a case of its own: it wants shared memory
CACHING = [name for name in sorted(RETENTION) if name != "none"]


def want(*ids, dtype=torch.int64):
    return Want((torch.tensor(ids, dtype=dtype),))


def caches_of(case):
    return {
        key: residency(key, case.tables[key], count, case.policy, case.window)
        for key, count in case.slots.items()
    }


def take(session, epoch, case):
    """Deliver an epoch up to where it is left; yield the names of features with wrong rows.

    What was delivered is the user's: it is overwritten at once.
    """
    delivered = deliveries(session, epoch.batches, case.window)
    for _ in range(epoch.taken):
        wants, rows = next(delivered)
        yield wrong_rows(rows, wants, case.tables)
        for tensor in (tensor for tensors in rows.values() for tensor in tensors):
            tensor.zero_()
    delivered.close()


@pytest.mark.parametrize("worker", WORKERS_HERE)
@given(case=cases())
def test_invariant_a_policy_changes_sources_and_never_values(worker, case):
    loader = mover(case.tables, worker)
    caches = caches_of(case)
    wanted = 0
    try:
        for epoch in case.epochs:
            session = open_session(case.tables, caches, loader)
            assert [names for names in take(session, epoch, case) if names] == []
            wanted += epoch.taken
        assert loader.stats.minibatches == wanted
    finally:
        loader.worker.close()


@settings(max_examples=25)
@given(case=cases())
def test_invariant_loaders_that_take_turns_share_a_cache_and_get_the_tables_rows(case):
    loaders = [mover(case.tables, worker) for worker in ("thread", "inline", "thread")]
    caches = caches_of(case)
    try:
        for loader in loaders:
            for epoch in case.epochs:
                session = open_session(case.tables, caches, loader)
                assert [names for names in take(session, epoch, case) if names] == []
    finally:
        for loader in loaders:
            loader.worker.close()


@settings(max_examples=25)
@given(case=cases())
def test_invariant_a_table_that_changed_between_epochs_is_read_anew(case):
    loader = mover(case.tables, "inline")
    caches = caches_of(case)
    for epoch in case.epochs:
        session = open_session(case.tables, caches, loader)
        assert [names for names in take(session, epoch, case) if names] == []
        for tensor in case.tables.values():
            tensor.copy_(tensor.flip(0).clone())


@settings(max_examples=25)
@given(case=cases(max_epochs=1))
def test_invariant_every_wanted_row_is_counted_at_one_source(case):
    (epoch,) = case.epochs
    loader = mover(case.tables)
    session = open_session(case.tables, caches_of(case), loader)

    for _ in deliveries(session, epoch.batches, case.window):
        pass

    for key in case.tables:
        wanted = sum(wants[key].num_rows for wants in epoch.batches if key in wants)
        rows = loader.stats.features[key].rows
        assert rows["host"] + rows["cache"] == wanted
        assert rows["peer"] == 0
        assert key in case.slots or rows["cache"] == 0


@pytest.mark.parametrize("policy", CACHING)
@pytest.mark.parametrize("worker", WORKERS_HERE)
def test_a_cache_of_the_whole_table_reads_each_row_from_home_once(policy, worker):
    tables = {NODE: table_of(20, (3,), torch.float32)}
    caches = {NODE: residency(NODE, tables[NODE], 20, policy)}
    loader = mover(tables, worker)
    batches = [{NODE: want(*range(start, start + 10))} for start in (0, 5, 10, 0)]

    for _ in range(2):
        session = open_session(tables, caches, loader)
        for wants, rows in deliveries(session, batches, 2):
            assert wrong_rows(rows, wants, tables) == []

    assert loader.stats.features[NODE].rows == {"host": 20, "cache": 60, "peer": 0}
    assert loader.stats.features[NODE].rows_kept == 20
    loader.worker.close()


@pytest.mark.parametrize("policy", CACHING)
@pytest.mark.parametrize("worker", WORKERS_HERE)
def test_a_loop_that_was_left_leaves_its_rows_in_the_cache(policy, worker):
    tables = {NODE: table_of(20, (3,), torch.float32)}
    caches = {NODE: residency(NODE, tables[NODE], 20, policy)}
    loader = mover(tables, worker)
    batches = [{NODE: want(*range(10))}] * 5
    delivered = deliveries(open_session(tables, caches, loader), batches, 2)
    next(delivered)
    next(delivered)
    delivered.close()
    loader.stats.reset()

    for wants, rows in deliveries(open_session(tables, caches, loader), batches, 2):
        assert wrong_rows(rows, wants, tables) == []

    assert loader.stats.hit_rate == 1.0
    loader.worker.close()


@pytest.mark.parametrize("policy", CACHING)
@pytest.mark.parametrize("worker", WORKERS_HERE)
def test_rows_that_the_user_overwrites_are_kept_as_they_were_read(policy, worker):
    tables = {NODE: table_of(20, (3,), torch.float32)}
    caches = {NODE: residency(NODE, tables[NODE], 20, policy)}
    loader = mover(tables, worker)
    session = open_session(tables, caches, loader)

    for wants, rows in deliveries(session, [{NODE: want(*range(10))}] * 5, 2):
        assert wrong_rows(rows, wants, tables) == []
        rows[NODE][0].fill_(-1)

    assert loader.stats.features[NODE].rows["cache"] == 40
    loader.worker.close()


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


@pytest.mark.parametrize("worker", WORKERS_HERE)
def test_each_layer_gets_a_tensor_of_its_own_rows(worker):
    tables = {EDGE: table_of(9, (2,), torch.int16)}
    loader = mover(tables, worker)
    layers = Want((torch.tensor([8, 0]), torch.tensor([], dtype=torch.int64), torch.tensor([3])))
    session = open_session(tables, {}, loader)

    ((_, rows),) = deliveries(session, [{EDGE: layers}], 1)

    assert [len(layer) for layer in rows[EDGE]] == [2, 0, 1]
    assert rows[EDGE][2].tolist() == tables[EDGE][[3]].tolist()
    loader.worker.close()


@pytest.mark.parametrize("worker", WORKERS_HERE)
def test_rows_that_only_a_read_can_give_come_as_it_gives_them(worker):
    home = table_of(9, (2,), torch.float64)
    loader = mover([NODE], worker)
    session = Session({NODE: ForeignTable(NODE, lambda ids: home[ids])}, {}, loader)

    ((_, rows),) = deliveries(session, [{NODE: want(4, 4, 0)}], 1)

    assert rows[NODE][0].tolist() == home[[4, 4, 0]].tolist()
    loader.worker.close()


@pytest.mark.parametrize("worker", WORKERS_HERE)
def test_the_users_own_error_in_a_read_arrives_as_it_was_raised(worker):
    error = OSError("the disk is gone")

    def read(_ids):
        raise error

    loader = mover([NODE], worker)
    session = Session({NODE: ForeignTable(NODE, read)}, {}, loader)

    with pytest.raises(OSError, match="the disk is gone") as caught:
        list(deliveries(session, [{NODE: want(1)}], 1))

    assert caught.value is error
    loader.worker.close()


@pytest.mark.parametrize("worker", WORKERS_HERE)
@pytest.mark.parametrize("bad", [-1, 9])
def test_an_id_outside_its_table_names_feature_id_and_table(worker, bad):
    tables = {NODE: table_of(9, (2,), torch.float32)}
    loader = mover(tables, worker)
    session = open_session(tables, {}, loader)

    with pytest.raises(FeatureError) as caught:
        list(deliveries(session, [{NODE: want(1, bad)}], 1))

    assert str(caught.value) == (
        f"feature node/None/feat: id {bad} is outside its table of 9 rows (allowed 0 to 8): "
        "table and graph do not match"
    )
    loader.worker.close()


@pytest.mark.parametrize("policy", CACHING)
@pytest.mark.parametrize("worker", WORKERS_HERE)
def test_after_a_failed_minibatch_the_cache_holds_nothing_that_was_not_read(policy, worker):
    tables = {NODE: table_of(9, (2,), torch.float32)}
    caches = {NODE: residency(NODE, tables[NODE], 9, policy)}
    loader = mover([OTHER, NODE], worker)
    broken = {"is": True}

    def read(ids):
        if broken["is"]:
            raise OSError("once")
        return ids

    # The read comes first: when it fails, the rows of NODE after it are not gathered.
    homes = {OTHER: ForeignTable(OTHER, read), NODE: table(NODE, tables[NODE])}
    batches = [{OTHER: want(1), NODE: want(1, 2, 3)}] * 3
    with pytest.raises(OSError, match="once"):
        list(deliveries(Session(homes, caches, loader), batches, 2))

    broken["is"] = False
    for wants, rows in deliveries(Session(homes, caches, loader), batches, 2):
        assert wrong_rows({NODE: rows[NODE]}, {NODE: wants[NODE]}, tables) == []
    loader.worker.close()


def test_a_plan_that_was_never_carried_out_leaves_no_row_that_is_taken_for_kept():
    tables = {NODE: table_of(9, (2,), torch.float32)}
    caches = {NODE: residency(NODE, tables[NODE], 9)}
    loader = mover(tables)
    batches = [{NODE: want(1, 2, 3)}] * 3
    session = open_session(tables, caches, loader)
    planned = plans(session.window, batches, 2)
    plan, wants = next(planned)
    flight = session.begin(plan, wants, None)
    next(planned)  # decides what stays of the first; then a stage in between fails
    session.finish(flight)
    session.close()

    for wants, rows in deliveries(open_session(tables, caches, loader), batches, 2):
        assert wrong_rows(rows, wants, tables) == []


def test_a_minibatch_that_got_lost_between_the_stages_is_an_error():
    tables = {NODE: table_of(9, (2,), torch.float32)}
    loader = mover(tables)
    session = open_session(tables, {NODE: residency(NODE, tables[NODE], 9)}, loader)
    (first, wants), _, (third, _) = plans(session.window, [{NODE: want(1, 2)}] * 3, 2)
    flight = session.begin(first, wants, None)

    with pytest.raises(ConfigError, match="got plan 2 where plan 1 was due"):
        session.begin(third, wants, flight)


def test_a_table_written_while_it_was_read_ahead_is_an_error():
    tables = {NODE: table_of(9, (2,), torch.float32)}
    loader = mover(tables)
    delivered = deliveries(open_session(tables, {}, loader), [{NODE: want(1)}] * 3, 1)
    next(delivered)

    tables[NODE][1] = 5.0

    with pytest.raises(FeatureChangedError, match="feature node/None/feat was updated inside"):
        next(delivered)


def test_a_table_replaced_while_it_was_read_ahead_is_an_error():
    old, new = (table_of(9, (2,), torch.float32) for _ in range(2))
    now = {"is": old}
    loader = mover([NODE])
    session = Session({NODE: TensorTable(NODE, lambda: now["is"])}, {}, loader)
    delivered = deliveries(session, [{NODE: want(1)}] * 3, 1)
    next(delivered)

    now["is"] = new

    with pytest.raises(FeatureChangedError, match=r"make it a featsync\.DynamicFeature"):
        next(delivered)


def test_a_table_that_learns_is_refused_by_name():
    tables = {NODE: torch.nn.Parameter(table_of(9, (2,), torch.float32))}

    with pytest.raises(ConfigError, match=r"feature node/None/feat is a tensor that requires grad"):
        open_session(tables, {}, mover(tables))

    list(deliveries(open_session({NODE: tables[NODE].detach()}, {}, mover(tables)), [], 1))


def test_features_that_a_minibatch_does_not_want_are_not_delivered():
    tables = {NODE: table_of(9, (), torch.float32), OTHER: table_of(9, (), torch.float32)}
    loader = mover(tables)
    session = open_session(tables, {}, loader)

    found = [set(rows) for _, rows in deliveries(session, [{NODE: want(1)}, {}], 1)]

    assert found == [{NODE}, set()]


def test_a_session_nested_in_another_reads_from_home_and_disturbs_nothing():
    tables = {NODE: table_of(20, (2,), torch.float32)}
    caches = {NODE: residency(NODE, tables[NODE], 10)}
    outer, inner = mover(tables), mover(tables)
    batches = [{NODE: want(*range(start, start + 6))} for start in (0, 3, 0, 3, 6, 0)]

    for wants, rows in deliveries(open_session(tables, caches, outer), batches, 2):
        assert wrong_rows(rows, wants, tables) == []
        for nested, found in deliveries(open_session(tables, caches, inner), batches, 2):
            assert wrong_rows(found, nested, tables) == []

    assert inner.stats.features[NODE].rows["cache"] == 0
    assert outer.stats.features[NODE].rows["cache"] > 0


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
    sizes = []

    def allocate(num_bytes):
        sizes.append(num_bytes)
        return private_block(num_bytes)

    loader.worker.allocate = allocate
    batches = [{NODE: want(*range(10 + start % 7))} for start in range(60)]

    for _ in deliveries(open_session(tables, {}, loader), batches, 2):
        pass
    warm = len(sizes)
    for _ in deliveries(open_session(tables, {}, loader), batches, 2):
        pass

    assert len(sizes) == warm <= 12
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


def test_a_plan_with_home_but_no_cached_positions_is_refused():
    tables = {NODE: table_of(9, (2,), torch.float32)}
    loader = mover(tables)
    session = open_session(tables, {}, loader)
    plan = Plan(0, {NODE: FeaturePlan(Fetch(1, torch.tensor([0])))})

    with pytest.raises(PlanError, match="names home positions but no cached ones"):
        session.begin(plan, {NODE: want(1)}, None)
