"""Plans of several ranks for one cache: what is where, in every order of planning and of moving."""

from __future__ import annotations

from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.belady import belady_hits
from featsync.errors import FeatureError
from featsync.host_cache.directory import Directory
from featsync.host_cache.layout import CacheMemory, CacheShape
from featsync.host_cache.uses import MAX_HOST_WINDOW, NoUses, UsesOfRanks
from featsync.pool import private_block
from featsync.retention.levels import CountedLevels
from featsync.row_kind import RowKind

KIND = RowKind((1,), torch.int64)


class Machine:
    """Ranks that share a cache of ``(num_rows, 1)`` int64 rows, each row being its own number."""

    def __init__(self, num_rows, num_slots, num_ranks, window, knows_uses=True):
        shape = CacheShape(num_rows, num_slots, num_ranks, window)
        block = private_block(CacheMemory.num_bytes(shape, KIND))
        block[:] = 0
        self.memory = CacheMemory(shape, KIND, block)
        self.slots = self.memory.slots.numpy()[:, 0]
        self.slots[:] = -1
        levels = CountedLevels(num_rows, num_slots, self.memory.counts, self.memory.totals)
        self.uses = [
            UsesOfRanks(self.memory.words, self.memory.progress) if knows_uses else NoUses()
            for _ in range(num_ranks)
        ]
        self.directories = [
            Directory(self.memory.directory, uses, levels, rank)
            for rank, uses in enumerate(self.uses)
        ]
        for rank, uses in enumerate(self.uses):
            uses.begin(rank, [])
        self.landed = [0] * num_ranks
        self.read = [0] * num_ranks

    def check(self):
        """Rows and slots lead to each other, and no row has two slots."""
        resident = self.directories[0].resident
        rows = resident[resident >= 0]
        assert len(np.unique(rows)) == len(rows)
        place_of_row = self.memory.directory.place_of_row
        assert (place_of_row[rows] - 1 == np.flatnonzero(resident >= 0)).all()
        assert np.count_nonzero(place_of_row) == len(rows)


class Rank:
    """One rank's minibatches of one or more features: planned in order, moved in order.

    ``batches[step][feature]`` are ids. As in a session, all features of a minibatch are planned
    before another rank plans, all are read before any is filled.
    """

    def __init__(self, machines, rank, batches):
        self.machines, self.rank, self.batches = machines, rank, batches
        self.num_pushed = self.num_planned = 0
        self.moves = deque()
        self.num_from_home = 0

    def can_push(self, window):
        return self.num_pushed < min(len(self.batches), self.num_planned + window)

    def push(self):
        for machine, ids in zip(self.machines, self.batches[self.num_pushed], strict=True):
            machine.directories[self.rank].push(ids)
        self.num_pushed += 1

    def plan(self):
        batch = self.batches[self.num_planned]
        self.num_planned += 1
        number = self.num_planned
        lookups = []
        for machine, ids in zip(self.machines, batch, strict=True):
            lookup = machine.directories[self.rank].plan(number, ids)
            machine.check()
            assert len(np.unique(lookup.fill_slots)) == len(lookup.fill_slots)
            assert (lookup.slots[lookup.fill_positions] < 0).all()
            self.num_from_home += int((lookup.slots < 0).sum())
            lookups.append((machine, number, ids, lookup))
        self.moves += [partial(self._read, *lookup) for lookup in lookups]
        self.moves += [partial(self._fill, *lookup) for lookup in lookups]

    def _read(self, machine, number, ids, lookup):
        if any(machine.landed[rank] < plan for rank, plan in lookup.read_after.items()):
            return False
        hit = lookup.slots >= 0
        assert (machine.slots[lookup.slots[hit]] == ids[hit]).all()
        machine.read[self.rank] = number
        return True

    def _fill(self, machine, number, ids, lookup):
        if any(machine.landed[r] < plan for r, plan in lookup.fill_after_landings.items()) or any(
            machine.read[r] < plan for r, plan in lookup.fill_after_readings.items()
        ):
            return False
        machine.slots[lookup.fill_slots] = ids[lookup.fill_positions]
        machine.landed[self.rank] = number
        return True


def distinct(rng, num_rows, size):
    return rng.permutation(num_rows)[:size]


def repeating(rng, num_rows, size):
    return rng.integers(num_rows, size=size)


@st.composite
def programs(draw):
    num_rows = draw(st.integers(1, 30))
    num_ranks, num_features = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = draw(st.sampled_from([distinct, repeating]))
    batches = [
        [
            [ids(rng, num_rows, rng.integers(0, num_rows + 1)) for _ in range(num_features)]
            for _ in range(draw(st.integers(0, 6)))
        ]
        for _ in range(num_ranks)
    ]
    return (
        num_rows,
        draw(st.integers(1, num_rows)),
        draw(st.sampled_from([1, 2, 8, 9, 16, 32])),
        num_features,
        batches,
        draw(st.booleans()),
        rng,
    )


@settings(max_examples=300, deadline=None)
@given(programs())
def test_every_order_of_plans_and_moves_reads_the_right_rows_and_ends(program):
    num_rows, num_slots, window, num_features, batches, knows_uses, rng = program
    machines = [
        Machine(num_rows, num_slots, len(batches), window, knows_uses) for _ in range(num_features)
    ]
    ranks = [Rank(machines, rank, own) for rank, own in enumerate(batches)]

    while True:
        # Moves of a rank happen in order; which rank does what next is anybody's guess.
        steps = [rank.push for rank in ranks if rank.can_push(window)]
        steps += [rank.plan for rank in ranks if rank.num_planned < rank.num_pushed]
        if steps and rng.random() < 0.5:
            steps[rng.integers(len(steps))]()
            continue
        waiting = [rank for rank in ranks if rank.moves]
        if not waiting and not steps:
            break
        done = [rank for rank in rng.permutation(waiting) if rank.moves[0]()]
        for rank in done:
            rank.moves.popleft()
        assert done or steps, "all wait for each other"


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 25),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(0, 2**32 - 1),
    st.data(),
)
def test_with_all_uses_known_nobody_could_find_more_rows_in_the_cache(
    num_rows, num_ranks, num_batches, seed, data
):
    """Belady's rule with bypass, over the minibatches of all ranks in the order of plans."""
    num_slots = data.draw(st.integers(1, num_rows))
    rng = np.random.default_rng(seed)
    machine = Machine(num_rows, num_slots, num_ranks, MAX_HOST_WINDOW)
    batches = [
        [distinct(rng, num_rows, rng.integers(0, num_rows + 1)) for _ in range(num_batches)]
        for _ in range(num_ranks)
    ]
    ranks = [Rank([machine], rank, [[ids] for ids in own]) for rank, own in enumerate(batches)]
    for rank in ranks:
        for _ in range(num_batches):
            rank.push()
    for _ in range(num_batches):
        for rank in ranks:
            rank.plan()

    in_order = [ids for step in zip(*batches, strict=True) for ids in step]
    wanted = sum(map(len, in_order))
    found = wanted - sum(rank.num_from_home for rank in ranks)
    best = int(belady_hits(in_order, num_rows, num_slots).sum())
    # Time counts steps, so between two ranks' uses in one step the order is not known.
    assert found <= best
    if num_ranks == 1:
        assert found == best


def test_a_row_that_two_ranks_want_in_one_step_is_brought_once():
    machine = Machine(100, 10, 2, 2)
    both = np.arange(10)
    ranks = [Rank([machine], rank, [[both], [both]]) for rank in range(2)]
    for _ in range(2):
        for rank in ranks:
            rank.push()
    for _ in range(2):
        for rank in ranks:
            rank.plan()
    assert [rank.num_from_home for rank in ranks] == [10, 0]


def test_a_row_that_a_minibatch_names_twice_takes_one_slot():
    machine = Machine(10, 4, 1, 1)
    (directory,) = machine.directories
    for number, found in enumerate(([-1] * 3, [0, 1, 0]), 1):
        directory.push(np.array([7, 2, 7]))
        lookup = directory.plan(number, np.array([7, 2, 7]))
        rows = machine.directories[0].resident[lookup.slots]
        assert (lookup.slots < 0).tolist() == [slot < 0 for slot in found]
        assert found[0] < 0 or rows.tolist() == [7, 2, 7]
    assert sorted(directory.resident.tolist()) == [-1, -1, 2, 7]


def test_what_a_rank_that_left_was_to_use_holds_slots_no_longer_than_it_said():
    machine = Machine(10, 2, 2, 4)
    stays, leaves = machine.directories
    leaves.push(np.array([0, 1]))
    leaves.push(np.array([0, 1]))
    leaves.plan(1, np.array([0, 1]))
    machine.uses[1].end(1)

    batches = [np.array([2, 3])] * 4
    for ids in batches:
        stays.push(ids)
    hits = [int((stays.plan(n, ids).slots >= 0).sum()) for n, ids in enumerate(batches, 1)]
    assert hits == [0, 0, 2, 2]


def test_bad_ids_are_refused_and_change_nothing():
    machine = Machine(10, 5, 2, 1)
    before = [array.copy() for array in machine.memory.directory]
    directory = machine.directories[0]
    for bad in ([3, -1], [10]):
        with pytest.raises(FeatureError, match="of a table of 10 rows"):
            directory.push(np.array(bad))
    for array, old in zip(machine.memory.directory, before, strict=True):
        assert (array == old).all()
    assert machine.memory.words.sum() == 0
