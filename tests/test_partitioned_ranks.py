"""Partitioned tables on several ranks: cases 12, 14, 15, 17, 18 and 21 to 23, by each transport.

Starting ranks is slow, so one launch establishes many facts, each its own test.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import dgl.graphbolt as gb
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

import featsync
from featsync.errors import ConfigError, FeatureError, PeerError
from featsync.transports import TRANSPORTS
from featsync.workers import WORKERS
from support.graphs import (
    HETERO_EDGES,
    HETERO_NODES,
    HandMade,
    assert_as_stock,
    assert_same,
    end_loader_workers,
    forked_workers,
    hetero3,
    hetero_store,
    planned,
    planned_loader,
    ring_batches,
    ring_store,
    seed_batches,
    seeds_of,
    store_of,
)
from support.parts import PARTITIONS, part_of, partition_of, partitioned
from support.ranks import run_ranks
from test_cases_ranks import (
    assert_established,
    ddp,
    epoch,
    split_batches,
    stock_epoch,
    train,
)
from test_cases_values import FLOATS, INTEGERS, awkward_rows

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]

WAYS = ("auto", *TRANSPORTS)
NOTHING = torch.tensor([], dtype=torch.int64)


def settings_of_ways():
    """Each transport with each partition, and with windows, caches and workers in turn."""
    others = itertools.cycle(
        itertools.product((1, 3, 8), (0, 0.3), [name for name in WORKERS if name != "process"])
    )
    for how, transport in itertools.product(PARTITIONS, WAYS):
        for lookahead, device_cache, worker in itertools.islice(others, 3):
            yield (
                how,
                {
                    "transport": transport,
                    "lookahead": lookahead,
                    "device_cache": device_cache,
                    "worker": worker,
                },
            )


# Facts: each runs on all ranks of one launch, and raises where it does not hold.


def rows_are_as_in_stock_on_a_homogeneous_graph(rank):
    for how, settings in settings_of_ways():
        store = partitioned(ring_store(), how)
        loader = planned_loader(ring_batches(10), store, ["x"], ["w"], **settings)
        for _ in range(2):
            assert epoch(loader, ring_store())


def rows_are_as_in_stock_on_a_heterogeneous_graph(rank):
    for how, settings in settings_of_ways():
        store = partitioned(hetero_store(), how)
        source = seed_batches({"item": torch.arange(6), "user": torch.arange(4)})
        source = source.sample_neighbor(hetero3(), [2, 2])
        loader = planned_loader(source, store, HETERO_NODES, HETERO_EDGES, **settings)
        for _ in range(2):
            for minibatch in loader:
                assert_as_stock(minibatch, hetero_store(), HETERO_NODES, HETERO_EDGES)


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


def every_dtype_and_layout_arrives_bit_for_bit(rank):
    """Cases 12 and 14: NaN payloads and -0.0 included; parts with strides of their own."""
    tables = {str(dtype): awkward_rows(dtype) for dtype in INTEGERS + FLOATS}
    base = torch.arange(160.0).reshape(20, 8)
    tables |= {"slice": base[:, ::2], "transposed": base.reshape(8, 20).t()}
    tables |= {"expanded": torch.arange(20.0).reshape(20, 1).expand(20, 4)}
    tables |= {"empty": torch.empty(20, 0), "deep": torch.arange(120.0).reshape(20, 2, 3)}
    stock = store_of({("node", None, name): table for name, table in tables.items()})
    for how, transport in itertools.product(PARTITIONS, WAYS):
        store = partitioned(stock, how)
        for dtype in (torch.int32, torch.int64):
            ids = torch.randperm(20, generator=torch.Generator().manual_seed(rank)).to(dtype)
            batches = HandMade([ids, ids[:9], ids[5:], ids.flip(0)])
            for cache in (0, 8):
                loader = planned_loader(
                    batches, store, list(tables), transport=transport, device_cache=cache
                )
                for minibatch in loader:
                    assert_as_stock(minibatch, stock, list(tables))


def zero_rows_on_one_rank_are_delivered_as_such(rank):
    """Case 15: (0, d), right dtype and device; and nobody waits."""
    some = torch.tensor([3, 9])
    wanted = [some, some, NOTHING] if rank == 0 else [NOTHING, some, NOTHING]
    stock = ring_store(torch.ones(20, 3, dtype=torch.float16))
    for how, transport in itertools.product(PARTITIONS, WAYS):
        loader = planned_loader(
            HandMade(wanted), partitioned(stock, how), ["x"], transport=transport
        )
        for minibatch in loader:
            assert_as_stock(minibatch, stock, ["x"])


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


def parts_in_files_stay_there(rank):
    """Each rank maps its own part only; those of ranks on the same machine are mapped as well."""
    x = torch.arange(60.0).reshape(20, 3)
    world = dist.get_world_size()
    for how, transport in itertools.product(PARTITIONS, WAYS):
        partition = partition_of(how, 20, world)
        part = part_of(x, partition, rank, world)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "part"
            path.write_bytes(part.numpy().tobytes())
            mapped = torch.from_file(
                str(path), shared=True, size=part.numel(), dtype=part.dtype
            ) if part.numel() else part  # fmt: skip
            feature = featsync.PartitionedFeature(mapped.reshape(part.shape), partition)
            store = store_of({("node", None, "x"): feature})
            loader = planned_loader(
                HandMade([torch.randperm(20) for _ in range(4)]), store, ["x"], transport=transport
            )
            for minibatch in loader:
                assert_as_stock(minibatch, ring_store(x), ["x"])
            dist.barrier()


def parts_without_rows_and_conjugated_ones_are_no_files(rank):
    """What lies in no file as it is has to be handed over in some other way, or not at all."""
    world = dist.get_world_size()
    for _ in range(20):  # whoever is late must not find them gone
        feature = featsync.PartitionedFeature(torch.empty(0, 3), [0] * (world + 1))
        assert_same(feature.read(), torch.empty(0, 3))
    x = torch.randn(20, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    even = [20 * i // world for i in range(world + 1)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part"
        path.write_bytes(part_of(x, even, rank, world).numpy().tobytes())
        num_rows = even[rank + 1] - even[rank]
        mapped = torch.from_file(str(path), shared=True, size=3 * num_rows, dtype=x.dtype)
        feature = featsync.PartitionedFeature(mapped.view(num_rows, 3).conj(), even)
        assert_same(feature.read(), x.conj().resolve_conj())
        dist.barrier()


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
    rows_are_as_in_stock_on_a_homogeneous_graph,
    rows_are_as_in_stock_on_a_heterogeneous_graph,
    random_ids_of_many_rows_arrive,
    every_dtype_and_layout_arrives_bit_for_bit,
    zero_rows_on_one_rank_are_delivered_as_such,
    uneven_numbers_of_minibatches_are_normal,
    gradients_are_as_in_stock,
    leaving_at_different_minibatches_is_followed_by_two_whole_epochs,
    an_error_on_one_rank_is_raised_on_the_others_too,
    a_validation_loop_on_one_rank_disturbs_nobody,
    loader_workers_work,
    parts_in_files_stay_there,
    parts_without_rows_and_conjugated_ones_are_no_files,
    parts_that_make_no_table_are_refused_on_every_rank,
    a_sub_group_has_tables_of_its_own,
]


def establish(rank, names):
    """All facts in turn; the first that does not hold ends the launch."""
    for name in names:
        globals()[name](rank)
        end_loader_workers()
        dist.barrier()


# What depends on how many ranks there are; the rest is established on two.
OF_MANY_RANKS = [
    random_ids_of_many_rows_arrive,
    uneven_numbers_of_minibatches_are_normal,
    an_error_on_one_rank_is_raised_on_the_others_too,
    parts_that_make_no_table_are_refused_on_every_rank,
    a_sub_group_has_tables_of_its_own,
]
LAUNCHES = {2: FACTS, 3: OF_MANY_RANKS, 4: OF_MANY_RANKS}


def launch(world_size):
    names = [fact.__name__ for fact in LAUNCHES[world_size]]
    try:
        run_ranks(establish, world_size, names, timeout_s=150)
    except AssertionError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def launches():
    return {}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("world_size", "fact"),
    [(size, fact) for size, facts in LAUNCHES.items() for fact in facts],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_partitioned_tables(launches, world_size, fact):
    if world_size not in launches:
        launches[world_size] = launch(world_size)
    assert_established(launches[world_size], fact, LAUNCHES[world_size])


# Case 22: leaving with the other rank still at work


def leave_first(rank, store_file):
    """Rank 0 ends its epoch and exits; rank 1 is slow, and still needs its rows."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store_file}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    store = partitioned(ring_store(), "range")
    loader = planned_loader(split_batches(16), store, ["x"], ["w"], lookahead=4, transport="p2p")
    left = Path(f"{store_file}.left")
    for minibatch in loader:
        assert_as_stock(minibatch, ring_store(), ["x"], ["w"])
        if rank == 1:
            deadline = time.monotonic() + 30
            while not left.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert left.exists()
            time.sleep(0.2)
    if rank == 0:
        dist.destroy_process_group()
        left.touch()


def test_a_rank_serves_its_rows_until_the_others_are_done():
    """Case 22: both exit with 0, which spawn checks; rank 0 lingers, its group destroyed."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(leave_first, (f"{folder}/store",), nprocs=2)


def test_seeds_are_split_as_in_stock():
    """Case 18: nothing of featsync splits them again."""
    items = gb.ItemSet(torch.arange(4), names="seed_nodes")
    loader = planned_loader(
        gb.ItemSampler(items, batch_size=2),
        store_of({("node", None, "x"): featsync.PartitionedFeature(torch.ones(4, 1), [0, 4])}),
    )
    assert [seeds_of(minibatch) for minibatch in loader] == [[0, 1], [2, 3]]
