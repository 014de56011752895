"""Facts about rows between machines: those of `test_two_hosts` that compare values."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import featsync
from featsync.errors import ConfigError
from featsync.exchange.engines import engine_of
from featsync.plan import FeatureKey
from featsync.world import World
from support.epochs import epoch
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
from support.tensors import awkward_rows

NODE = FeatureKey("node", None, "x")
DTYPES = (torch.bool, torch.int16, torch.float16, torch.bfloat16, torch.float64, torch.complex64)


def sweep(stock, num_each):
    """Each partition with each transport, and with windows, caches and workers in turn.

    A table of its own each time: loaders of one feature agree about its cache.
    """
    others = itertools.cycle(itertools.product((1, 3, 8), (0, 0.3), ("inline", "thread")))
    is_alone = len(World.join().ranks_of_host) == 1
    ways = [way for way in WAYS if way != "shared_memory"] if is_alone else WAYS
    for how, transport in itertools.product(PARTITIONS, ways):
        for lookahead, cache, worker in itertools.islice(others, num_each):
            settings = {"transport": transport, "lookahead": lookahead, "worker": worker}
            yield partitioned(stock, how), {**settings, "device_cache": cache}


def ways_of(feature, transport):
    """By which transports a rank gets a partitioned feature's rows, as stats call it."""
    parts, world = feature.featsync_parts, feature.featsync_parts.engine.world
    used = set()
    for other, size in enumerate(parts.partition.sizes):
        if size and other != world.rank:
            is_near = world.host_of_rank[other] == world.host_of_rank[world.rank]
            used.add("shared_memory" if is_near and transport != "p2p" else "p2p")
    return "+".join(sorted(used)) or "local"


def rows_are_as_in_stock_on_a_homogeneous_graph(rank):
    """Node and edge features, two epochs; stats say by which transports they came."""
    stock = ring_store()
    for store, settings in sweep(stock, num_each=2):
        loader = planned_loader(ring_batches(10), store, ["x"], ["w"], **settings)
        for _ in range(2):
            assert epoch(loader, stock)
        for (domain, type_, name), stats in featsync.stats(loader).features.items():
            feature = store._features[domain, type_, name]
            assert stats.transport == ways_of(feature, settings["transport"])


def rows_are_as_in_stock_on_a_heterogeneous_graph(rank):
    stock = hetero_store()
    for store, settings in sweep(stock, num_each=1):
        source = seed_batches({"item": torch.arange(6), "user": torch.arange(4)})
        source = source.sample_neighbor(hetero3(), [2, 2])
        loader = planned_loader(source, store, HETERO_NODES, HETERO_EDGES, **settings)
        for _ in range(2):
            for minibatch in loader:
                assert_as_stock(minibatch, stock, HETERO_NODES, HETERO_EDGES)


def a_transport_that_reaches_no_other_host_is_an_error_at_once(rank):
    stock = ring_store()
    loader = planned(
        ring_batches(10), partitioned(stock, "owners"), ["x"], transport="shared_memory"
    )
    with pytest.raises(ConfigError, match=r"transport = 'shared_memory' reaches none of the ranks"):
        next(iter(loader))


def rows_of_several_dtypes_arrive_bit_for_bit(rank):
    tables = {str(dtype): awkward_rows(dtype) for dtype in DTYPES}
    stock = store_of({("node", None, name): table for name, table in tables.items()})
    generator = torch.Generator().manual_seed(rank)
    for how, cache in itertools.product(PARTITIONS, (0, 8)):
        store = partitioned(stock, how)
        for transport in ("auto", "p2p"):
            ids = torch.randperm(20, generator=generator).to([torch.int32, torch.int64][rank % 2])
            loader = planned_loader(
                HandMade([ids, ids[:9], ids[5:], ids.flip(0)]), store, list(tables),
                transport=transport, device_cache=cache,
            )  # fmt: skip
            for minibatch in loader:
                assert_as_stock(minibatch, stock, list(tables))


def shared_memory_within_a_host_and_messages_between_serve_one_minibatch(rank):
    """No owner reads rows for ranks of its own host; those of the other host are all sent."""
    x = torch.arange(3000.0).reshape(1000, 3)
    stock, engine = ring_store(x), engine_of(None, 20.0)
    generator = torch.Generator().manual_seed(rank)
    for transport, sent_to in (("shared_memory", 2), ("auto", 2), ("p2p", 3)):
        feature = featsync.PartitionedFeature(
            x[250 * rank : 250 * (rank + 1)], [0, 250, 500, 750, 1000]
        )
        wanted = [torch.randperm(1000, generator=generator) for _ in range(4)]
        dist.barrier()
        before = engine.served.rows_sent
        loader = planned_loader(
            HandMade(wanted), store_of({NODE: feature}), ["x"], transport=transport
        )
        for minibatch in loader:
            assert_as_stock(minibatch, stock, ["x"])
        dist.barrier()
        assert engine.served.rows_sent - before == 4 * 250 * sent_to
        assert featsync.stats(loader).features[NODE].rows["peer"] == 4 * 250 * sent_to
