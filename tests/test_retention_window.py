"""The window policy against brute force: Belady, and two slow readable forms of itself."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.belady import belady_hits
from featsync.retention import RETENTION

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

    def step():
        ids, is_promised = waiting.pop(0)
        is_hit = retention.hits() >= 0
        if isinstance(retention, RETENTION["window"]):
            assert (is_hit == is_promised).all()
        hits.append(set(ids[is_hit].tolist()))
        retention.settle()

    for ids in batches:
        waiting.append((ids, retention.push(ids)))
        if len(waiting) > retention.window:
            step()
    while waiting:
        step()
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
