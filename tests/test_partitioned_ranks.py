"""Partitioned tables and what ranks do: cases 17, 18, 21 and 23, by each transport.

Each function before the tests is a fact, see `support.facts`.
"""

from __future__ import annotations

import itertools
import os
import time
from contextlib import nullcontext

import dgl.graphbolt as gb
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

import featsync
from featsync.errors import FeatureError, PeerError
from featsync.transports import TRANSPORTS
from support.epochs import ddp, epoch, plain_batches, split_batches, stock_epoch, train
from support.facts import Launch, establish_under_torchrun, name_of
from support.graphs import (
    HandMade,
    assert_as_stock,
    assert_same,
    planned,
    planned_loader,
    ring_batches,
    ring_store,
    seeds_of,
    store_of,
)
from support.loader_workers import end_loader_workers, forked_workers, note_process
from support.parts import (
    PARTITIONS,
    WAYS,
    partitioned,
    settings_of_ways,
)

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]


def random_ids_of_many_rows_arrive(rank):
    """Rows that several ranks want at once, in any order, more than once."""
    x = torch.arange(3000.0).reshape(1000, 3)
    generator = torch.Generator().manual_seed(rank)
    wanted = [torch.randint(0, 1000, (400,), generator=generator) for _ in range(12)]
    for how, settings in settings_of_ways():
        store = partitioned(ring_store(x), how)
        loader = planned_loader(HandMade(wanted), store, ["x"], **settings)
        for minibatch in loader:
            assert_as_stock(minibatch, ring_store(x), ["x"])
        stats = featsync.stats(loader)
        assert stats.rows == 12 * 400
        assert stats.bytes["host"] + stats.bytes["peer"] + stats.bytes["cache"] == 12 * 400 * 12
        if settings["transport"] == "p2p":
            assert stats.bytes["peer"] > 0


def uneven_numbers_of_minibatches_are_normal(rank):
    """Case 17: a rank that has none still serves its rows; windows 1 and 4, with a ``Join``."""
    stores = {how: partitioned(ring_store(), how) for how in PARTITIONS}
    for num_items in (5, 2, 9):
        wanted = stock_epoch(split_batches(num_items))
        for (how, store), transport in itertools.product(stores.items(), WAYS):
            lookahead = 1 if how == "range" else 4
            for context in (nullcontext, lambda: Join([ddp()])):
                loader = planned_loader(
                    split_batches(num_items), store, ["x"], ["w"],
                    transport=transport, lookahead=lookahead,
                )  # fmt: skip
                with context():
                    assert epoch(loader, ring_store()) == wanted


def gradients_are_as_in_stock(rank):
    """Cases 17 and 18: two epochs of DDP, beside which rows travel on a group of their own."""
    wanted = train(planned_loader(split_batches(25), ring_store(), ["x"]))
    for how, transport in itertools.product(PARTITIONS, WAYS):
        loader = planned_loader(
            split_batches(25), partitioned(ring_store(), how), ["x"], transport=transport
        )
        for weight, other in zip(train(loader), wanted, strict=True):
            assert_same(weight, other)


def leaving_at_different_minibatches_is_followed_by_two_whole_epochs(rank):
    """Case 2: after 3 and after 4 and so on."""
    wanted = stock_epoch(split_batches(60))
    for how, transport in itertools.product(PARTITIONS, WAYS):
        store = partitioned(ring_store(), how)
        loader = planned_loader(
            split_batches(60), store, ["x"], ["w"], lookahead=4, transport=transport
        )
        for i, _ in enumerate(loader):
            if i == 2 + rank:
                break
        for _ in range(2):
            assert epoch(loader, ring_store()) == wanted


def an_error_on_one_rank_is_raised_on_the_others_too(rank):
    """Case 21: its own error there, and soon; the next epoch is whole."""
    for how, transport in itertools.product(PARTITIONS, WAYS):
        store = partitioned(ring_store(), how)
        good, bad = torch.tensor([3, 9]), torch.tensor([4, 21])
        loader = planned_loader(
            HandMade(
                [good, bad if rank == 1 else good] + 200 * [good], pause_s=0 if rank == 1 else 0.1
            ),
            store, ["x"], lookahead=2, transport=transport,
        )  # fmt: skip
        start = time.monotonic()
        if rank == 1:
            with pytest.raises(FeatureError, match="id 21 is outside its table of 20 rows"):
                list(loader)
        else:
            with pytest.raises(PeerError, match="rank 1 failed: FeatureError: feature node/None/x"):
                list(loader)
        assert time.monotonic() - start < 15
        dist.barrier()
        loader = planned_loader(HandMade([good] * 3), store, ["x"], transport=transport)
        for minibatch in loader:
            assert_as_stock(minibatch, ring_store(), ["x"])
        dist.barrier()


def a_validation_loop_on_one_rank_disturbs_nobody(rank):
    """Reading is not collective: one rank iterates and reads while the others train."""
    for how, transport in itertools.product(PARTITIONS, WAYS):
        store = partitioned(ring_store(), how)
        loader = planned_loader(
            split_batches(60), store, ["x"], ["w"], device_cache=4, transport=transport
        )
        for i, minibatch in enumerate(loader):
            assert_as_stock(minibatch, ring_store(), ["x"], ["w"])
            if rank == 0 and i == 3:
                nested = planned(
                    ring_batches(4), store, ["x"], ["w"], device_cache=4, transport=transport
                )
                assert len(epoch(nested, ring_store())) == 4
                ids = torch.tensor([19, 0, 7])
                wanted = ring_store().read("node", None, "x", ids)
                assert_same(store.read("node", None, "x", ids), wanted)
        whole = store.read("edge", None, "w")
        assert_same(whole, ring_store().read("edge", None, "w"))


def loader_workers_work(rank):
    """Case 23: 1 and 2 of them, forked, as under torchrun."""
    numbers = itertools.cycle((1, 2))
    with forked_workers():
        for how, transport in itertools.product(PARTITIONS, WAYS):
            num_workers = next(numbers)
            loader = planned_loader(
                split_batches(24).transform(note_process), partitioned(ring_store(), how),
                ["x"], ["w"], num_workers=num_workers, transport=transport,
            )  # fmt: skip
            for _ in range(2):
                minibatches = list(loader)
                samplers = {minibatch.sampled_in for minibatch in minibatches}
                assert len(samplers - {os.getpid()}) == num_workers
                assert epoch(minibatches, ring_store())
            end_loader_workers()


def spawned_loader_workers_work(rank):
    """Case 23: what a loader's worker is given pickles."""
    for how, transport in zip(PARTITIONS, TRANSPORTS, strict=True):
        source, store = split_batches(24), partitioned(ring_store(), how)
        loader = planned_loader(source, store, ["x"], ["w"], num_workers=1, transport=transport)
        assert epoch(loader, ring_store())
        end_loader_workers()


def uneven_numbers_of_minibatches_from_loader_workers_are_normal(rank):
    """Case 17: 9 items, two workers, 3 and 2 minibatches."""
    with forked_workers():
        wanted = stock_epoch(split_batches(9), num_workers=2)
        assert len(wanted) == 3 - rank
        for how, transport in itertools.product(PARTITIONS, WAYS):
            loader = planned_loader(
                split_batches(9), partitioned(ring_store(), how), ["x"],
                num_workers=2, transport=transport, lookahead=1 if how == "range" else 4,
            )  # fmt: skip
            for _ in range(2):
                assert epoch(loader, ring_store(), nodes=["x"]) == wanted
            end_loader_workers()


def a_plain_item_sampler_is_split_as_in_stock_and_not_twice(rank):
    """Case 18: the same seeds per rank, shuffled or not."""
    for shuffle in (False, True):
        wanted = stock_epoch(plain_batches(rank, shuffle))
        assert len(wanted) == 5
        for how, transport in itertools.product(PARTITIONS, WAYS):
            store, batches = partitioned(ring_store(), how), plain_batches(rank, shuffle)
            loader = planned_loader(batches, store, ["x"], ["w"], transport=transport)
            assert epoch(loader, ring_store()) == wanted


def a_short_table_of_one_rank_is_an_error_of_all(rank):
    """Case 21: a plain table of 10 rows beside the partitioned one, on rank 1; window 4."""
    y = torch.arange(10.0 if rank == 1 else 20.0).reshape(-1, 1)
    pause = {"pause_s": 0 if rank == 1 else 0.1}
    ids = [torch.tensor([3, 9])] * 5 + [torch.tensor([3, 13])] * 200
    for how, transport in itertools.product(PARTITIONS, WAYS):
        x = partitioned(ring_store(), how)._features["node", None, "x"]
        store = store_of({("node", None, "x"): x, ("node", None, "y"): y})
        loader = planned_loader(
            HandMade(ids, **pause), store, ["x", "y"], lookahead=4, transport=transport
        )
        if rank == 1:
            with pytest.raises(FeatureError, match="node/None/y: id 13 is outside its table of 10"):
                list(loader)
        else:
            with pytest.raises(PeerError, match="rank 1 failed: FeatureError: feature node/None/y"):
                list(loader)
        dist.barrier()


def a_sub_group_has_tables_of_its_own(rank):
    """The ranks that are no members take no part.

    The stock loader's ``iter()`` is collective among all ranks, so the pipe runs without it.
    """
    group = dist.new_group([0, dist.get_world_size() - 1])
    if dist.get_rank(group) < 0:
        return
    for how, transport in itertools.product(PARTITIONS, WAYS):
        store = partitioned(ring_store(), how, group)
        pipe = planned(
            split_batches(24), store, ["x"], ["w"], transport=transport, process_group=group
        )
        assert epoch(pipe, ring_store())


FACTS = [
    random_ids_of_many_rows_arrive,
    uneven_numbers_of_minibatches_are_normal,
    gradients_are_as_in_stock,
    leaving_at_different_minibatches_is_followed_by_two_whole_epochs,
    an_error_on_one_rank_is_raised_on_the_others_too,
    a_validation_loop_on_one_rank_disturbs_nobody,
    loader_workers_work,
    spawned_loader_workers_work,
    uneven_numbers_of_minibatches_from_loader_workers_are_normal,
    a_plain_item_sampler_is_split_as_in_stock_and_not_twice,
    a_short_table_of_one_rank_is_an_error_of_all,
    a_sub_group_has_tables_of_its_own,
]


# What depends on how many ranks there are; the rest is established on two.
OF_MANY_RANKS = [
    random_ids_of_many_rows_arrive,
    uneven_numbers_of_minibatches_are_normal,
    an_error_on_one_rank_is_raised_on_the_others_too,
    a_sub_group_has_tables_of_its_own,
]


LAUNCHES = [Launch(2, FACTS), Launch(3, OF_MANY_RANKS), Launch(4, OF_MANY_RANKS)]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("launch", "fact"),
    [(launch, fact) for launch in LAUNCHES for fact in launch.facts],
    ids=name_of,
)
def test_partitioned_tables(launch, fact):
    launch.check(fact)


def test_loader_workers_and_uneven_ranks_work_under_torchrun():
    """Cases 17 and 23: and both ranks exit with 0, the engines of both with them."""
    facts = [loader_workers_work, uneven_numbers_of_minibatches_are_normal]
    establish_under_torchrun(facts, 2, timeout_s=120)


def test_seeds_are_split_as_in_stock():
    """Case 18: nothing of featsync splits them again."""
    items = gb.ItemSet(torch.arange(4), names="seed_nodes")
    loader = planned_loader(
        gb.ItemSampler(items, batch_size=2),
        store_of({("node", None, "x"): featsync.PartitionedFeature(torch.ones(4, 1), [0, 4])}),
    )
    assert [seeds_of(minibatch) for minibatch in loader] == [[0, 1], [2, 3]]
