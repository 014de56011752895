"""``device_cache``: rows, fractions and bytes, split over features."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featsync.cache_size import check_cache_size, slots_of_tables
from featsync.errors import ConfigError
from featsync.plan import FeatureKey
from featsync.table import TensorTable

ALLOWED = (
    "rows (1000), a fraction of each table from 0.0 to 1.0 (0.1), or bytes of all "
    '("512MiB"; units B, KB, MB, GB, KiB, MiB, GiB)'
)


def tables_of(*shapes):
    """Tables of float32 by number."""
    keys = [FeatureKey("node", None, str(number)) for number in range(len(shapes))]
    return {
        key: TensorTable(key, lambda shape=shape: torch.empty(shape))
        for key, shape in zip(keys, shapes, strict=True)
    }


def slots(size, *shapes):
    check_cache_size(size)
    return list(slots_of_tables(size, tables_of(*shapes)).values())


@pytest.mark.parametrize("size", [0, 1, 10**12, 0.0, 0.5, 1.0, "0B", "1 KiB", " 2.5GiB ", "07MB"])
def test_rows_fractions_and_bytes_are_sizes(size):
    check_cache_size(size)


@pytest.mark.parametrize(
    "size",
    [
        -1,
        True,
        False,
        -0.1,
        1.1,
        float("nan"),
        float("inf"),
        "",
        "512",
        "512 mib",
        "0.1",
        "-1MiB",
        "1e3B",
        "1MiB2",
        "50%",
        None,
        [1],
        {"node": 1},
    ],
)
def test_anything_else_is_refused_with_what_was_found_and_what_is_allowed(size):
    with pytest.raises(ConfigError) as caught:
        check_cache_size(size)

    assert str(caught.value) == f"plan_feature.device_cache = {size!r}: it must be {ALLOWED}"


def test_rows_count_for_each_feature_and_stop_at_its_table():
    assert slots(50, (100, 4), (20, 4), (50, 1)) == [50, 20, 50]
    assert slots(0, (100, 4)) == [0]


def test_a_fraction_is_of_each_table():
    assert slots(0.1, (100, 4), (25, 4), (9, 1)) == [10, 2, 0]
    assert slots(1.0, (100, 4), (7, 1)) == [100, 7]


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ("0B", [0, 0]),
        ("880B", [50, 10]),  # half of 1600 + 160 bytes
        ("1760B", [100, 20]),
        ("1.76KB", [100, 20]),
        ("1 KiB", [58, 11]),
    ],
)
def test_bytes_are_split_by_the_bytes_of_the_tables(size, wanted):
    assert slots(size, (100, 4), (20, 2)) == wanted


@given(
    fraction=st.floats(0, 1),
    shapes=st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 300)), min_size=1, max_size=5),
)
def test_invariant_bytes_suffice_for_the_slots_and_are_used(fraction, shapes):
    tables = tables_of(*shapes)
    num_bytes = int(fraction * sum(4 * rows * width for rows, width in shapes))

    found = slots_of_tables(f"{num_bytes}B", tables)

    used = sum(found[key] * table.kind.num_bytes for key, table in tables.items())
    assert used <= num_bytes
    assert num_bytes - used <= sum(table.kind.num_bytes for table in tables.values())
    assert all(0 <= found[key] <= table.num_rows for key, table in tables.items())


def test_without_tables_there_is_nothing_to_split():
    assert slots_of_tables("512MiB", {}) == {}
    assert slots_of_tables(10**9, {}) == {}


def test_tables_without_rows_have_no_slots():
    assert slots("0B", (0, 4)) == [0]
    assert slots(0.5, (0, 4)) == [0]


@pytest.mark.parametrize(
    ("size", "fact"),
    [
        (101, "the largest table has 100 rows"),
        (10**9, "the largest table has 100 rows"),
        ("1761B", "all tables together have 1,760 bytes"),
        ("2GiB", "all tables together have 1,760 bytes"),
    ],
)
def test_more_than_there_is_to_cache_is_refused(size, fact):
    with pytest.raises(ConfigError) as caught:
        slots(size, (100, 4), (20, 2))

    assert str(caught.value) == (
        f"plan_feature.device_cache = {size!r} is larger than what there is to cache: {fact}. "
        f"Give {ALLOWED}."
    )


def test_bytes_are_checked_where_they_are_split_too():
    with pytest.raises(ConfigError, match=r"device_cache = '12 parsecs': it must be rows"):
        slots_of_tables("12 parsecs", tables_of((100, 4)))
