"""The policies without lookahead, against naive forms of themselves."""

from collections import Counter, OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featsync.retention import RETENTION

QUICK = settings(derandomize=True, deadline=None, max_examples=100, database=None)


@st.composite
def streams(draw):
    """Rows of a table, slots of its cache, and batches."""
    num_rows = draw(st.integers(1, 40))
    ids = st.lists(st.integers(0, num_rows - 1), unique=True, max_size=num_rows)
    batches = draw(st.lists(ids, min_size=1, max_size=31))
    return num_rows, draw(st.integers(0, num_rows)), [np.array(b, np.int64) for b in batches]


def residents(retention, ids):
    """Push and settle one batch; return the rows inside afterwards."""
    retention.push(ids)
    retention.settle()
    return {row for row in retention.resident.tolist() if row >= 0}


@given(stream=streams())
@QUICK
def test_lru_holds_what_a_naive_one_holds(stream):
    num_rows, num_slots, batches = stream
    retention = RETENTION["lru"](num_rows, num_slots, window=1)
    naive = OrderedDict()

    for ids in batches:
        for row in ids.tolist():
            naive[row] = None
            naive.move_to_end(row)
        while len(naive) > num_slots:
            naive.popitem(last=False)

        assert residents(retention, ids) == set(naive)


def test_lru_holds_what_a_naive_one_holds_in_a_large_cache():
    rng = np.random.default_rng(0)
    retention = RETENTION["lru"](20_000, 3_000, window=1)
    naive = OrderedDict()

    for _ in range(60):
        ids = np.unique((20_000 * rng.random(rng.integers(1, 4_000)) ** 3).astype(np.int64))
        ids = rng.permutation(ids)
        for row in ids.tolist():
            naive[row] = None
            naive.move_to_end(row)
        while len(naive) > 3_000:
            naive.popitem(last=False)

        assert residents(retention, ids) == set(naive)


@pytest.mark.parametrize("score", [[5, 1, 4, 4, 4, 0], [5.0, 1.5, 4.0, 4.0, 4.0, -np.inf]])
def test_static_admits_the_best_scores_on_first_use_and_never_lets_go(score):
    retention = RETENTION["static"](6, 3, 1, np.array(score))

    assert residents(retention, np.array([5, 4, 1])) == set()
    assert residents(retention, np.array([3])) == {3}
    assert residents(retention, np.array([0, 2, 4])) == {0, 2, 3}  # of the equals the lowest ids
    for _ in range(100):
        assert residents(retention, np.array([1, 4, 5])) == {0, 2, 3}
    assert retention.push(np.arange(6)).tolist() == [True, False, True, True, False, False]


@given(stream=streams())
@QUICK
def test_static_without_a_score_holds_the_rows_used_most(stream):
    num_rows, num_slots, batches = stream
    retention = RETENTION["static"](num_rows, num_slots, window=1)
    uses, before = Counter(), set()

    for ids in batches:
        uses.update(ids.tolist())
        inside = residents(retention, ids)
        rivals = before | set(ids.tolist())

        assert inside <= rivals
        assert len(inside) == min(num_slots, len(rivals))
        least_inside = min((uses[row] for row in inside), default=0)
        assert all(uses[row] <= least_inside or not num_slots for row in rivals - inside)
        before = inside
