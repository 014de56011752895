"""Every minibatch once, in any window, also after a loop that was left early: cases 1 and 2."""

from __future__ import annotations

import pytest
from torch.utils.data.graph import traverse_dps

import featsync
from featsync.workers import WORKERS
from support.epochs import epoch, ring_seeds
from support.graphs import (
    Counted,
    assert_as_stock,
    planned_loader,
    ring_batches,
    ring_store,
    seeds_of,
    served,
    stock_loader,
)
from support.loader_workers import end_loader_workers
from support.processes import assert_no_more_handles_than, open_handles

pytestmark = pytest.mark.dgl


# Case 1: edges of the window


@pytest.mark.parametrize(
    ("num_batches", "lookahead"), [(12, 1), (12, 3), (12, 12), (12, 13), (1, 4), (0, 4)]
)
def test_the_source_is_pulled_once_a_minibatch_and_as_far_ahead_as_asked(num_batches, lookahead):
    """Case 1: n minibatches in, n out, in every epoch, for windows of any size."""
    source = Counted(ring_batches(num_batches))
    store = ring_store()
    loader = planned_loader(source, store, ["x"], ["w"], lookahead=lookahead)

    for turn in range(2):
        already = turn * num_batches
        for i, minibatch in enumerate(loader):
            ahead = min(i + 1, lookahead)  # the window fills while the first minibatches are used
            assert source.pulled - already == min(i + 1 + ahead, num_batches)
            assert_as_stock(minibatch, store, ["x"], ["w"])
        assert source.pulled - already == num_batches
        assert epoch(loader, store) == ring_seeds(num_batches)
        source.pulled -= num_batches


@pytest.mark.parametrize("lookahead", [1, 3, 12, 13])
def test_each_minibatch_is_moved_once(lookahead):
    """Case 1: one exchange a batch, again in the second epoch."""
    store = ring_store()
    loader = planned_loader(ring_batches(12), store, ["x"], lookahead=lookahead)
    stats = featsync.stats(loader)

    for _ in range(2):
        wanted = sum(len(minibatch.input_nodes) for minibatch in loader)

        assert stats.minibatches == 12
        assert stats.rows == wanted
        stats.reset()


# Case 2: leaving early, then again


def leave_by_break(loader):
    for i, _ in enumerate(loader):
        if i == 2:
            break


def leave_by_error(loader):
    def body():
        for i, _ in enumerate(loader):
            if i == 2:
                raise KeyError("of the loop body")

    with pytest.raises(KeyError, match="of the loop body"):
        body()


def leave_after_one(loader):
    next(iter(loader))


WAYS_OUT = {"break": leave_by_break, "error": leave_by_error, "take one": leave_after_one}


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("leave", WAYS_OUT.values(), ids=WAYS_OUT)
def test_after_leaving_early_two_full_epochs_follow(leave, worker):
    """Case 2: ten right minibatches each; nothing of the abandoned window comes."""
    store = served(worker, ring_store())
    loader = planned_loader(ring_batches(10), store, ["x"], ["w"], lookahead=4, worker=worker)

    leave(loader)

    assert epoch(loader, store) == ring_seeds()
    assert epoch(loader, store) == ring_seeds()


@pytest.mark.parametrize("leave", WAYS_OUT.values(), ids=WAYS_OUT)
def test_after_leaving_early_two_full_epochs_follow_with_loader_workers(leave):
    """Case 2, with minibatches on their way from two workers."""
    store = ring_store()
    loader = planned_loader(ring_batches(10), store, ["x"], ["w"], num_workers=2, lookahead=4)
    stock = [
        seeds_of(minibatch)
        for minibatch in stock_loader(ring_batches(10), store, ["x"], num_workers=2)
    ]
    end_loader_workers()

    leave(loader)

    for _ in range(2):
        seeds = []
        for minibatch in loader:
            assert_as_stock(minibatch, store, ["x"], ["w"])
            seeds.append(seeds_of(minibatch))
        assert seeds == stock


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_leaving_early_again_and_again_keeps_no_thread_and_no_descriptor(num_workers, worker):
    """Case 2: threads and handles do not grow."""
    store = served(worker, ring_store())
    loader = planned_loader(
        ring_batches(10), store, ["x"], num_workers=num_workers, lookahead=4, worker=worker
    )
    for leave in (*WAYS_OUT.values(), *WAYS_OUT.values()):
        leave(loader)
    before = open_handles()

    for _ in range(3):
        for leave in WAYS_OUT.values():
            leave(loader)

    assert_no_more_handles_than(before)


def test_the_pipe_can_be_walked_while_it_runs_and_after_it_was_left():
    """Case 2: GraphBolt pickles the attributes of every stage to find the stages before it."""
    loader = planned_loader(ring_batches(10), ring_store(), ["x"], device_cache=4)
    stages = len(list(_classes(traverse_dps(loader.dataset))))

    for minibatch in loader:
        assert len(list(_classes(traverse_dps(loader.dataset)))) == stages
        if seeds_of(minibatch) == [4, 5]:
            break

    assert len(list(_classes(traverse_dps(loader.dataset)))) == stages


def _classes(level):
    for stage, above in level.values():
        yield type(stage)
        yield from _classes(above)
