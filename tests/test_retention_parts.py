"""The parts of the policies: arrays, ring of known uses, levels, reservations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featsync.errors import CapacityError, PlanError
from featsync.retention.arrays import CHUNK, exchange
from featsync.retention.known_uses import KnownUses
from featsync.retention.levels import CountedLevels, ScoreLevels
from featsync.retention.reservations import Grant, Reservations

QUICK = settings(derandomize=True, deadline=None, max_examples=100, database=None)


def test_exchange_returns_what_stood_there():
    table = -np.arange(3 * CHUNK, dtype=np.int32)
    ids = np.random.default_rng(0).permutation(3 * CHUNK)[: 2 * CHUNK + 5]

    previous = exchange(table, ids, start=10)

    assert (previous == -ids).all()
    assert (table[ids] == np.arange(10, 10 + len(ids))).all()


@pytest.mark.parametrize("again", [1, CHUNK - 1, CHUNK, 2 * CHUNK, 2 * CHUNK + 4])
def test_exchange_leaves_the_table_as_it_was_when_ids_repeat(again):
    table = -np.arange(3 * CHUNK, dtype=np.int32)
    ids = np.random.default_rng(0).permutation(3 * CHUNK)[: 2 * CHUNK + 5]
    ids[again] = ids[0]

    with pytest.raises(PlanError, match="repeat"):
        exchange(table, ids, start=10)

    assert (table == -np.arange(3 * CHUNK)).all()


def test_growth_is_amortised_and_leaves_an_eighth_free_at_most():
    uses = KnownUses(10_000, window=1)
    widths = []
    for size in range(1, 8_000):
        uses.make_room(size, [])
        widths.append(len(uses._links) // 2)

    assert len(set(widths)) < 80
    assert all(w <= 1.125 * size + 32 for size, w in enumerate(widths, start=1))


def test_a_window_too_large_for_its_positions_is_an_error():
    uses = KnownUses(10, window=64)

    with pytest.raises(CapacityError, match="smaller lookahead"):
        uses.make_room(2**31 // 65 + 1, [])


def test_counts_are_halved_when_it_takes_64_uses_to_stay():
    levels = CountedLevels(4, num_slots=1_000_000)
    for _ in range(200):
        levels.count(np.array([0, 2]))
    levels.count(np.array([1]))

    assert levels.of(np.arange(4)).tolist() == [126, 1, 126, 1]
    assert not levels.halve_if_due(63)
    assert levels.halve_if_due(64)
    assert levels.of(np.arange(4)).tolist() == [63, 1, 63, 1]


@pytest.mark.parametrize(
    ("num_slots", "due"),
    [(1, [31, 63]), (40, [39, 79])],  # 40 batches of 32 are 32 uses of each of 40 slots
)
def test_counts_are_halved_after_32_batches_with_32_uses_a_slot(num_slots, due):
    levels = CountedLevels(50, num_slots)

    is_halved = []
    for _ in range(90):
        levels.count(np.arange(32))
        is_halved.append(levels.halve_if_due(1))

    assert np.flatnonzero(is_halved).tolist() == due


@given(
    scores=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=400),
    share=st.floats(0, 1),
)
@QUICK
def test_score_levels_follow_the_score(scores, share):
    score = np.array(scores, np.float32)
    levels = ScoreLevels(score, int(share * len(score))).of(np.arange(len(score)))

    order = np.argsort(score)
    assert (np.diff(levels[order].astype(int)) >= 0).all()
    assert (levels[order][1:] == levels[order][:-1])[np.diff(score[order]) == 0].all()
    assert levels.min() >= 1
    assert levels.max() <= 126


def test_score_levels_are_fine_where_the_cache_ends():
    score = np.random.default_rng(0).permutation(100_000).astype(np.float64)
    levels = ScoreLevels(score, num_slots=10_000).of(np.argsort(-score))

    sizes = np.bincount(levels[:20_000])
    assert sizes.max() <= 10_000 // 40


def test_reservations_end_where_the_slots_are_used_up():
    reservations = Reservations(num_slots=3)
    assert reservations.add_batch(3, np.array([])) is None
    assert reservations.add_batch(1, np.array([1])) is None
    assert reservations.add_batch(0, np.array([0, 2])) is None

    assert reservations.add_batch(1, np.array([1, 0, 3])) == Grant(step=0, granted=0)
    assert reservations.add_batch(2, np.array([0, 0, 1, 2])) == Grant(step=2, granted=0)

    assert reservations.settle_oldest() == 2
    assert [reservations.settle_oldest() for _ in range(4)] == [2, 3, 2, 0]
