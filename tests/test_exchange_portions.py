"""Rows in portions: cut alike on both sides, and each sent only once it has been read."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from featsync.exchange import portions
from featsync.exchange.packing import packed_bytes, rows_within, unpack
from featsync.exchange.portions import Read, by_portion, portion_ends
from featsync.partition import RangePartition
from featsync.plan import FeatureKey
from featsync.row_kind import RowKind
from featsync.testing import local_engines, local_tables
from featsync.testing.local_ranks import Mailboxes
from featsync.testing.rows import random_bits
from featsync.transports.contract import Landing, Pull
from featsync.transports.p2p import PointToPoint

KINDS = [
    RowKind((3,), torch.float32),
    RowKind((), torch.int16),
    RowKind((0,), torch.float32),
    RowKind((5, 7), torch.float64),
]
COUNTS = st.lists(st.integers(0, 40), min_size=len(KINDS), max_size=len(KINDS))


@given(st.integers(1, 1 << 34))
def test_portions_are_few_cover_the_message_and_are_cut_at_aligned_bytes(num_bytes):
    ends = portion_ends(num_bytes)

    assert 1 <= len(ends) <= 4
    assert ends[-1] == num_bytes
    assert sorted(set(ends)) == ends
    assert all(end % 64 == 0 for end in ends[:-1])
    if num_bytes < 1 << 23:
        assert ends == [num_bytes]


@given(COUNTS, st.data())
def test_what_a_portion_holds_was_read_before_and_what_it_completes_is_known(counts, data):
    """Several reads a table, some of no rows; cuts anywhere, through rows as well."""
    num_bytes = packed_bytes(counts, KINDS)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, num_bytes)), max_size=5)))
    ends = [*(cut for cut in cuts if cut < num_bytes), num_bytes]
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    wanted = torch.zeros_like(buffer)
    reads = []
    for into, target, kind in zip(
        unpack(wanted, counts, KINDS), unpack(buffer, counts, KINDS), KINDS, strict=True
    ):
        table = random_bits(kind.dtype, (50, *kind.shape))
        rows = np.arange(len(target))[::-1].copy()
        into.copy_(table[torch.from_numpy(rows)])
        half = data.draw(st.integers(0, len(rows)))
        reads += [Read(table, rows[:half], target[:half]), Read(table, rows[half:], target[half:])]

    complete = [0] * len(KINDS)
    for end, portion in zip(ends, by_portion(reads, buffer, ends), strict=True):
        for read in portion:
            read.carry_out()
        assert torch.equal(buffer[:end], wanted[:end])
        now = rows_within(end, counts, KINDS)
        assert all(before <= after for before, after in zip(complete, now, strict=True))
        views = unpack(buffer, counts, KINDS)
        for there, view, right in zip(now, views, unpack(wanted, counts, KINDS), strict=True):
            same = view[:there].contiguous().view(-1).view(torch.uint8)
            assert torch.equal(same, right[:there].contiguous().view(-1).view(torch.uint8))
        complete = now
    assert complete == counts


def test_a_message_in_portions_arrives_part_by_part(monkeypatch):
    """Rows of the first portions are in place while the last is still under way."""
    monkeypatch.setattr(portions, "_LEAST_BYTES", 64)
    rows, mailboxes = torch.arange(400.0).reshape(100, 4), Mailboxes()
    with local_engines(2, mailboxes=mailboxes) as engines:
        table, _ = local_tables(
            FeatureKey("node", None, "x"), rows, RangePartition([0, 0, 100]), engines
        )
        session = engines[0].open_session()
        transport = PointToPoint(engines[0], session)
        wanted, target = np.arange(0, 100, 2), torch.zeros(50, 4)
        pull = Pull(table, 1, wanted, np.arange(50)[::-1].copy())
        transport.announce(0, [pull])
        (move,) = transport.fetch(0, [Landing(pull, None, target)]).last
        move.action()

        assert torch.equal(target, rows[torch.from_numpy(wanted)].flip(0))
        assert [message.num_bytes for message in mailboxes.sent] == [256, 256, 256, 32]
        assert len(mailboxes.posted) == 4
        received = engines[0].traffic.received["rows"]
        assert (received.messages, received.num_bytes) == (4, 800)
        engines[0].close_session(session)
