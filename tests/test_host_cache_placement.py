"""How a rank's slots are split between its own cache and the one that its machine shares."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featsync.host_cache.placement import RowCosts, SharesFound, num_held_by_each, shares_found
from featsync.retention import RETENTION
from test_host_cache_directory import Machine

NUM_ROWS, NUM_RANKS = 3000, 2
CHANCES = np.minimum(0.9, 30.0 / np.arange(1, NUM_ROWS + 1))  # some 150 rows a minibatch
HOMES = (18.0, 3.5, 1.0)  # costs of home, where a peer costs 1 and local memory a half


def costs_of(home):
    return RowCosts(0.5, 1.0, home)


@given(
    st.lists(st.integers(1, 50), min_size=4, max_size=30),
    st.integers(1, 4),
    st.data(),
)
def test_without_a_window_the_rows_used_most_are_held(uses, num_ranks, data):
    """The best rows by each rank, the next ones once; counted row by row, but for one of each."""
    own, shared = data.draw(st.integers(0, len(uses))), data.draw(st.integers(0, len(uses)))
    found = shares_found(np.array(uses), own, shared, num_ranks, window=0)
    total, most = sum(uses), max(uses) / sum(uses)
    by_use = sorted(uses, reverse=True)
    assert found.own == pytest.approx(sum(by_use[:own]) / total)
    # A row that is only partly held by each rank is held once for the rest of its uses.
    rest = sum(by_use[own : own + shared]) / total
    assert found.shared == pytest.approx(rest, abs=most + 1e-9)
    assert sum(found) == pytest.approx(1.0)


def replayed(num_own, num_shared, window, retention):
    """What ranks find where, with minibatches of independent rows and the real planners."""
    rng = np.random.default_rng(0)
    batches = [
        [np.flatnonzero(rng.random(NUM_ROWS) < CHANCES) for _ in range(NUM_RANKS)]
        for _ in range(60)
    ]
    knows_uses = retention == "window"
    machine = Machine(NUM_ROWS, max(num_shared, 1), NUM_RANKS, window, knows_uses)
    caches = [RETENTION[retention](NUM_ROWS, num_own, window, CHANCES) for _ in range(NUM_RANKS)]
    rest = [[] for _ in range(NUM_RANKS)]
    rows = np.zeros(3)

    def push(step, rank):
        ids = batches[step][rank]
        rest[rank].append(ids[~caches[rank].push(ids)])
        machine.directories[rank].push(rest[rank][-1])

    for step in range(window):
        for rank in range(NUM_RANKS):
            push(step, rank)
    for step in range(len(batches)):
        for rank, cache in enumerate(caches):
            lookup = machine.directories[rank].plan(step + 1, rest[rank][step])
            own = int((cache.hits() >= 0).sum())
            shared = int((lookup.slots >= 0).sum()) if num_shared else 0
            cache.settle()
            if step >= len(batches) // 2:
                rows += (own, shared, len(batches[step][rank]) - own - shared)
            if step + window < len(batches):
                push(step + window, rank)
    return SharesFound(*(rows / rows.sum()))


@pytest.mark.parametrize("retention", ["window", "static"])
@pytest.mark.parametrize(
    ("num_own", "num_shared"), [(0, 200), (30, 140), (100, 0), (200, 400), (0, 1500), (400, 300)]
)
def test_what_is_found_is_what_is_computed(retention, num_own, num_shared):
    window = 6
    found = replayed(num_own, num_shared, window, retention)
    window = window if retention == "window" else 0
    computed = shares_found(CHANCES, num_own, num_shared, NUM_RANKS, window)
    assert tuple(computed) == pytest.approx(tuple(found), abs=0.03)


def test_counts_are_as_good_as_probabilities():
    counts = np.random.default_rng(0).binomial(2000, CHANCES / CHANCES.max())
    by_counts = shares_found(counts, 100, 200, NUM_RANKS, 8)
    by_chances = shares_found(CHANCES / 0.9, 100, 200, NUM_RANKS, 8)
    assert tuple(by_counts) == pytest.approx(tuple(by_chances), abs=0.01)


@pytest.mark.parametrize("window", [0, 1, 8])
@pytest.mark.parametrize("num_slots", [50, 300, 1200])
def test_the_split_follows_the_costs_and_costs_no_more_than_either_end(window, num_slots):
    chosen = []
    for home in HOMES:
        costs = costs_of(home)
        own = num_held_by_each(CHANCES, num_slots, NUM_RANKS, window, costs)
        seconds = [
            shares_found(
                CHANCES, split, NUM_RANKS * (num_slots - split), NUM_RANKS, window
            ).seconds(NUM_RANKS, costs)
            for split in (own, 0, num_slots)
        ]
        assert seconds[0] <= min(seconds[1:])
        chosen.append(own)
    assert all(nearer >= farther for farther, nearer in pairwise(chosen))
    assert chosen[0] < chosen[-1]


def test_where_all_rows_fit_the_hot_ones_are_held_by_each():
    chosen = [num_held_by_each(CHANCES, 2000, NUM_RANKS, 8, costs_of(home)) for home in HOMES]
    assert 500 < chosen[0] < 2000


def test_where_all_slots_are_equally_near_they_are_shared():
    costs = RowCosts(1.0, 1.0, 5.0)
    assert num_held_by_each(CHANCES, 100, 4, 8, costs) == 0
    assert num_held_by_each(None, 100, 4, 8, costs) == 0


def test_where_nothing_is_known_of_uses_it_is_all_or_nothing():
    assert num_held_by_each(None, 100, 4, 8, RowCosts(0.1, 5.0, 5.0)) == 100
    assert num_held_by_each(None, 100, 4, 8, RowCosts(0.5, 1.0, 18.0)) == 0


def test_rows_that_are_never_used_do_not_matter():
    with_zeros = np.concatenate([np.zeros(500), CHANCES, np.zeros(500)])
    for home in HOMES:
        assert num_held_by_each(with_zeros, 400, 2, 4, costs_of(home)) == num_held_by_each(
            CHANCES, 400, 2, 4, costs_of(home)
        )
    assert num_held_by_each(np.zeros(10), 4, 2, 4, costs_of(3.5)) in (0, 4)
