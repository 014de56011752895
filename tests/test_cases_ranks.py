"""Several ranks, with plain and with shared tables: cases 2, 3, 15, 17, 18, 21 and 23.

Each function before the tests is a fact, see `support.facts`.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

import featsync
from featsync.errors import ConfigError, FeatureError
from featsync.workers import WORKERS
from support.epochs import ddp, epoch, plain_batches, ring_seeds, split_batches, stock_epoch, train
from support.facts import Launch, establish_under_torchrun, name_of
from support.graphs import (
    HETERO_NODES,
    HandMade,
    assert_as_stock,
    assert_same,
    hetero_store,
    planned,
    planned_loader,
    ring_batches,
    ring_store,
    seeds_of,
    stock_loader,
)
from support.loader_workers import end_loader_workers, forked_workers, note_process

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]

NOTHING = torch.tensor([], dtype=torch.int64)


def both_kinds(make_store, rank):
    """The tables of a store, private to each rank, and shared by the ranks of the host."""
    return [make_store(), featsync.share(make_store() if rank == 0 else None)]


def leaving_at_different_minibatches_is_followed_by_two_whole_epochs(rank):
    """Case 2: after 3 and after 4."""
    for store in both_kinds(ring_store, rank):
        loader = planned_loader(split_batches(40), store, ["x"], ["w"], lookahead=4)
        for i, _ in enumerate(loader):
            if i == 2 + rank:
                break

        for _ in range(2):
            assert epoch(loader, store) == ring_seeds()


def a_type_that_one_rank_lacks_is_left_out_there_alone(rank):
    """Case 3: and nobody waits."""
    some = torch.tensor([2, 0])
    sampled = [{"user": some}, {"user": some, "shop": some}][rank]
    for store in both_kinds(hetero_store, rank):
        for cache in (0, 2):
            loader = planned_loader(
                HandMade([sampled] * 3), store, HETERO_NODES, device_cache=cache
            )
            for _ in range(2):
                for minibatch in loader:
                    assert_as_stock(minibatch, store, HETERO_NODES)
                    assert set(minibatch.node_features) == {(type_, "f") for type_ in sampled}


def zero_rows_on_one_rank_are_delivered_as_such(rank):
    """Case 15: (0, d), right dtype and device."""
    some = torch.tensor([3, 9])
    sampled = [[some, some, NOTHING], [NOTHING, some, NOTHING]][rank]
    for store in both_kinds(lambda: ring_store(torch.ones(20, 3, dtype=torch.float16)), rank):
        for minibatch in planned_loader(HandMade(sampled), store, ["x"]):
            wanted = torch.ones(len(minibatch.input_nodes), 3, dtype=torch.float16)
            assert_same(minibatch.node_features["x"], wanted)


def uneven_numbers_of_minibatches_are_normal(rank):
    """Case 17: 2 and 1 of them, then 1 and 0; windows 1 and 4."""
    kinds = both_kinds(ring_store, rank)
    for num_items, counts in ((5, (2, 1)), (2, (1, 0))):
        wanted = stock_epoch(split_batches(num_items))
        assert len(wanted) == counts[rank]
        for store in kinds:
            for lookahead in (1, 4):
                source = split_batches(num_items)
                loader = planned_loader(source, store, ["x"], ["w"], lookahead=lookahead)
                for _ in range(2):
                    assert epoch(loader, store) == wanted


def uneven_numbers_of_minibatches_from_loader_workers_are_normal(rank):
    """Case 17: 9 items, two workers, 3 and 2 minibatches."""
    with forked_workers():
        wanted = stock_epoch(split_batches(9), num_workers=2)
        assert len(wanted) == 3 - rank
        for store, lookahead in zip(both_kinds(ring_store, rank), (1, 4), strict=True):
            source = split_batches(9)
            loader = planned_loader(source, store, ["x"], num_workers=2, lookahead=lookahead)
            for _ in range(2):
                assert epoch(loader, store, nodes=["x"]) == wanted
            end_loader_workers()


def gradients_of_uneven_ranks_are_as_in_stock(rank):
    """Case 17: DDP and Join, by stock and by both kinds of tables."""
    for num_items in (5, 2):
        wanted = train(stock_loader(split_batches(num_items), ring_store(), ["x"]))
        for store in both_kinds(ring_store, rank):
            for lookahead in (1, 4):
                source = split_batches(num_items)
                found = train(planned_loader(source, store, ["x"], lookahead=lookahead))
                for weight, other in zip(found, wanted, strict=True):
                    assert_same(weight, other)


def a_plain_item_sampler_is_split_as_in_stock_and_not_twice(rank):
    """Case 18: the same seeds per rank, shuffled or not."""
    for shuffle in (False, True):
        wanted = stock_epoch(plain_batches(rank, shuffle))
        assert len(wanted) == 5
        for store in both_kinds(ring_store, rank):
            loader = planned_loader(plain_batches(rank, shuffle), store, ["x"], ["w"])
            assert epoch(loader, store) == wanted


def a_short_table_on_one_rank_is_the_error_of_that_rank(rank):
    """Case 21: rank 1 raises its own; nothing but the tables is wrong, so rank 0 goes on."""
    rows = 10 if rank == 1 else 20
    store = ring_store(torch.arange(float(rows)).reshape(rows, 1))
    loader = planned_loader(split_batches(40), store, ["x"], ["w"], lookahead=4)
    if rank == 0:
        assert len(epoch(loader, store)) == 10
        return
    with pytest.raises(FeatureError, match=r"node/None/x: id 1\d is outside its table of 10 rows"):
        list(loader)


def sharing_tables_that_differ_is_an_error_on_every_rank(rank):
    """Case 21: by shape and by dtype; afterwards the same ranks can share."""
    for mine in (
        torch.ones(20 - rank, 1),
        torch.ones(20, 1, dtype=[torch.float, torch.half][rank]),
    ):
        with pytest.raises(ConfigError, match="ranks disagree about the tables") as caught:
            featsync.share(ring_store(mine))
        for name in ("node/None/x", "on rank 0", "on rank 1"):
            assert name in str(caught.value)
    store = featsync.share(ring_store())
    assert_same(store.read("node", None, "x"), torch.arange(20.0).reshape(20, 1))


def loader_workers_work(rank):
    """Case 23: 1 and 2 of them, spawned on a rank that was spawned, forked under torchrun."""
    for store, num_workers in zip(both_kinds(ring_store, rank), (1, 2), strict=True):
        source = split_batches(12).transform(note_process)
        loader = planned_loader(source, store, ["x"], ["w"], num_workers=num_workers)
        for _ in range(2):
            minibatches = list(loader)
            samplers = {minibatch.sampled_in for minibatch in minibatches}
            assert len(samplers) == num_workers
            assert os.getpid() not in samplers
            seeds = [seed for pair in epoch(minibatches, store) for seed in pair]
            assert sorted(seeds) == list(range(6 * rank, 6 * rank + 6))
        end_loader_workers()


def a_validation_loop_on_one_rank_disturbs_nobody(rank):
    """Plain and shared stores never communicate: building and running stages is not collective.

    The stock loader's ``iter()`` is collective, so the validation pipe runs without it.
    """
    for store in both_kinds(ring_store, rank):
        validation = [ring_batches(4)] if rank == 0 else []
        loader = planned_loader(split_batches(40), store, ["x"], ["w"], device_cache=4)
        seeds = []
        for minibatch in loader:
            assert_as_stock(minibatch, store, ["x"], ["w"])
            seeds.append(seeds_of(minibatch))
            if len(seeds) == 3:
                for source in validation:
                    pipe = planned(source, store, ["x"], ["w"], device_cache=4)
                    assert len(epoch(pipe, store)) == 4
        assert len(seeds) == 10


def every_worker_serves_shared_tables(rank):
    """One copy of a table, and one cache, whichever worker moves the rows of which loader."""
    store = featsync.share(ring_store() if rank == 0 else None)
    for worker in WORKERS:
        source = split_batches(12)
        loader = planned_loader(source, store, ["x"], ["w"], worker=worker, device_cache=4)
        for _ in range(2):
            assert len(epoch(loader, store)) == 3


TWO_RANKS = Launch(
    2,
    [
        leaving_at_different_minibatches_is_followed_by_two_whole_epochs,
        a_type_that_one_rank_lacks_is_left_out_there_alone,
        zero_rows_on_one_rank_are_delivered_as_such,
        uneven_numbers_of_minibatches_are_normal,
        uneven_numbers_of_minibatches_from_loader_workers_are_normal,
        gradients_of_uneven_ranks_are_as_in_stock,
        a_plain_item_sampler_is_split_as_in_stock_and_not_twice,
        a_short_table_on_one_rank_is_the_error_of_that_rank,
        sharing_tables_that_differ_is_an_error_on_every_rank,
        loader_workers_work,
        a_validation_loop_on_one_rank_disturbs_nobody,
        every_worker_serves_shared_tables,
    ],
    timeout_s=240,
)


def three_uneven_ranks_yield_their_stock_minibatches(rank):
    """Case 17: 2, 1 and 1 of them, then 1, 0 and 0; without and with a ``Join``."""
    kinds = both_kinds(ring_store, rank)
    for num_items, counts in ((7, (2, 1, 1)), (2, (1, 0, 0))):
        wanted = stock_epoch(split_batches(num_items))
        assert len(wanted) == counts[rank]
        for store in kinds:
            for lookahead in (1, 4):
                loader = planned_loader(
                    split_batches(num_items), store, ["x"], ["w"], lookahead=lookahead
                )
                for context in (nullcontext, lambda: Join([ddp()])):
                    with context():
                        assert epoch(loader, store) == wanted


def ranks_of_a_sub_group_share_among_themselves(rank):
    """Rank 1 is no member, brings nothing and is not waited for."""
    group = dist.new_group([0, 2])
    if rank == 1:
        store = ring_store()
    else:
        store = featsync.share(ring_store() if rank == 0 else None, group)
        with pytest.raises(ConfigError, match="cannot be updated"):
            store.update("node", None, "x", torch.zeros(20, 1))
    loader = planned_loader(
        split_batches(12), store, ["x"], ["w"], process_group=None if rank == 1 else group
    )
    assert len(epoch(loader, store)) == 2


THREE_RANKS = Launch(
    3,
    [
        three_uneven_ranks_yield_their_stock_minibatches,
        ranks_of_a_sub_group_share_among_themselves,
    ],
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fact", TWO_RANKS.facts, ids=name_of)
def test_on_two_ranks(fact):
    TWO_RANKS.check(fact)


@pytest.mark.parametrize("fact", THREE_RANKS.facts, ids=name_of)
def test_on_three_ranks(fact):
    THREE_RANKS.check(fact)


def a_rank_that_is_done_may_exit_before_a_slow_one(rank):
    """Case 22: rank 1 takes its time, long after rank 0 went."""
    store = featsync.share(ring_store() if rank == 0 else None)
    for minibatch in planned_loader(split_batches(16), store, ["x"], lookahead=4):
        assert_as_stock(minibatch, store, ["x"])
        time.sleep(0.2 * rank)


def test_loader_workers_and_uneven_ranks_work_under_torchrun():
    """Cases 22 and 23."""
    facts = [
        loader_workers_work,
        uneven_numbers_of_minibatches_are_normal,
        a_rank_that_is_done_may_exit_before_a_slow_one,
    ]
    establish_under_torchrun(facts, 2, timeout_s=120)
