"""Fifty features that are made, used and dropped leave nothing behind: on one rank, and on two."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import featsync
from featsync.errors import ConfigError
from support.facts import Launch, name_of
from support.graphs import HandMade, planned, store_of
from support.processes import assert_no_more_handles_than, open_handles, shared_memory_names

pytestmark = pytest.mark.dgl

WANTS = [torch.arange(20), torch.arange(0, 20, 3), torch.arange(5)]


def made_and_used(i):
    """Each third learns, each third lags, the others are exact; one of five is left early."""
    feature = featsync.DynamicFeature(torch.ones(20, 4), timeout=20.0)
    optimizer = featsync.optim.SparseAdam(feature) if i % 3 == 0 else None
    store = store_of({("node", None, "x"): feature})
    pipe = planned(HandMade(WANTS), store, ["x"], staleness=int(i % 3 == 1))
    for minibatch in pipe:
        rows = minibatch.node_features["x"]
        if optimizer is None:
            feature.update(rows + 1, minibatch.input_nodes, minibatch=minibatch)
        else:
            rows.sum().backward()
            optimizer.step(minibatch)
        if i % 5 == 4:
            break
    feature.read()


def mapped_segments():
    """Shared memory without a name that this process maps."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("/dev/shm/" in line and "(deleted)" in line for line in lines)


def settles_at(count, most, seconds=20.0):
    """Whether a count comes down in time; other ranks, and threads told to end, take theirs."""
    deadline = time.monotonic() + seconds
    while count() > most and time.monotonic() < deadline:
        time.sleep(0.05)
    return count() <= most


def test_fifty_features_leave_nothing():
    for i in range(6):
        made_and_used(i)
    before, segments, names = open_handles(), mapped_segments(), shared_memory_names()
    threads = threading.active_count()
    for i in range(50):
        made_and_used(i)
    assert_no_more_handles_than(before)
    assert settles_at(mapped_segments, segments)
    assert settles_at(threading.active_count, threads)
    assert shared_memory_names() <= names


def test_features_that_were_refused_leave_nothing():
    made_and_used(0)
    before, segments = open_handles(), mapped_segments()
    for _ in range(50):
        with pytest.raises(ConfigError):
            featsync.DynamicFeature(torch.ones(20, 4), "most")
        feature = featsync.DynamicFeature(torch.ones(20, 4))
        with pytest.raises(ConfigError):
            featsync.optim.SparseAdam(feature, lr=-1.0)
    del feature
    assert_no_more_handles_than(before)
    assert settles_at(mapped_segments, segments)


def fifty_features_of_two_ranks_leave_nothing(rank):
    for i in range(6):
        made_and_used(i)
    dist.barrier()
    before, segments, names = open_handles(), mapped_segments(), shared_memory_names()
    dist.barrier()
    for i in range(50):
        made_and_used(i)
    dist.barrier()
    assert_no_more_handles_than(before)
    assert settles_at(mapped_segments, segments)
    assert shared_memory_names() <= names
    dist.barrier()


def features_that_ranks_disagree_about_leave_nothing(rank):
    made_and_used(0)
    dist.barrier()
    before, segments = open_handles(), mapped_segments()
    dist.barrier()
    for _ in range(50):
        with pytest.raises(ConfigError):
            featsync.DynamicFeature(torch.ones(20, 4 + rank), timeout=20.0)
    dist.barrier()
    assert_no_more_handles_than(before)
    assert settles_at(mapped_segments, segments)
    dist.barrier()


FACTS = [
    fifty_features_of_two_ranks_leave_nothing,
    features_that_ranks_disagree_about_leave_nothing,
]
LAUNCH = Launch(2, FACTS, timeout_s=90)


@pytest.mark.multirank
@pytest.mark.parametrize("fact", FACTS, ids=name_of)
def test_nothing_is_left_on_two_ranks(fact):
    LAUNCH.check(fact)
