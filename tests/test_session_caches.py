"""What a session keeps: the rows are the table's own, whatever is cached or left in between."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from featsync.errors import PeerError, PlanError
from featsync.session import Session
from support.sessions import (
    CACHING,
    IN_THIS_PROCESS,
    deliveries,
    host_cache,
    mover,
    open_session,
    residency,
    table,
    want,
    wrong_rows,
)
from support.strategies import EDGE, NODE, OTHER, cases, table_of


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


@pytest.mark.parametrize("worker", IN_THIS_PROCESS)
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
@pytest.mark.parametrize("worker", IN_THIS_PROCESS)
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
@pytest.mark.parametrize("worker", IN_THIS_PROCESS)
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
@pytest.mark.parametrize("worker", IN_THIS_PROCESS)
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


class Remote:
    """Other ranks, of which nothing is wanted; ``is_open`` until they are told that it is over."""

    keys = frozenset()
    is_open = True

    def close(self):
        self.is_open = False


class Unopened:
    """Features whose rows change, while another rank is still in the epoch before."""

    def open(self, is_alive):
        raise PeerError("still there", "rank 1")


@pytest.mark.parametrize("place", [0, 1, 2, None], ids=["first", "between", "last", "dynamic"])
def test_a_session_that_cannot_begin_leaves_all_caches_to_the_next(place):
    tensor = table_of(20, (2,), torch.float32)
    homes = {key: table(key, tensor) for key in (NODE, EDGE, OTHER)}
    own = residency(NODE, tensor, 10)
    caches, memories = zip(*(host_cache(tensor, 10) for _ in homes), strict=True)
    shared = dict(zip(homes, caches, strict=True))
    remote, loader = Remote(), mover(homes)

    if place is None:
        with pytest.raises(PeerError, match="still there"):
            Session(homes, {NODE: own}, loader, remote, shared, dynamic=Unopened())
    else:
        with caches[place].hold(), pytest.raises(PlanError, match="already holds the lock"):
            Session(homes, {NODE: own}, loader, remote, shared)

    assert not remote.is_open
    assert own.drive(lambda: True, homes[NODE].version)
    for cache, memory in zip(caches, memories, strict=True):
        assert memory.progress.running.tolist() == [0]  # the other ranks do not reckon with it
        assert cache.is_trusted()
        assert cache.begin(lambda: True, lambda rank: lambda: None)
