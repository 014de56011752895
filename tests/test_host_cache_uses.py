"""What the windows of several ranks know together of uses to come."""

from __future__ import annotations

import numpy as np
import pytest

from featsync.errors import ConfigError
from featsync.host_cache.uses import UNKNOWN, UsesOfRanks, word_type


def uses_of(num_rows, num_ranks, window):
    """All ranks are under way."""
    words = np.zeros((num_ranks, num_rows), word_type(window))
    uses = UsesOfRanks(words, np.zeros(num_ranks, np.int64))
    for rank in range(num_ranks):
        uses.begin(rank, [])
    return uses


def test_the_window_fits_into_a_word():
    assert word_type(8) is np.uint8
    assert word_type(9) is np.uint16
    assert word_type(32) is np.uint32
    with pytest.raises(ConfigError, match="at most 32"):
        word_type(33)


@pytest.mark.parametrize("window", [3, 8, 16, 32])
def test_a_use_is_seen_from_the_clock_of_whoever_uses(window):
    uses = uses_of(5, 3, window)
    rows, nothing = np.array([0, 1, 2, 3]), np.array([], np.int64)

    def ahead():
        """Asked by rank 0, whose clock goes on: what rank 1 uses comes nearer, seen from there."""
        steps = uses.pass_by(0, rows)
        return [None if step >= UNKNOWN else int(step) for step in steps]

    assert ahead() == [None] * 4
    now = uses.now
    for ids in ([0], [1], [0, 2]):
        uses.push(1, np.array(ids))
    uses.push(2, np.array([1]))
    assert ahead() == [0, 0, 2, None]
    uses.pass_by(1, np.array([0]))
    assert ahead() == [2, 0, 2, None]
    assert uses.now == now  # of rank 2, which stands still
    uses.end(2)
    assert uses.now == now + 1
    assert ahead() == [1, 0, 1, None]
    for _ in range(2):
        uses.pass_by(1, nothing)
    uses.push(1, rows)
    assert ahead() == [0] * 4


def test_the_last_minibatch_of_a_full_window_is_seen():
    for window in (8, 16, 32):
        uses = uses_of(2, 1, window)
        for step in range(3 * window):
            while uses.push(0, np.array([0])) < step + window:
                pass
            assert uses.pass_by(0, np.array([0])).tolist() == [0]
        assert uses.pass_by(0, np.array([1])) >= UNKNOWN
