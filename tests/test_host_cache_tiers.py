"""A rank's own cache in front of the one that its machine shares: each row is looked after once."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featsync.plan import FeatureKey, Want
from featsync.retention import RETENTION
from featsync.window import PlanWindow
from test_host_cache_directory import Machine

NODE = FeatureKey("node", None, "x")


class Planner:
    """What `HostCache` is to a `PlanWindow`, in one process."""

    place = ((0,), 0)

    def __init__(self, directory):
        self.directory = directory
        self.pending = deque()
        self.num_planned = 0

    def push(self, ids):
        self.directory.push(ids)
        self.pending.append(ids)

    def hold(self):
        return nullcontext()

    def plan(self):
        self.num_planned += 1
        return self.num_planned, self.directory.plan(self.num_planned, self.pending.popleft())


class Rank:
    """Plans and moves one minibatch at a time; ``rows`` counts them by where they come from."""

    def __init__(self, machine, rank, retention):
        self.machine, self.retention = machine, retention
        planner = Planner(machine.directories[rank])
        self.window = PlanWindow({NODE: retention}, {NODE: planner})
        self.own = np.full(retention.num_slots, -1)
        self.last = None

    def step(self, wants):
        plan = self.window.plan().features[NODE]
        fetch, share = plan.fetch, plan.fetch.share
        if plan.keep is not None:
            self.own[plan.keep.slots] = self.last[plan.keep.positions]
        ids = wants[NODE].ids[0].numpy()
        rows = np.full(len(ids), -1)
        sources = {
            "own": (fetch.cached_positions, self.own[fetch.cached_slots.numpy()]),
            "shared": (share.positions, self.machine.slots[share.slots.numpy()]),
            "home": (fetch.home_positions, ids[fetch.home_positions.numpy()]),
        }
        for positions, found in sources.values():
            assert (rows[positions.numpy()] == -1).all(), "a row has two sources"
            rows[positions.numpy()] = found
        assert (rows == ids).all()
        self.machine.slots[share.fill_slots.numpy()] = ids[share.fill_positions.numpy()]
        self.last = ids
        return {name: len(positions) for name, (positions, _) in sources.items()}


def run(machine, ranks, batches, window):
    """All steps, rank after rank; yields what each found where."""
    wants = [[{NODE: Want((torch.from_numpy(ids),))} for ids in step] for step in batches]
    for step in wants[:window]:
        for rank, own in zip(ranks, step, strict=True):
            rank.window.push(own)
    for number, step in enumerate(wants):
        for place, (rank, own) in enumerate(zip(ranks, step, strict=True)):
            yield number, rank.step(own)
            if number + window < len(wants):
                rank.window.push(wants[number + window][place])
        machine.check()


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 25),
    st.integers(1, 3),
    st.sampled_from([1, 3, 8]),
    st.sampled_from(["window", "static"]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.data(),
)
def test_every_row_has_one_source_and_is_right(
    num_rows, num_ranks, window, retention, has_score, seed, data
):
    own, shared = data.draw(st.integers(0, num_rows)), data.draw(st.integers(1, num_rows))
    rng = np.random.default_rng(seed)
    machine = Machine(num_rows, shared, num_ranks, window, knows_uses=retention == "window")
    score = rng.random(num_rows) if has_score else None
    ranks = [
        Rank(machine, rank, RETENTION[retention](num_rows, own, window, score))
        for rank in range(num_ranks)
    ]
    batches = [
        [rng.integers(num_rows, size=rng.integers(0, num_rows + 1)) for _ in ranks]
        for _ in range(8)
    ]
    for _ in run(machine, ranks, batches, window):
        pass


@pytest.mark.parametrize("retention", ["window", "static"])
def test_what_a_rank_holds_itself_takes_no_shared_slot(retention):
    """Twenty rows are wanted in every step, and there are slots for just so many."""
    score = np.arange(100, 0, -1.0)
    machine = Machine(100, 10, 2, 4, knows_uses=retention == "window")
    ranks = [Rank(machine, rank, RETENTION[retention](100, 10, 4, score)) for rank in range(2)]
    batches = [[np.arange(20), np.arange(20)]] * 8
    found = [rows for number, rows in run(machine, ranks, batches, 4) if number >= 2]
    assert found == [{"own": 10, "shared": 10, "home": 0}] * len(found)
