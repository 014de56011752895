"""Rows that change on two machines when one of them fails: an error on the other, that names it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import featsync
from cluster import Cluster, why_impossible
from featsync.errors import ConfigError, PeerError
from featsync.plan import FeatureKey
from support.graphs import HandMade, planned, store_of
from support.hosts import HostRanks
from support.lost_hosts import Seen, kill_and_unplug

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]

X = FeatureKey("node", None, "x")
ROWS = torch.arange(0, 2_000, 7)


def pipe_of(feature, num_batches, rows=ROWS, **settings):
    return planned(
        HandMade([rows] * num_batches),
        store_of({tuple(X): feature}),
        ["x"],
        timeout=5.0,
        **settings,
    )


def train_on(rank):
    """Ranks 0 and 2 train rows together, and 1 and 3: on two machines. Says how it ended."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    feature = featsync.DynamicFeature(torch.zeros(2_000, 2), "sum", group, timeout=5.0)
    dist.barrier()
    before = 0.0
    try:
        for step, minibatch in enumerate(pipe_of(feature, 100_000, process_group=group)):
            rows = minibatch.node_features["x"]
            assert rows.eq(2 * step).all()
            before = float(rows[0, 0])
            feature.update(rows + 1, ROWS, minibatch=minibatch)
            if step == 5:
                (Path(os.environ["TEST_FOLDER"]) / f"trains.{rank}").touch()
            time.sleep(0.01)
    except PeerError as error:
        seen = Seen(type(error), error.peer, str(error), time.time(), before)
        (Path(os.environ["TEST_FOLDER"]) / f"saw.{rank}").touch()
        return seen
    return None


@pytest.mark.timeout(150)
def test_a_killed_rank_and_a_lost_link_are_named_by_the_others():
    if (reason := why_impossible()) is not None:
        pytest.skip(reason)
    found = kill_and_unplug(train_on, "trains")
    # Whoever trains on is at no other step than the rank that it waits for.
    assert found[1].extra == found[3].extra


def errors_of_one_machine_reach_the_other(rank):
    """Machine 1 has 16 MiB of shared memory: what rank 0 writes to its rows finds no room there."""
    kind = torch.zeros(20, 1 << 16)
    feature = featsync.DynamicFeature(kind, timeout=20.0)
    pipe = pipe_of(feature, 4, torch.arange(20))
    rows = torch.arange(10, 20).repeat(6 if rank == 0 else 0)

    def train():
        for _ in pipe:
            feature.update(torch.ones(len(rows), 1 << 16), rows)

    with pytest.raises(PeerError) as caught:
        train()
    if rank == 0:
        assert "rank 1 could not serve rows of its machine: shared memory of" in str(caught.value)
    else:
        assert "rank 0 failed while it changed rows" in str(caught.value)
    # Nothing hangs, and another feature works.
    dist.barrier()
    optimizers = [featsync.optim.SparseSGD, featsync.optim.SparseAdagrad]
    learner = featsync.DynamicFeature(torch.zeros(20, 2), timeout=20.0)
    with pytest.raises(ConfigError, match=r"ranks disagree about what they share.*SparseSGD"):
        optimizers[rank](learner, lr=0.1)


@pytest.mark.timeout(120)
def test_errors_of_one_machine_reach_the_other():
    if (reason := why_impossible()) is not None:
        pytest.skip(reason)
    with Cluster(hosts=2, shm=["64m", "16m"]) as cluster:
        HostRanks(cluster, 1, errors_of_one_machine_reach_the_other, timeout_s=100).results()
