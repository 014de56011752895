"""How slots are split between rows that are held once and rows that every rank holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featsync.host_cache.placement import RowCosts, num_held_by_each, seconds_a_row

POWER_LAW = 1.0 / np.arange(1, 1001)


def by_counting(uses, num_slots, num_ranks, costs, by_each):
    """The mean over rows and ranks, one by one."""
    rows = sorted(uses, reverse=True)
    total = 0.0
    for place, use in enumerate(rows):
        for rank in range(num_ranks):
            if place < by_each:
                cost = costs.local
            elif place < by_each + num_ranks * (num_slots - by_each):
                cost = costs.local if (place - by_each) % num_ranks == rank else costs.peer
            else:
                cost = costs.home
            total += use * cost / num_ranks
    return total / sum(rows)


@given(
    st.lists(st.integers(1, 50), min_size=4, max_size=30),
    st.integers(1, 4),
    st.tuples(*[st.integers(1, 40)] * 3),
    st.data(),
)
def test_costs_are_those_of_counting(uses, num_ranks, costs, data):
    num_slots = data.draw(st.integers(0, len(uses)))
    costs = RowCosts(*map(float, sorted(costs)))
    found = seconds_a_row(np.array(uses, float), num_slots, num_ranks, costs)
    for by_each in range(num_slots + 1):
        counted = by_counting(uses, num_slots, num_ranks, costs, by_each)
        # Rows held once are counted rank by rank here, evenly there.
        assert found[by_each] == pytest.approx(counted, abs=costs.peer - costs.local + 1e-9)
    if costs.local == costs.peer:
        assert found == pytest.approx(
            [by_counting(uses, num_slots, num_ranks, costs, a) for a in range(num_slots + 1)]
        )


@pytest.mark.parametrize("home", [1.0, 3.5, 18.0])
def test_a_split_costs_no_more_than_the_better_of_both_ends(home):
    costs = RowCosts(0.5, 1.0, home)
    seconds = seconds_a_row(POWER_LAW, 100, 4, costs)
    chosen = num_held_by_each(POWER_LAW, 100, 4, costs)
    assert seconds[chosen] <= min(seconds[0], seconds[100])


def test_the_split_follows_the_costs():
    chosen = [
        num_held_by_each(POWER_LAW, 100, 4, RowCosts(0.5, 1.0, home)) for home in (1.0, 3.5, 18.0)
    ]
    assert chosen[0] == 100
    assert 100 > chosen[1] > chosen[2] > 0


def test_where_all_slots_are_equally_near_rows_are_held_once():
    assert num_held_by_each(POWER_LAW, 100, 4, RowCosts(1.0, 1.0, 5.0)) == 0
    assert num_held_by_each(None, 100, 4, RowCosts(1.0, 1.0, 5.0)) == 0


def test_where_nothing_is_known_of_uses_it_is_all_or_nothing():
    assert num_held_by_each(None, 100, 4, RowCosts(0.1, 5.0, 5.0)) == 100
    assert num_held_by_each(None, 100, 4, RowCosts(0.5, 1.0, 18.0)) == 0
