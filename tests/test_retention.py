"""The contract of a retention policy, for every name in RETENTION."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featsync.errors import ConfigError, FeatureError, PlanError
from featsync.retention import MAX_WINDOW, RETENTION

POLICIES = sorted(RETENTION)
LOOKING_POLICIES = [name for name in POLICIES if name != "none"]  # none looks at no id
QUICK = settings(derandomize=True, deadline=None, max_examples=60, database=None)


class SimulatedCache:
    """Carries out what a policy decides on a cache of row numbers, and checks every promise."""

    def __init__(self, retention):
        self.retention = retention
        self.held = np.full(retention.num_slots, -1, np.int64)
        self.pushed = deque()
        self.promised = deque()
        self.num_hits = 0

    def push(self, ids):
        self.promised.append(ids[self.retention.push(ids)])
        self.pushed.append(ids)
        self.check_residents()

    def step(self):
        """Read the oldest batch, settle it and write what it keeps; return its hits."""
        ids = self.pushed.popleft()
        slots = self.retention.hits()
        self.check_hits(ids, slots)
        keep = self.retention.settle()
        self.check_keep(ids, slots, keep)
        self.held[keep.slots] = ids[keep.positions]
        self.check_residents()
        looked_after = np.concatenate([ids[slots >= 0], self.retention.resident])
        assert np.isin(self.promised.popleft(), looked_after).all(), "a promise is broken"
        self.num_hits += np.count_nonzero(slots >= 0)
        return slots

    def run(self, batches, ahead):
        """One epoch that looks ``ahead``; return the hits of each batch."""
        hits = []
        for ids in batches:
            self.push(ids)
            if len(self.pushed) > ahead:
                hits.append(self.step())
        while self.pushed:
            hits.append(self.step())
        return hits

    def reset(self):
        self.retention.reset()
        self.pushed.clear()
        self.promised.clear()
        self.check_residents()

    def clear(self):
        self.retention.clear()
        self.held[:] = -1
        self.promised = deque(ids[:0] for ids in self.pushed)
        self.check_residents()

    def check_hits(self, ids, slots):
        assert slots.dtype == np.int32
        assert slots.shape == ids.shape
        inside = slots >= 0
        assert (slots >= -1).all()
        assert (self.held[slots[inside]] == ids[inside]).all(), "a hit reads another row"
        assert not np.isin(ids[~inside], self.retention.resident).any(), "a resident row is missed"

    def check_keep(self, ids, slots, keep):
        assert keep.positions.dtype == np.int64
        assert keep.slots.dtype == np.int32
        assert len(keep.positions) == len(keep.slots)
        assert len(set(keep.positions.tolist())) == len(keep.positions)
        assert len(set(keep.slots.tolist())) == len(keep.slots)
        assert ((keep.positions >= 0) & (keep.positions < len(ids))).all()
        assert ((keep.slots >= 0) & (keep.slots < len(self.held))).all()
        assert (slots[keep.positions] < 0).all(), "a row that is inside is written again"

    def check_residents(self):
        resident = self.retention.resident
        taken = resident >= 0
        assert resident.shape == self.held.shape
        assert (self.held[taken] == resident[taken]).all(), "a slot holds another row"
        assert len(set(resident[taken].tolist())) == np.count_nonzero(taken), "a row lies twice"


@st.composite
def workloads(draw):
    """A table, a cache, a window and a stream of batches, with scores or without."""
    num_rows = draw(st.integers(1, 40))
    ids = st.lists(st.integers(0, num_rows - 1), unique=True, max_size=num_rows)
    batches = draw(st.lists(ids.map(lambda b: np.array(b, np.int64)), min_size=1, max_size=30))
    score = draw(st.none() | st.lists(st.integers(0, 9), min_size=num_rows, max_size=num_rows))
    return {
        "num_rows": num_rows,
        "num_slots": draw(st.integers(0, num_rows)),
        "window": draw(st.integers(1, 5) | st.just(MAX_WINDOW)),
        "score": None if score is None else np.array(score, np.float32),
    }, batches


def random_batches(seed, num_rows, sizes):
    """Batches in which low ids are much more frequent, in random order."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, num_rows + 1)
    weights /= weights.sum()
    return [rng.choice(num_rows, size, replace=False, p=weights) for size in sizes]


@pytest.mark.parametrize("name", POLICIES)
class TestEveryPolicy:
    @given(workload=workloads(), data=st.data())
    @QUICK
    def test_reads_the_right_rows_through_epochs_resets_and_clears(self, name, workload, data):
        arguments, batches = workload
        cache = SimulatedCache(RETENTION[name](**arguments))
        ahead = data.draw(st.integers(0, arguments["window"]))
        events = st.sampled_from(["", "", "", "", "reset", "clear", "clear and reset"])

        for ids in batches:
            cache.push(ids)
            if len(cache.pushed) > ahead:
                cache.step()
            event = data.draw(events)
            if "clear" in event:
                cache.clear()
            if "reset" in event:
                cache.reset()
        cache.run([], ahead)
        cache.run(batches, ahead)
        cache.run(batches, arguments["window"])

    def test_reads_the_right_rows_of_large_batches(self, name):
        batches = random_batches(1, 60_000, [20_000, 50, 40_000, 0, 35_000, 30_000] * 4)
        cache = SimulatedCache(RETENTION[name](60_000, 9_000, window=3))

        cache.run(batches, ahead=3)

        assert (cache.num_hits > 0) == (name != "none")

    @pytest.mark.parametrize("num_slots", [0, 1, 25])
    @pytest.mark.parametrize("window", [1, MAX_WINDOW])
    def test_takes_extreme_sizes_and_empty_batches(self, name, num_slots, window):
        batches = [np.arange(25), np.arange(0), np.arange(24, -1, -1), np.arange(3, 5)] * 20
        cache = SimulatedCache(RETENTION[name](25, num_slots, window))

        cache.run(batches, ahead=window)

        if num_slots == 25 and name != "none":
            assert cache.num_hits == 20 * (25 + 25 + 2) - 25

    def test_sorted_and_unsorted_ids_are_the_same_rows(self, name):
        batches = random_batches(2, 500, [200] * 20)
        in_order, shuffled = (SimulatedCache(RETENTION[name](500, 500, 2)) for _ in range(2))

        in_order.run([np.sort(ids) for ids in batches], ahead=2)
        shuffled.run(batches, ahead=2)

        assert in_order.num_hits == shuffled.num_hits

    def test_reset_keeps_rows_and_forgets_batches(self, name):
        cache = SimulatedCache(RETENTION[name](50, 20, window=3))
        cache.run(random_batches(3, 50, [15] * 10), ahead=3)
        for ids in random_batches(4, 50, [15] * 4):
            cache.push(ids)
        cache.step()
        before = np.sort(cache.retention.resident)

        cache.reset()

        assert (np.sort(cache.retention.resident) == before).all()
        with pytest.raises(PlanError, match="no batch is pushed"):
            cache.retention.hits()
        assert cache.run([before[before >= 0]], ahead=0)[0].min(initial=0) >= 0

    def test_clear_leaves_nothing_inside_and_batches_known(self, name):
        cache = SimulatedCache(RETENTION[name](50, 20, window=3))
        batches = random_batches(5, 50, [15] * 10)
        for ids in batches[:4]:
            cache.push(ids)
        cache.step()

        cache.clear()

        assert (cache.retention.resident == -1).all()
        assert (cache.step() == -1).all()
        cache.run(batches[4:], ahead=3)

    def test_refuses_a_batch_beyond_its_window(self, name):
        retention = RETENTION[name](10, 5, window=2)
        for _ in range(3):
            retention.push(np.arange(4))

        with pytest.raises(PlanError, match="window is 2"):
            retention.push(np.arange(4))

        for _ in range(3):
            retention.settle()

    def test_needs_a_batch_to_settle(self, name):
        retention = RETENTION[name](10, 5, window=2)

        with pytest.raises(PlanError, match="push"):
            retention.settle()
        with pytest.raises(PlanError, match="push"):
            retention.hits()

    def test_takes_ids_that_may_not_be_written(self, name):
        ids = np.arange(20)[::-2]
        ids.flags.writeable = False

        SimulatedCache(RETENTION[name](20, 5, window=1)).run([ids, ids], ahead=1)

    @pytest.mark.parametrize("ids", [np.arange(3, dtype=np.int32), np.zeros((2, 2), np.int64)])
    def test_refuses_what_is_no_vector_of_int64(self, name, ids):
        with pytest.raises(PlanError, match="must be"):
            RETENTION[name](10, 5, window=1).push(ids)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_slots": 11}, r"num_slots = 11 must lie in 0\.\.10"),
            ({"num_slots": -1}, "num_slots = -1"),
            ({"window": 0}, r"window = 0 must lie in 1\.\.64"),
            ({"window": MAX_WINDOW + 1}, "window = 65"),
            ({"score": np.zeros(9)}, r"shape \(9,\)"),
            ({"score": np.full(10, np.nan)}, "NaN"),
        ],
    )
    def test_refuses_arguments_out_of_range(self, name, changes, message):
        arguments = {"num_rows": 10, "num_slots": 5, "window": 1, "score": None}

        with pytest.raises(ConfigError, match=message):
            RETENTION[name](**(arguments | changes))


@pytest.mark.parametrize("name", LOOKING_POLICIES)
class TestBadBatches:
    """A policy that looks at ids refuses bad ones and goes on as if they had not come."""

    @pytest.mark.parametrize(
        ("bad", "error"),
        [
            ([3, 4, 3], PlanError),
            (np.r_[7, np.arange(39_999, -1, -1)], PlanError),  # far apart, in other chunks
            (np.r_[np.arange(40_000), 3], PlanError),
            ([3, -1], FeatureError),
            ([3, 40_000], FeatureError),
        ],
    )
    @pytest.mark.parametrize("score", [None, np.arange(40_000) % 200.0])
    def test_are_refused_with_nothing_changed(self, name, bad, error, score):
        batches = random_batches(6, 40_000, [8_000] * 12)
        spoiled, twin = (SimulatedCache(RETENTION[name](40_000, 4_000, 2, score)) for _ in range(2))
        spoiled.run(batches[:6], ahead=2)
        twin.run(batches[:6], ahead=2)
        for ids in batches[6:8]:
            spoiled.push(ids)
            twin.push(ids)

        with pytest.raises(error):
            spoiled.retention.push(np.array(bad, np.int64))

        for ours, theirs in zip(spoiled.run(batches[8:], 2), twin.run(batches[8:], 2), strict=True):
            assert (ours == theirs).all()


def test_none_allocates_nothing_per_row_and_looks_at_no_id():
    retention = RETENTION["none"](10**12, 10**9, window=1)

    retention.push(np.array([5, 5, -1]))

    assert (retention.hits() == -1).all()
    assert len(retention.settle().positions) == 0
