"""Two machines of two ranks: each machine has one cache for the rows of the other."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import featsync
from cluster import Cluster, ClusterError, why_impossible
from featsync.world import World
from support.facts import assert_established
from support.graphs import (
    HETERO_EDGES,
    HETERO_NODES,
    HandMade,
    assert_as_stock,
    hetero3,
    hetero_store,
    planned_loader,
    ring_batches,
    ring_store,
    seed_batches,
)
from support.hosts import HostRanks
from support.parts import PARTITIONS, partitioned

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]

X = ("node", None, "x")
HOST = {"device_cache": 0.3, "cache_scope": "host"}


def rows_are_as_in_stock(rank):
    """Homogeneous and heterogeneous, nodes and edges; near rows come from memory meanwhile."""
    for how, lookahead, worker in itertools.product(PARTITIONS, (1, 8), ("inline", "thread")):
        settings = {**HOST, "lookahead": lookahead, "worker": worker}
        store = partitioned(ring_store(), how)
        loader = planned_loader(ring_batches(10), store, ["x"], ["w"], **settings)
        for _ in range(2):
            for minibatch in loader:
                assert_as_stock(minibatch, ring_store(), ["x"], ["w"])
        source = seed_batches({"item": torch.arange(6), "user": torch.arange(4)})
        source = source.sample_neighbor(hetero3(), [2, 2])
        store = partitioned(hetero_store(), how)
        loader = planned_loader(source, store, HETERO_NODES, HETERO_EDGES, **settings)
        for minibatch in loader:
            assert_as_stock(minibatch, hetero_store(), HETERO_NODES, HETERO_EDGES)


def a_row_crosses_to_a_machine_once_while_it_stays_in_its_cache(rank):
    """Both ranks of a machine want the same rows again and again."""
    x = torch.arange(3000.0).reshape(1000, 3)
    store = partitioned(ring_store(x), "owners")
    parts, world = store._features[X].featsync_parts, World.join()
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(5))[:400]
    loader = planned_loader(HandMade([ids] * 6), store, ["x"], **HOST, lookahead=2)
    for minibatch in loader:
        assert_as_stock(minibatch, ring_store(x), ["x"])
    rows = featsync.stats(loader).features[X].rows

    host_of_owner = torch.tensor(world.host_of_rank)[parts.partition.owners[ids.numpy()]]
    num_far = int((host_of_owner != world.host_of_rank[rank]).sum())
    mates = dist.new_group([0, 1]), dist.new_group([2, 3])
    crossed = torch.tensor(rows["peer"])
    dist.all_reduce(crossed, group=mates[rank // 2])
    assert crossed == num_far
    assert sum(rows.values()) == 6 * len(ids)


FACTS = [rows_are_as_in_stock, a_row_crosses_to_a_machine_once_while_it_stays_in_its_cache]


def establish(rank):
    """All facts in turn; the first that does not hold ends the launch."""
    for fact in FACTS:
        dist.barrier()
        fact(rank)


@pytest.fixture(scope="module")
def failure():
    if (reason := why_impossible(2)) is not None:
        pytest.skip(reason)
    with Cluster(hosts=2) as cluster:
        try:
            HostRanks(cluster, 2, establish, torchrun=True, timeout_s=150).results()
        except (AssertionError, ClusterError) as error:
            return str(error)
    return None


@pytest.mark.timeout(200)
@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.__name__)
def test_on_two_machines(failure, fact):
    assert_established(failure, fact, FACTS)
