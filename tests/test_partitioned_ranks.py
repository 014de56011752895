"""Partitioned tables and what ranks do: cases 17, 18, 21 and 23, by each transport.

Each function before the tests is a fact, see `support.facts`.
"""

from __future__ import annotations

import itertools
import time
from contextlib import nullcontext

import dgl.graphbolt as gb
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

import featsync
from featsync.errors import ConfigError, FeatureError, PeerError
from support.epochs import ddp, epoch, split_batches, stock_epoch, train
from support.facts import Launch, name_of
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
from support.loader_workers import end_loader_workers, forked_workers
from support.parts import (
    PARTITIONS,
    WAYS,
    part_of,
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
            slow_unless(rank == 1, [good, bad if rank == 1 else good] + 200 * [good]),
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


def slow_unless(hurries, minibatches):
    """Minibatches that take their time, unless the rank hurries into its error."""

    def pause(minibatch):
        time.sleep(0 if hurries else 0.1)
        return minibatch

    return HandMade(minibatches).transform(pause)


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
    """Case 23: two of them, forked."""
    with forked_workers():
        for how, transport in itertools.product(PARTITIONS, WAYS):
            loader = planned_loader(
                split_batches(24), partitioned(ring_store(), how), ["x"], ["w"],
                num_workers=2, transport=transport,
            )  # fmt: skip
            for _ in range(2):
                assert epoch(loader, ring_store())
            end_loader_workers()


def parts_that_make_no_table_are_refused_on_every_rank(rank):
    """Bad input: all ranks are told the same, nobody waits, and the next one works."""
    world = dist.get_world_size()
    x = torch.arange(20.0).reshape(20, 1)
    even = [20 * i // world for i in range(world + 1)]
    mine = part_of(x, even, rank, world)
    owners = torch.arange(20) % world
    bad = [
        (mine[: len(mine) - (rank == 1)], even, "parts leave rows out or overlap: rank 1 brings"),
        (mine.to([torch.float32, torch.float64][rank == 1]), even, "disagree about what a row is"),
        (mine.expand(-1, 1 + (rank == 1)), even, "disagree about what a row is"),
        (mine, [0, *even[1:-1], 20 + rank], "gave another partition than rank 0"),
        (mine, owners + 1, f"row {world - 1} is given to rank {world} of {world}"),
        (mine, [5, *even[1:]], "the bounds leave out rows 0 to 4"),
        (mine, even[:-1], f"is for {world - 1} ranks, but {world} take part"),
    ]
    for part, partition, words in bad:
        with pytest.raises(ConfigError, match=words):
            featsync.PartitionedFeature(part, partition)
    with pytest.raises((ConfigError, PeerError), match="local_rows is"):
        featsync.PartitionedFeature(mine if rank else None, even)
    feature = featsync.PartitionedFeature(mine, even)
    assert_same(feature.read(torch.arange(20)), x)
    with pytest.raises(ConfigError, match="cannot be updated"):
        feature.update(x)
    with pytest.raises(FeatureError, match="id 20 is outside"):
        feature.read(torch.tensor([20]))


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
    parts_that_make_no_table_are_refused_on_every_rank,
    a_sub_group_has_tables_of_its_own,
]


# What depends on how many ranks there are; the rest is established on two.
OF_MANY_RANKS = [
    random_ids_of_many_rows_arrive,
    uneven_numbers_of_minibatches_are_normal,
    an_error_on_one_rank_is_raised_on_the_others_too,
    parts_that_make_no_table_are_refused_on_every_rank,
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


def test_seeds_are_split_as_in_stock():
    """Case 18: nothing of featsync splits them again."""
    items = gb.ItemSet(torch.arange(4), names="seed_nodes")
    loader = planned_loader(
        gb.ItemSampler(items, batch_size=2),
        store_of({("node", None, "x"): featsync.PartitionedFeature(torch.ones(4, 1), [0, 4])}),
    )
    assert [seeds_of(minibatch) for minibatch in loader] == [[0, 1], [2, 3]]
