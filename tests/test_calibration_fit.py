"""From seconds to constants, from constants to crossovers, from counting to what Python lost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featsync.calibration.crossover import Stretch, describe, stretches
from featsync.calibration.fit import deviations, fit_cost
from featsync.calibration.measure import lost_seconds
from featsync.calibration.protocol import Ran
from featsync.calibration.report import costs_table, crossovers, profile_of, seconds_table
from featsync.calibration.samples import LOCAL, WIDTHS, Measured, Sample, Tax, settings
from featsync.profile import Cost, Profile, machine_name

SETTINGS = settings(2)


def constant(most):
    """0, or a constant that shows within the settings."""
    return st.one_of(st.just(0.0), st.floats(most / 100, most))


costs = st.builds(
    Cost,
    message_s=constant(1e-3),
    gil_s=constant(1e-3),
    row_s=constant(1e-6),
    byte_s=constant(1e-8),
).filter(lambda cost: cost.message_s + cost.row_s + cost.byte_s > 0)


def seconds_of(cost, setting):
    """What a message takes by the model, without what Python loses."""
    return cost.seconds(setting.rows, setting.row_bytes) - cost.gil_s


def samples_of(cost, noise=None):
    factors = np.ones(len(SETTINGS)) if noise is None else noise
    return [
        Sample("p2p", setting, seconds_of(cost, setting) * factor)
        for setting, factor in zip(SETTINGS, factors, strict=True)
    ]


# ---- fit ----


@given(costs)
def test_exact_seconds_give_the_constants_back(cost):
    found = fit_cost(samples_of(cost), cost.gil_s)

    for (name, value), (_, expected) in zip(found, cost, strict=True):
        assert value == pytest.approx(expected, rel=1e-6, abs=1e-13), name
    assert deviations(found, samples_of(cost)).max() < 1e-6


@given(costs, st.integers(0, 2**32 - 1))
def test_noise_of_some_percent_moves_the_model_by_some_percent(cost, seed):
    noise = np.random.default_rng(seed).uniform(0.95, 1.05, len(SETTINGS))

    found = fit_cost(samples_of(cost, noise), cost.gil_s)

    for setting in SETTINGS:
        assert seconds_of(found, setting) == pytest.approx(seconds_of(cost, setting), rel=0.15)


@given(st.lists(st.floats(1e-6, 1.0), min_size=17, max_size=17), costs)
def test_no_other_constants_are_closer_and_none_is_negative(seconds, other):
    samples = [Sample("p2p", *pair) for pair in zip(SETTINGS, seconds, strict=True)]

    found = fit_cost(samples, 0.0)  # a negative one would be refused by Cost

    error = np.square(deviations(found, samples)).sum()
    assert error <= np.square(deviations(other, samples)).sum() + 1e-9


def test_narrow_rows_count_as_much_as_wide_ones():
    """Half a millisecond off is nothing for the largest message, and all for the smallest."""
    cost = Cost(message_s=1e-5, gil_s=0.0, row_s=1e-8, byte_s=1e-9)
    samples = samples_of(cost)
    large = samples[-1]
    samples[-1] = Sample("p2p", large.setting, large.seconds + 5e-4)

    found = fit_cost(samples, 0.0)

    assert seconds_of(found, SETTINGS[0]) == pytest.approx(seconds_of(cost, SETTINGS[0]), rel=0.01)


def test_messages_to_measure_are_bounded_by_what_a_rank_gets_at_once():
    for num_ranks in (2, 3, 8):
        found = settings(num_ranks)

        num_bytes = [(num_ranks - 1) * one.rows * one.row_bytes for one in found]
        assert num_bytes == sorted(num_bytes)
        assert num_bytes[-1] <= 1 << 26
        assert {one.row_bytes for one in found} == set(WIDTHS)


# ---- crossover ----


@given(st.lists(costs, min_size=1, max_size=3), st.integers(1, 50_000))
def test_stretches_cover_all_widths_and_say_what_the_profile_chooses(found, rows):
    profile = made_up(rows, {f"way {index}": cost for index, cost in enumerate(found)})

    parts = stretches(profile, range(4, 1025))

    assert (parts[0].first, parts[-1].last) == (4, 1024)
    for one, next_one in pairwise(parts):
        assert next_one.first == one.last + 1
        assert next_one.transport != one.transport
    for part in parts:
        for width in (part.first, part.last):
            chosen = min(
                profile.transports, key=lambda name: profile.transports[name].seconds(rows, width)
            )
            assert part.transport == chosen


def test_crossovers_are_said_in_words():
    none = [Stretch(4, 4096, "shared_memory")]
    one = [Stretch(4, 332, "shared_memory"), Stretch(333, 4096, "p2p")]

    assert describe(none) == (
        "shared_memory is the cheapest for rows of 4 to 4,096 bytes: there is no crossover"
    )
    assert describe(one) == ("up to 332 bytes a row shared_memory, above that p2p is the cheapest")


def made_up(rows, transports):
    nothing = Cost(message_s=0.0, gil_s=0.0, row_s=0.0, byte_s=0.0)
    return Profile(schema=1, machine="any", rows=rows, local=nothing, transports=transports)


# ---- what Python lost ----


def test_lost_seconds_are_those_beyond_what_the_work_takes_alone():
    alone = Ran(work=1000, seconds=0.2, messages=0)

    assert lost_seconds(Ran(work=600, seconds=0.2, messages=4), alone) == pytest.approx(0.08)
    # Without a core for a while, but otherwise as fast as alone.
    assert lost_seconds(Ran(work=500, seconds=0.1, messages=4), alone) == pytest.approx(0.0)


# ---- profile and report ----


def measured():
    narrow = Cost(message_s=1e-5, gil_s=0.0, row_s=1e-8, byte_s=2e-9)
    wide = Cost(message_s=1e-4, gil_s=0.0, row_s=1e-7, byte_s=1.23456e-9)
    local = Cost(message_s=1e-6, gil_s=0.0, row_s=1e-8, byte_s=2e-10)
    costs_by_way = {"wide": wide, "narrow": narrow, LOCAL: local}
    return Measured(
        2,
        [
            Sample(way, setting, seconds_of(cost, setting))
            for way, cost in costs_by_way.items()
            for setting in SETTINGS
        ],
        [Tax("wide", 3e-4, 1e-4), Tax("narrow", 1e-5, 0.0), Tax(LOCAL, 2e-5, 0.0)],
    )


def test_a_profile_is_made_of_every_way_that_was_measured():
    profile = profile_of(measured())

    assert list(profile.transports) == ["wide", "narrow"]
    assert profile.machine == machine_name()
    assert profile.transports["wide"] == Cost(
        message_s=1e-4, gil_s=4e-4, row_s=1e-7, byte_s=1.23e-9
    )
    assert profile.local.row_seconds(100) == pytest.approx(3e-8)


def test_the_report_shows_seconds_constants_and_the_crossover():
    from rich.console import Console

    found, console = measured(), Console(width=140)
    with console.capture() as capture:
        console.print(seconds_table(found))
        console.print(costs_table(found, profile_of(found)))
    printed = capture.get()
    lines = crossovers(profile_of(found))

    assert "50,000" in printed
    assert "300 + 100" in printed
    assert "1.23" in printed
    # At 10,000 rows: 1e-5 + 1e-5 + 1e-4 + 2e-5 w = 1e-4 + 4e-4 + 1e-3 + 1.23e-5 w at 179 bytes.
    assert "10,000 rows: up to 179 bytes a row narrow, above that wide" in lines[1]
    assert "this is what auto goes by" in lines[1]


def test_the_picture_shows_dots_and_lines(tmp_path):
    pytest.importorskip("matplotlib")
    from featsync.calibration.plot import plot

    found, path = measured(), tmp_path / "costs.png"
    plot(found, profile_of(found), path)

    assert path.read_bytes().startswith(b"\x89PNG")
