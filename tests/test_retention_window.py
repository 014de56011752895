"""The window policy against brute force: Belady, and two slow readable forms of itself."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.belady import belady_hits
from featsync.errors import CapacityError
from featsync.retention import RETENTION
from featsync.retention.known_uses import KnownUses
from featsync.retention.levels import CountedLevels, ScoreLevels
from featsync.retention.reservations import Grant, Reservations

QUICK = settings(derandomize=True, deadline=None, max_examples=100, database=None)
MAX_DISTINCT = 31  # rows that ScoreLevels certainly gives a level each


@st.composite
def streams(draw, max_rows=MAX_DISTINCT, max_batches=30):
    """Rows of a table, slots of its cache, and batches."""
    num_rows = draw(st.integers(1, max_rows))
    ids = st.lists(st.integers(0, num_rows - 1), unique=True, max_size=num_rows)
    batches = draw(st.lists(ids, min_size=1, max_size=max_batches))
    return num_rows, draw(st.integers(0, num_rows)), [np.array(b, np.int64) for b in batches]


def random_stream(seed, num_rows, batch_size, num_batches):
    """Batches of varying size in which some rows, not those with low ids, are more frequent."""
    rng = np.random.default_rng(seed)
    rows = rng.permutation(num_rows)
    weights = 1.0 / np.arange(1, num_rows + 1)
    weights /= weights.sum()
    sizes = rng.integers(1, batch_size + 1, num_batches)
    return [rng.choice(rows, size, replace=False, p=weights) for size in sizes]


def hit_rows(retention, batches):
    """Run one epoch that looks as far ahead as it may; return the rows hit in each batch."""
    hits, waiting = [], []
    for ids in batches:
        retention.push(ids)
        waiting.append(ids)
        if len(waiting) > retention.window:
            hits.append(set(waiting.pop(0)[retention.hits() >= 0].tolist()))
            retention.settle()
    for ids in waiting:
        hits.append(set(ids[retention.hits() >= 0].tolist()))
        retention.settle()
    return hits


def num_hits(retention, batches):
    return sum(map(len, hit_rows(retention, batches)))


def most_hits(num_slots, batches):
    """The best of all possible choices, by trying each one after each batch."""
    best = {frozenset(): 0}
    for ids in batches:
        rows = frozenset(ids.tolist())
        after = {}
        for inside, hits in best.items():
            hits += len(inside & rows)
            pool = inside | rows
            for chosen in combinations(sorted(pool), min(num_slots, len(pool))):
                kept = frozenset(chosen)
                after[kept] = max(after.get(kept, 0), hits)
        best = after
    return max(best.values())


class SlowWindow:
    """What `WindowRetention` documents, with sets and sorting; no two rows score alike."""

    def __init__(self, num_slots, window, score):
        self.num_slots = num_slots
        self.window = window
        self.score = score
        self.inside = set()
        self.first = 0  # number of the oldest pending batch
        self.batches = []
        self.reserved = []  # by batch: slots promised across it
        self.next_use = []  # by batch: row -> "reserved" or "dropped"; without: not known

    def push(self, ids):
        new = len(self.batches)
        pending = range(self.first, new)
        known = set().union(*(self.batches[p] for p in pending))
        for last in reversed(pending):
            for row in [row for row in ids if row in self.batches[last]]:
                if row not in self.next_use[last]:
                    self.next_use[last][row] = self.reserve(last, new)
        for row in [row for row in ids if row in self.inside and row not in known]:
            if self.reserve(self.first, new) == "dropped":
                self.inside.remove(row)
        self.batches.append(set(ids))
        self.next_use.append({})
        self.reserved.append(0)

    def reserve(self, last, new):
        across = range(last, new)
        if any(self.reserved[p] >= self.num_slots for p in across):
            return "dropped"
        for p in across:
            self.reserved[p] += 1
        return "reserved"

    def settle(self):
        """Return the rows of the oldest batch that were inside."""
        batch, fates = self.batches[self.first], self.next_use[self.first]
        hits = self.inside & batch
        in_window = set().union(*self.batches[self.first + 1 :])
        stay = {row for row in batch if fates.get(row) == "reserved"}
        bridged = (self.inside - batch) & in_window
        rivals = (self.inside | batch) - in_window
        room = self.num_slots - self.reserved[self.first]
        best = sorted(rivals, key=lambda row: -self.score[row])[:room]
        self.inside = stay | bridged | set(best)
        self.first += 1
        return hits

    def run(self, batches):
        hits = []
        for ids in batches:
            self.push(ids.tolist())
            if len(self.batches) - self.first > self.window:
                hits.append(self.settle())
        while self.first < len(self.batches):
            hits.append(self.settle())
        return hits


def hits_step_by_step(num_slots, window, batches):
    """Hits if after each batch the best of all rows stay: nearest next use, then most used."""
    inside, hits = set(), 0
    counted, uses = 0, Counter()
    for step, ids in enumerate(batches):
        ahead = batches[step + 1 : step + 1 + window]
        for known in batches[counted : step + 1 + window]:
            uses.update(known.tolist())
        counted = max(counted, step + 1 + window)
        next_use = {}
        for distance, later in reversed(list(enumerate(ahead))):
            next_use.update(dict.fromkeys(later.tolist(), distance))
        hits += len(inside & set(ids.tolist()))
        pool = sorted(inside | set(ids.tolist()))
        pool.sort(key=lambda row: (next_use.get(row, window), -uses[row], row not in inside))
        inside = set(pool[:num_slots])
    return hits


@given(stream=streams(max_rows=6, max_batches=7))
@QUICK
def test_belady_offline_finds_the_most_hits(stream):
    num_rows, num_slots, batches = stream

    assert belady_hits(batches, num_rows, num_slots).sum() == most_hits(num_slots, batches)


@given(stream=streams(max_rows=60, max_batches=60))
@QUICK
def test_equals_belady_when_the_window_covers_the_stream(stream):
    num_rows, num_slots, batches = stream
    retention = RETENTION["window"](num_rows, num_slots, window=len(batches))

    assert num_hits(retention, batches) == belady_hits(batches, num_rows, num_slots).sum()


@pytest.mark.parametrize("seed", range(20))
def test_equals_belady_on_random_streams(seed):
    batches = random_stream(seed, 300, 60, 64)
    num_slots = 5 + 7 * seed
    retention = RETENTION["window"](300, num_slots, window=64)

    assert num_hits(retention, batches) == belady_hits(batches, 300, num_slots).sum()


@given(stream=streams(), window=st.integers(1, 6), seed=st.integers(0, 99))
@settings(QUICK, max_examples=200)
def test_equals_its_slow_form_row_by_row(stream, window, seed):
    num_rows, num_slots, batches = stream
    score = np.random.default_rng(seed).permutation(num_rows).astype(np.float64)

    fast = hit_rows(RETENTION["window"](num_rows, num_slots, window, score), batches)

    assert fast == SlowWindow(num_slots, window, score).run(batches)


@pytest.mark.parametrize("window", [1, 2, 4, 8])
def test_hits_as_often_as_the_policy_applied_step_by_step(window):
    fast = slow = 0
    for seed in range(40):
        batches = random_stream(seed, 300, 80, 31)  # too few to halve the counts
        num_slots = 15 + 4 * seed
        fast += num_hits(RETENTION["window"](300, num_slots, window), batches)
        slow += hits_step_by_step(num_slots, window, batches)

    assert fast >= 0.9993 * slow


def test_grows_with_its_batches_and_loses_no_reservation():
    sizes = [3, 40, 41, 200, 10, 900, 0, 901, 2_000, 5, 2_001]
    rng = np.random.default_rng(0)
    batches = [rng.choice(3_000, size, replace=False) for size in sizes]
    retention = RETENTION["window"](3_000, 1_500, window=len(sizes))

    assert num_hits(retention, batches) == belady_hits(batches, 3_000, 1_500).sum()


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


def test_a_certain_miss_takes_no_slot():
    retention = RETENTION["window"](10, 2, window=2)
    for ids in ([0, 1, 2], [1, 2], [0, 1, 2]):
        retention.push(np.array(ids))

    keep = retention.settle()

    assert sorted(keep.positions.tolist()) == [1, 2]  # two are used earlier than row 0


@pytest.mark.parametrize("name", ["window", "static"])
def test_counted_use_forgets_what_was_popular_long_ago(name):
    retention = RETENTION[name](200, 50, window=1)
    num_hits(retention, [np.arange(100)] * 400)

    hits = hit_rows(retention, [np.arange(100, 150)] * 100)

    assert len(hits[-1]) == 50


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
