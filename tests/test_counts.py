"""What is counted, and what a reset leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from featsync.clock import StepClock
from featsync.counts import FeatureStats, Stats
from featsync.plan import FeaturePlan, Fetch, Keep
from support.strategies import EDGE, NODE


def part(num_home, num_cached, num_kept=None):
    positions = torch.arange(num_home + num_cached)
    fetch = Fetch(
        num_home + num_cached,
        positions[:num_home],
        positions[num_home:],
        torch.arange(num_cached),
    )
    if num_kept is None:
        return FeaturePlan(fetch)
    return FeaturePlan(fetch, Keep(np.arange(num_kept), np.arange(num_kept, dtype=np.int32)))


@pytest.fixture
def stats():
    node, edge = FeatureStats(row_bytes=100), FeatureStats(row_bytes=8, why="because")
    node.count(part(3, 1))
    node.count(part(1, 3, num_kept=2))
    edge.count(FeaturePlan(Fetch(12)))
    return Stats({NODE: node, EDGE: edge}, 2, 0.5, 0.25, 0.125)


def test_rows_are_counted_by_source(stats):
    assert stats.features[NODE].rows == {"host": 4, "cache": 4, "peer": 0}
    assert stats.features[NODE].rows_kept == 2
    assert stats.features[EDGE].rows == {"host": 12, "cache": 0, "peer": 0}
    assert stats.features[EDGE].rows_kept == 0
    assert stats.rows == 20


def test_bytes_are_rows_times_the_bytes_of_a_row(stats):
    assert stats.features[NODE].bytes == {"host": 400, "cache": 400, "peer": 0}
    assert stats.bytes == {"host": 496, "cache": 400, "peer": 0}


def test_the_hit_rate_is_the_share_of_rows_that_caches_served(stats):
    assert stats.features[NODE].hit_rate == 0.5
    assert stats.features[EDGE].hit_rate == 0.0
    assert stats.hit_rate == 4 / 20


def test_a_feature_without_a_cache_counts_rows_of_the_home_table():
    stats = FeatureStats()
    stats.count(FeaturePlan(Fetch(5)))

    assert stats.rows == {"host": 5, "cache": 0, "peer": 0}
    assert stats.bytes == {"host": 0, "cache": 0, "peer": 0}  # bytes of a row are not known yet


def test_nothing_delivered_is_a_hit_rate_of_zero():
    assert FeatureStats().hit_rate == 0.0
    assert Stats().hit_rate == 0.0
    assert Stats().rows == 0
    assert Stats().bytes == {"host": 0, "cache": 0, "peer": 0}


def test_a_reset_sets_counts_to_zero_and_keeps_what_was_chosen(stats):
    node, edge = stats.features[NODE], stats.features[EDGE]
    node.rows_patched = 7

    stats.reset()

    assert stats == Stats(
        {NODE: FeatureStats(row_bytes=100), EDGE: FeatureStats(row_bytes=8, why="because")}
    )
    assert stats.features[NODE] is node
    assert stats.features[EDGE] is edge


def test_features_do_not_share_their_counts():
    first, second = FeatureStats(), FeatureStats()

    first.count(FeaturePlan(Fetch(5)))

    assert second.rows["host"] == 0


def test_a_clock_counts_steps_until_it_is_stopped_for_good():
    clock = StepClock()
    assert (clock.delivered, clock.is_running()) == (0, True)

    clock.deliver()
    clock.deliver()
    clock.stop()
    clock.stop()

    assert (clock.delivered, clock.is_running()) == (2, False)
