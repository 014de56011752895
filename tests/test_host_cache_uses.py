"""What the windows of several ranks know together of uses to come."""

from __future__ import annotations

import numpy as np
import pytest

from featsync.errors import ConfigError
from featsync.host_cache.uses import UNKNOWN, Progress, UsesOfRanks, word_type

ROWS, NOTHING = np.arange(4), np.array([], np.int64)


def uses_of(num_ranks, window):
    """All ranks are under way, and have planned nothing yet."""
    words = np.zeros((num_ranks, len(ROWS)), word_type(window))
    progress = Progress(*(np.zeros(num_ranks, np.int64) for _ in Progress._fields))
    uses = UsesOfRanks(words, progress)
    for rank in range(num_ranks):
        uses.begin(rank, [])
    return uses


def steps_to_uses(uses, rank):
    """A rank plans a minibatch of all rows; what it hears of each."""
    steps = uses.pass_by(rank, ROWS).tolist()
    return [None if step >= UNKNOWN else step for step in steps]


def test_the_window_fits_into_a_word():
    assert word_type(8) is np.uint8
    assert word_type(9) is np.uint16
    assert word_type(32) is np.uint32
    with pytest.raises(ConfigError, match="at most 32"):
        word_type(33)


@pytest.mark.parametrize("window", [3, 8, 16, 32])
def test_the_next_use_by_any_rank_is_the_one_that_counts(window):
    uses = uses_of(3, window)
    for ids in ([0], [1], [0, 2]):
        uses.push(1, np.array(ids))
    uses.push(2, np.array([1]))
    # Ranks 1 and 2 have not planned yet what belongs to the step that rank 0 plans.
    assert steps_to_uses(uses, 0) == [0, 0, 2, None]
    uses.pass_by(2, np.array([1]))
    uses.pass_by(1, np.array([0]))
    assert steps_to_uses(uses, 0) == [1, 0, 1, None]
    uses.end(1)
    assert steps_to_uses(uses, 0) == [None] * 4


def test_a_rank_that_was_given_too_late_a_time_is_put_back():
    """It begins when the other has planned two minibatches, and keeps step from then on."""
    uses = uses_of(2, 8)
    for rank in range(2):
        uses.end(rank)
    for rank in range(2):
        uses.begin(rank, [])
        for _ in range(2):
            uses.pass_by(rank, NOTHING)
    assert uses.push(0, ROWS[:1]) < uses.push(1, ROWS[:1])
    for _ in range(2):
        uses.pass_by(1, ROWS[:1])
        uses.pass_by(0, ROWS[:1])
        times = [uses.push(rank, ROWS[:1]) for rank in range(2)]
    assert times[0] == times[1]


def test_what_is_planned_while_its_rank_stops_is_past_all_the_same():
    """Stopping takes no lock, so it may come in the middle of a plan."""
    uses = uses_of(2, 8)
    uses.push(0, ROWS)
    uses.end(0)
    uses.pass_by(0, ROWS)
    uses.begin(0, [])
    assert steps_to_uses(uses, 1) == [None] * 4


def test_time_goes_on_over_epochs():
    uses = uses_of(2, 8)
    times = []
    for _ in range(3):
        for rank in range(2):
            uses.begin(rank, [])
            times.append(uses.push(rank, NOTHING))
            uses.pass_by(rank, NOTHING)
        for rank in range(2):
            uses.end(rank)
    assert times == sorted(times)
    assert times[0] < times[-1]


@pytest.mark.parametrize("window", [8, 16, 32])
def test_the_last_minibatch_of_a_full_window_is_seen(window):
    uses = uses_of(1, window)
    for step in range(3 * window):
        while uses.push(0, np.array([0])) < step + window:
            pass
        assert uses.pass_by(0, np.array([0])).tolist() == [0]
    assert uses.pass_by(0, np.array([1])) >= UNKNOWN
