"""What goes wrong during a session: which error it is, and that nothing stale is kept."""

from __future__ import annotations

import pytest
import torch

from featsync.errors import ConfigError, FeatureChangedError, FeatureError, PlanError
from featsync.plan import FeaturePlan, Fetch, Plan
from featsync.session import Session
from featsync.table import ForeignTable, TensorTable
from support.sessions import (
    CACHING,
    IN_THIS_PROCESS,
    deliveries,
    mover,
    open_session,
    plans,
    residency,
    table,
    want,
    wrong_rows,
)
from support.strategies import NODE, OTHER, table_of


@pytest.mark.parametrize("worker", IN_THIS_PROCESS)
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


@pytest.mark.parametrize("worker", IN_THIS_PROCESS)
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
@pytest.mark.parametrize("worker", IN_THIS_PROCESS)
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


def test_a_plan_with_home_but_no_cached_positions_is_refused():
    tables = {NODE: table_of(9, (2,), torch.float32)}
    loader = mover(tables)
    session = open_session(tables, {}, loader)
    plan = Plan(0, {NODE: FeaturePlan(Fetch(1, torch.tensor([0])))})

    with pytest.raises(PlanError, match="names home positions but no cached ones"):
        session.begin(plan, {NODE: want(1)}, None)
