"""Several ranks, with plain and with shared tables: cases 2, 3, 15, 17, 18 and 21 to 23.

Starting ranks is slow, so one launch establishes many facts, each its own test. Run by itself under
torchrun this file checks what case 23 asks for there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import dgl.graphbolt as gb
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import featsync
from featsync.errors import ConfigError, FeatureError
from featsync.workers import WORKERS
from support.graphs import (
    HETERO_NODES,
    HandMade,
    assert_as_stock,
    assert_same,
    end_loader_workers,
    forked_workers,
    hetero_store,
    planned,
    planned_loader,
    ring20,
    ring_batches,
    ring_store,
    seeds_of,
    stock_loader,
)
from support.ranks import run_ranks

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
NOTHING = torch.tensor([], dtype=torch.int64)


def both_kinds(make_store, rank):
    """The tables of a store, private to each rank, and shared by the ranks of the host."""
    return [make_store(), featsync.share(make_store() if rank == 0 else None)]


def split_batches(num_items, **options):
    """Minibatches of two seeds each, split over the ranks."""
    items = gb.ItemSet(torch.arange(num_items) % 20, names="seed_nodes")
    return gb.DistributedItemSampler(items, batch_size=2, **options).sample_neighbor(
        ring20(), [2, 2]
    )


def epoch(loader, store, **keys):
    """Seeds of one epoch, each minibatch as stock reads it for its own ids."""
    keys = keys or {"nodes": ["x"], "edges": ["w"]}
    seeds = []
    for minibatch in loader:
        assert_as_stock(minibatch, store, **keys)
        seeds.append(seeds_of(minibatch))
    return seeds


def stock_epoch(source, num_workers=0):
    loader = stock_loader(source, ring_store(), ["x"], num_workers=num_workers)
    seeds = [seeds_of(minibatch) for minibatch in loader]
    end_loader_workers()
    return seeds


# Facts: each runs on all ranks of one launch, and raises where it does not hold.


def leaving_at_different_minibatches_is_followed_by_two_whole_epochs(rank):
    """Case 2: after 3 and after 4."""
    for store in both_kinds(ring_store, rank):
        loader = planned_loader(split_batches(40), store, ["x"], ["w"], lookahead=4)
        for i, _ in enumerate(loader):
            if i == 2 + rank:
                break

        for _ in range(2):
            seeds = epoch(loader, store)
            assert seeds == [[2 * i % 20, (2 * i + 1) % 20] for i in range(10)]


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


def train(loader):
    """Weights after two epochs of a model that every rank steps alike."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        with Join([model]):
            for minibatch in loader:
                optimizer.zero_grad()
                model(minibatch.node_features["x"]).square().mean().backward()
                optimizer.step()
    return [parameter.detach().clone() for parameter in model.module.parameters()]


def a_plain_item_sampler_is_split_as_in_stock_and_not_twice(rank):
    """Case 18: the same seeds per rank, shuffled or not."""
    for shuffle in (False, True):

        def plain(shuffle=shuffle):
            items = gb.ItemSet(torch.arange(20), names="seed_nodes")
            sampler = gb.ItemSampler(items, batch_size=2, shuffle=shuffle)
            sampler._rng = np.random.default_rng(5 + rank)  # as unalike as stock's own
            return sampler.sample_neighbor(ring20(), [2, 2])

        wanted = stock_epoch(plain())
        assert len(wanted) == 5
        for store in both_kinds(ring_store, rank):
            assert epoch(planned_loader(plain(), store, ["x"], ["w"]), store) == wanted


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


def note_process(minibatch):
    minibatch.sampled_in = os.getpid()
    return minibatch


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


TWO_RANKS = [
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
]


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


def ddp():
    return DistributedDataParallel(torch.nn.Linear(1, 1))


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


THREE_RANKS = [
    three_uneven_ranks_yield_their_stock_minibatches,
    ranks_of_a_sub_group_share_among_themselves,
]


def establish(rank, names):
    """All facts in turn; the first that does not hold ends the launch."""
    for name in names:
        globals()[name](rank)
        end_loader_workers()
        dist.barrier()


def launch(facts, world_size, timeout_s):
    """The failure of a launch, in words; ``None`` if all facts hold."""
    names = [fact.__name__ for fact in facts]
    try:
        run_ranks(establish, world_size, names, timeout_s=timeout_s)
    except AssertionError as error:
        return str(error)
    return None


def assert_established(failure, fact, facts):
    """A fact holds if its launch went well, or failed at a later one."""
    if failure is None:
        return
    failed = [i for i, other in enumerate(facts) if f"in {other.__name__}\n" in failure]
    if not failed or facts.index(fact) >= failed[0]:
        pytest.fail(failure)


@pytest.fixture(scope="module")
def two_ranks():
    return launch(TWO_RANKS, 2, timeout_s=240)


@pytest.fixture(scope="module")
def three_ranks():
    return launch(THREE_RANKS, 3, timeout_s=150)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fact", TWO_RANKS, ids=lambda fact: fact.__name__)
def test_on_two_ranks(two_ranks, fact):
    assert_established(two_ranks, fact, TWO_RANKS)


@pytest.mark.parametrize("fact", THREE_RANKS, ids=lambda fact: fact.__name__)
def test_on_three_ranks(three_ranks, fact):
    assert_established(three_ranks, fact, THREE_RANKS)


# Case 22: leaving with the other rank still at work


def leave_first(rank, store_file):
    """Rank 0 ends its epochs and exits; rank 1 is slow, and needs nobody."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store_file}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    plain, shared = both_kinds(ring_store, rank)
    for store, worker in ((plain, "thread"), (shared, "thread"), (shared, "process")):
        loader = planned_loader(split_batches(16), store, ["x"], ["w"], worker=worker, lookahead=4)
        assert len(epoch(loader, store)) == 4
    loader = planned_loader(split_batches(16), shared, ["x"], ["w"], lookahead=4)
    left = Path(f"{store_file}.left")
    for minibatch in loader:
        assert_as_stock(minibatch, shared, ["x"], ["w"])
        if rank == 1:
            deadline = time.monotonic() + 30
            while not left.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert left.exists()
            time.sleep(0.2)  # a slow step, long after the other rank went
    if rank == 0:
        left.touch()


def test_a_rank_may_exit_while_another_is_still_at_work():
    """Case 22: under mp.spawn both exit with 0, which it checks."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(leave_first, (f"{folder}/store",), nprocs=2)


# Case 23: the same under torchrun


def test_loader_workers_and_uneven_ranks_work_under_torchrun():
    """Case 23: and both ranks exit with 0, rank 0 while rank 1 is still at work (case 22)."""
    tests = Path(__file__).parent
    done = subprocess.run(
        [*TORCHRUN, "--standalone", "--nproc-per-node=2", __file__],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("done")) == [
        "done 0",
        "done 1",
    ]


def main():
    """What torchrun starts on each rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    loader_workers_work(rank)
    uneven_numbers_of_minibatches_are_normal(rank)
    store = featsync.share(ring_store() if rank == 0 else None)
    for minibatch in planned_loader(split_batches(16), store, ["x"], lookahead=4):
        assert_as_stock(minibatch, store, ["x"])
        time.sleep(0.2 * rank)  # a slow step on rank 1
    print(f"done {rank}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
