"""A rank of another machine is killed, and a link goes down: seen by whoever needs them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import featsync
from cluster import Cluster, why_impossible
from featsync.errors import PeerError, PeerTimeoutError
from featsync.plan import FeatureKey
from support.graphs import HandMade, assert_same, store_of
from support.hosts import HostRanks
from support.processes import wait_until

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]

NODE = FeatureKey("node", None, "x")


def read_on(rank):
    """Ranks 0 and 2 have a table in common, and 1 and 3: on two hosts. Says how it ended."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, place = groups[rank % 2], rank // 2
    x = torch.arange(40_000.0).reshape(20_000, 2)
    bounds = [0, 10_000, 20_000]
    part = x[bounds[place] : bounds[place + 1]]
    feature = featsync.PartitionedFeature(part, bounds, group, timeout=5.0)
    ids = torch.arange(0, 20_000, 7)
    source = HandMade([ids] * 100_000).plan_feature(store_of({NODE: feature}), ["x"])
    dist.barrier()
    try:
        for step, minibatch in enumerate(source.sync_feature(process_group=group, timeout=5.0)):
            assert_same(minibatch.node_features["x"], x[ids])
            if step == 5:
                (Path(os.environ["TEST_FOLDER"]) / f"reads.{rank}").touch()
            time.sleep(0.01)
    except PeerError as error:
        seen = (type(error), error.peer, str(error), time.time())
        (Path(os.environ["TEST_FOLDER"]) / f"saw.{rank}").touch()
        return seen
    return None


@pytest.mark.timeout(150)
def test_a_killed_rank_and_a_lost_link_are_named_by_whoever_needs_them():
    if (reason := why_impossible()) is not None:
        pytest.skip(reason)
    with Cluster(hosts=2) as cluster:
        run = HostRanks(cluster, 2, read_on, together=False, timeout_s=120)
        reads = [run.folder / f"reads.{rank}" for rank in range(4)]
        assert wait_until(lambda: all(path.exists() for path in reads), 90)
        (victim,) = [p for p in cluster.machines[1].processes() if p.rank == 2]
        os.kill(victim.pid, signal.SIGKILL)
        killed = time.time()
        assert wait_until((run.folder / "saw.0").exists, 20)
        cluster.link.set_up(1, False)
        unplugged = time.time()
        kinds, peers, words, moments = zip(
            *(seen or (None,) * 4 for seen in run.results(dead=[2])), strict=True
        )

    assert kinds == (PeerError, PeerTimeoutError, None, PeerTimeoutError)
    assert peers == (
        "rank 1 (global rank 2)", "rank 1 (global rank 3)", None, "rank 0 (global rank 1)",
    )  # fmt: skip
    assert "has ended, and with it went the rows that it held" in words[0]
    assert "waited 5 s for rows of rank 1 (global rank 3), which gave no sign of life" in words[1]
    assert moments[0] - killed < 10
    assert all(4 < moments[rank] - unplugged < 30 for rank in (1, 3))
