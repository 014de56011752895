"""One cache for the ranks of a machine: values, sharing, leaving, errors; rows come point to point.

On one machine rows of other ranks are only far if they are asked for by ``p2p``, so that is asked
for here. `test_two_hosts` has the same between machines.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import featsync
from support.graphs import HandMade, assert_as_stock, planned, planned_loader, ring_store
from support.parts import PARTITIONS, partitioned
from support.ranks import run_ranks

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]

NUM_ROWS = 2000


def table():
    return torch.arange(NUM_ROWS * 3.0).reshape(NUM_ROWS, 3)


def skewed(num_batches, seed, size=300):
    """Distinct ids of which low ones come more often."""
    generator = torch.Generator().manual_seed(seed)
    draws = [NUM_ROWS * torch.rand(size, generator=generator) ** 2 for _ in range(num_batches)]
    return [draw.long().unique()[torch.randperm(len(draw.long().unique()), generator=generator)] for draw in draws]


def random_ids(rank, world_size):
    for how, worker, lookahead, retention in itertools.product(
        PARTITIONS, ("inline", "thread"), (1, 3, 8), ("window", "static")
    ):
        store = partitioned(ring_store(table()), how)
        loader = planned_loader(
            HandMade(skewed(25, rank)), store, ["x"], transport="p2p", device_cache=0.1,
            cache_scope="host", lookahead=lookahead, worker=worker, retention=retention,
        )
        for _ in range(2):
            for minibatch in loader:
                assert_as_stock(minibatch, ring_store(table()), ["x"])
        stats = featsync.stats(loader)
        print(rank, how, worker, lookahead, retention, stats.features)
        assert stats.rows == 2 * sum(map(len, skewed(25, rank)))
        assert stats.bytes["cache"] > 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_values(world_size):
    run_ranks(random_ids, world_size, world_size, timeout_s=120)
