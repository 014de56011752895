"""A rank of another machine is killed, and a link goes down: seen by whoever needs them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import featsync
from cluster import why_impossible
from featsync.errors import PeerError
from featsync.plan import FeatureKey
from support.graphs import HandMade, assert_same, store_of
from support.lost_hosts import Seen, kill_and_unplug

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
        seen = Seen(type(error), error.peer, str(error), time.time())
        (Path(os.environ["TEST_FOLDER"]) / f"saw.{rank}").touch()
        return seen
    return None


@pytest.mark.timeout(150)
def test_a_killed_rank_and_a_lost_link_are_named_by_whoever_needs_them():
    if (reason := why_impossible()) is not None:
        pytest.skip(reason)
    found = kill_and_unplug(read_on, "reads")
    words = "waited 5 s for rows of rank 1 (global rank 3), which gave no sign of life"
    assert words in found[1].words
