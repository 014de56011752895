"""A row that several ranks want in one step is read from its home once."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featsync.exchange.packing import packed_bytes, unpack
from featsync.exchange.recent import RecentRows, arranged
from featsync.exchange.served import Served
from featsync.row_kind import RowKind
from support.exchange import gather
from test_exchange_parts import announced, order_of

TABLE = torch.arange(80.0).reshape(40, 2)


def order(served, rank, batch, rows, mask=None):
    """Order what a rank announced, check what it gets, and say which rows it took."""
    taken = list(rows if mask is None else itertools.compress(rows, mask))
    layout = [len(taken)], [RowKind((2,), TABLE.dtype)]
    buffer = torch.empty(packed_bytes(*layout), dtype=torch.uint8)
    (masks,) = gather(served, rank, order_of(0, batch, [mask]), buffer)
    came = np.array(taken, np.int64)[arranged(len(taken), masks)]
    assert torch.equal(next(iter(unpack(buffer, *layout))), TABLE[came])
    return set(taken)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_each_row_is_read_once_a_step_whoever_wants_it(num_ranks, num_steps, data):
    """In any order of ranks, each of which may have some rows cached by then."""
    served = Served()
    served.add(0, TABLE)
    wanted = {}
    for rank in range(num_ranks):
        for step in range(num_steps):
            rows = sorted(data.draw(st.sets(st.integers(0, 39))))
            wanted[rank, step] = rows
            announced(served, rank, 0, step, [(0, rows)])
    for step in range(num_steps):
        before, distinct, num_taken = served.rows_read, set(), served.rows_sent
        for rank in data.draw(st.permutations(range(num_ranks))):
            rows = wanted[rank, step]
            masks = st.one_of(
                st.none(), st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))
            )
            distinct |= order(served, rank, step, rows, data.draw(masks))
        assert served.rows_read - before == len(distinct)
        assert served.rows_sent - num_taken >= len(distinct)


def test_rows_are_let_go_when_nobody_will_order_them():
    served = Served()
    served.add(0, TABLE)
    for rank in (1, 2, 3):
        announced(served, rank, 0, 0, [(0, [rank, 5, 6])])
    recent = []

    def num_kept():
        recent[:] = [values for r in served._recent.values() for values in r._steps.values()]
        return sum(map(len, recent))

    order(served, 1, 0, [1, 5, 6])
    assert num_kept() == 1
    served.lose(2)
    assert num_kept() == 1
    served.forget(3, 0)
    assert num_kept() == 0


def test_a_rank_far_behind_has_its_rows_read_again():
    recent = RecentRows()
    rows = np.arange(10)
    for step in range(4):
        target = torch.empty(10, 2)
        gather(recent, step, TABLE, rows, target, True)
    assert recent.rows_read == 40
    for step, read in ((3, 0), (0, 10)):
        target = torch.empty(10, 2)
        before = recent.rows_read
        gather(recent, step, TABLE, rows, target, False)
        assert torch.equal(target, TABLE[:10])
        assert recent.rows_read - before == read
