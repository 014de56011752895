"""Entries of one row, merged by rounds and shares, as if taken one by one in their order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featsync.dynamic.merge import MERGES, Entries, RowNumbers, rounds_of
from support.dynamic_programs import merged
from support.tensors import COMPLEX, DTYPES, FLOATS, awkward_rows, same_bits

NUM_ROWS = 7
CALLS = st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=12), max_size=5)

# Whole numbers are not added up.
KINDS = [
    (name, dtype)
    for name, merge in MERGES.items()
    for dtype in ((*FLOATS, *COMPLEX) if merge.needs_floats else DTYPES)
]


def entries_of(calls, values, numbers):
    start = 0
    for rows in calls:
        ids = np.array(rows, np.int64)
        yield Entries(ids, values[start : start + len(rows)], numbers.are_distinct(ids))
        start += len(rows)


def by_shares(table, calls, values, merge, num_shares):
    numbers = RowNumbers(len(table))
    after = table.clone()
    for share in reversed(range(num_shares)):
        entries = entries_of(calls, values, numbers)
        MERGES[merge].apply(after, list(rounds_of(entries, share, num_shares)), numbers)
    return after


def one_by_one(table, calls, values, merge):
    parts = torch.split(values[: sum(map(len, calls))], [len(rows) for rows in calls])
    rows = [torch.tensor(rows, dtype=torch.int64) for rows in calls]
    return merged(table, list(zip(rows, parts, strict=True)), merge)


@pytest.mark.parametrize("merge", MERGES)
@given(calls=CALLS, num_shares=st.integers(1, 3), seed=st.integers(0, 99))
def test_rounds_and_shares_give_what_entries_one_by_one_give(merge, calls, num_shares, seed):
    torch.manual_seed(seed)
    table, values = torch.randn(NUM_ROWS, 3), torch.randn(60, 3)
    found = by_shares(table, calls, values, merge, num_shares)
    assert same_bits(found, one_by_one(table, calls, values, merge))


@pytest.mark.parametrize(("merge", "dtype"), KINDS, ids=str)
def test_every_dtype_and_any_bits(merge, dtype):
    table = awkward_rows(dtype)
    calls, values = [[3, 5, 3, 0], [5, 3, 9], [19]], awkward_rows(dtype, (8, 3))
    found = by_shares(table, calls, values, merge, 2)
    single = [0, 9, 19]
    assert same_bits(found[single], values[[3, 6, 7]])
    untouched = [row for row in range(20) if row not in (0, 3, 5, 9, 19)]
    assert same_bits(found[untouched], table[untouched])
    if merge == "last":
        assert same_bits(found[[3, 5]], values[[5, 4]])


def test_the_order_of_sums_is_that_of_the_entries():
    table = torch.zeros(2, 1)
    big = torch.tensor([[1e8], [1.0], [-1e8], [3.0]])
    found = by_shares(table, [[0, 0], [0], [0]], big, "sum", 1)
    assert found[0] == torch.tensor(3.0)  # 1e8 + 1 is 1e8
    mixed = big[[0, 2, 1, 3]]
    assert by_shares(table, [[0, 0], [0], [0]], mixed, "sum", 1)[0] == torch.tensor(4.0)


def test_one_row_named_thousands_of_times_is_no_matter_of_squares():
    rows = [0] * 20_000
    values = torch.ones(20_000, 1)
    found = by_shares(torch.zeros(2, 1), [rows], values, "sum", 1)
    assert found[0] == 20_000


@given(rows=st.lists(st.integers(0, NUM_ROWS - 1), max_size=9))
def test_distinct_rows_are_told_from_repeated_ones(rows):
    numbers = RowNumbers(NUM_ROWS)
    for _ in range(2):  # nothing is left of the first look
        found = numbers.are_distinct(np.array(rows, np.int64))
        assert found == (len(set(rows)) == len(rows))
