"""Worker ``process`` and partitioned tables: rows, caches, and other workers on the same features.

Each function before the test is a fact, see `support.facts`.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import featsync
from support.epochs import epoch
from support.facts import Launch, name_of
from support.graphs import (
    HETERO_EDGES,
    HETERO_NODES,
    HandMade,
    assert_as_stock,
    hetero3,
    hetero_store,
    planned,
    planned_loader,
    ring_batches,
    ring_store,
    seed_batches,
    store_of,
)
from support.parts import PARTITIONS, WAYS, partitioned

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]

NUM_ROWS = 600
CACHES = ({"device_cache": 0}, {"device_cache": 0.3}, {"device_cache": 0.3, "cache_scope": "host"})


def wide_table():
    return torch.arange(NUM_ROWS * 3.0).reshape(NUM_ROWS, 3)


def skewed(num_batches, seed):
    """Ids of which low ones come more often, some of them twice in a minibatch."""
    generator = torch.Generator().manual_seed(seed)
    return list((NUM_ROWS * torch.rand(num_batches, 200, generator=generator) ** 3).long())


def drain(loader, stock, names):
    for minibatch in loader:
        assert_as_stock(minibatch, stock, names)
    return featsync.stats(loader)


def rows_are_as_in_stock_on_a_homogeneous_graph(rank):
    for how, transport, cache in itertools.product(PARTITIONS, WAYS, CACHES):
        store = partitioned(ring_store(), how)
        loader = planned_loader(
            ring_batches(10), store, ["x"], ["w"], worker="process", transport=transport, **cache
        )
        for _ in range(2):
            assert epoch(loader, ring_store())


def rows_are_as_in_stock_on_a_heterogeneous_graph(rank):
    for how, transport, cache in itertools.product(PARTITIONS, WAYS, CACHES):
        store = partitioned(hetero_store(), how)
        source = seed_batches({"item": torch.arange(6), "user": torch.arange(4)})
        source = source.sample_neighbor(hetero3(), [2, 2])
        loader = planned_loader(
            source, store, HETERO_NODES, HETERO_EDGES,
            worker="process", transport=transport, **cache,
        )  # fmt: skip
        for _ in range(2):
            for minibatch in loader:
                assert_as_stock(minibatch, hetero_store(), HETERO_NODES, HETERO_EDGES)


def rows_of_other_ranks_are_cached(rank):
    for how, cache in itertools.product(PARTITIONS, CACHES[1:]):
        store = partitioned(ring_store(wide_table()), how)
        loader = planned_loader(
            HandMade(skewed(12, rank)), store, ["x"], worker="process", transport="p2p", **cache
        )
        for _ in range(2):
            stats = drain(loader, ring_store(wide_table()), ["x"])
        assert stats.bytes["cache"] > 0
        assert "by a thread" in stats.features["node", None, "x"].why


def one_cache_may_be_of_the_rank_and_of_its_machine(rank):
    """Half of the slots hold rows that each rank holds, whatever would be best here."""
    store = partitioned(ring_store(wide_table()), "owners")
    loader = planned_loader(
        HandMade(skewed(12, rank)), store, ["x"], worker="process", transport="p2p", **CACHES[2]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "featsync.caches.num_held_by_each", lambda uses, num_slots, *others: num_slots // 2
        )
        for _ in range(2):
            stats = drain(loader, ring_store(wide_table()), ["x"])
    why = stats.features["node", None, "x"].why
    assert why.count("rows cached by window") == 2
    assert "once for the" in why


def a_shared_table_beside_a_split_one_is_moved_by_the_process(rank):
    y = -wide_table()
    features = {
        ("node", None, "x"): partitioned(ring_store(wide_table()), "owners")._features[
            "node", None, "x"
        ],
        ("node", None, "y"): featsync.share(ring_store(y))._features["node", None, "x"],
    }
    stock = store_of({("node", None, "x"): wide_table(), ("node", None, "y"): y})
    loader = planned_loader(
        HandMade(skewed(12, rank)), store_of(features), ["x", "y"],
        worker="process", transport="p2p", device_cache=0.3,
    )  # fmt: skip
    for _ in range(2):
        stats = drain(loader, stock, ["x", "y"])
    assert all(feature.rows["cache"] > 0 for feature in stats.features.values())


def loaders_with_other_workers_share_a_cache(rank):
    """Whoever comes first has the cache made, and the next may read the table in another way."""
    workers = (("thread", "process"), ("process", "thread"), ("inline", "process"))
    for how, ways in itertools.product(PARTITIONS, itertools.permutations(WAYS[1:])):
        for first, second in workers:
            store = partitioned(ring_store(wide_table()), how)
            for worker, transport in zip((first, second, first), (*ways, ways[1]), strict=True):
                loader = planned_loader(
                    HandMade(skewed(4, rank)), store, ["x"],
                    worker=worker, transport=transport, device_cache=0.3,
                )  # fmt: skip
                drain(loader, ring_store(wide_table()), ["x"])


def a_loader_nested_in_another_reads_from_home(rank):
    for first, second in itertools.permutations(("thread", "process"), 2):
        store = partitioned(ring_store(wide_table()), "owners")
        settings = {"transport": "p2p", "device_cache": 0.3}
        outer = planned_loader(HandMade(skewed(4, rank)), store, ["x"], worker=first, **settings)
        inner = planned(HandMade(skewed(3, rank + 9)), store, ["x"], worker=second, **settings)
        for minibatch in outer:
            assert drain(inner, ring_store(wide_table()), ["x"]).bytes["cache"] == 0
            assert_as_stock(minibatch, ring_store(wide_table()), ["x"])
        assert featsync.stats(outer).bytes["cache"] > 0


LAUNCH = Launch(
    2,
    [
        rows_are_as_in_stock_on_a_homogeneous_graph,
        rows_are_as_in_stock_on_a_heterogeneous_graph,
        rows_of_other_ranks_are_cached,
        one_cache_may_be_of_the_rank_and_of_its_machine,
        a_shared_table_beside_a_split_one_is_moved_by_the_process,
        loaders_with_other_workers_share_a_cache,
        a_loader_nested_in_another_reads_from_home,
    ],
)


@pytest.mark.parametrize("fact", LAUNCH.facts, ids=name_of)
def test_partitioned_tables(fact):
    LAUNCH.check(fact)
