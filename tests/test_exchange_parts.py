"""The pieces of an exchange that need no other rank: codes, splits, layouts, messages."""

from __future__ import annotations

import socket

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featsync.errors import FeatureError, PeerError, PlanError
from featsync.exchange.frames import FrameReader, encode_frame
from featsync.exchange.id_code import decode, encode
from featsync.exchange.packing import packed_bytes, unpack
from featsync.exchange.served import Served
from featsync.exchange.split import split_by_rank
from featsync.partition import RangePartition
from featsync.row_kind import RowKind
from support.exchange import gather
from support.strategies import partitions

LIMITS = st.sampled_from([1, 300, 70_000, 2**31, 2**33])


@given(LIMITS.flatmap(lambda most: st.lists(st.integers(0, most), max_size=300)))
def test_ids_arrive_as_they_were_in_at_most_four_bytes_each(numbers):
    sorted_numbers = np.sort(np.array(numbers, np.int64))

    code, data = encode(sorted_numbers)

    assert decode(code, data, len(numbers)).tolist() == sorted_numbers.tolist()
    if not numbers or max(numbers) < 2**32:
        assert len(data) <= 4 * len(numbers)


def test_a_tenth_of_the_rows_takes_about_a_byte_an_id():
    numbers = np.flatnonzero(np.random.default_rng(0).random(100_000) < 0.1)

    _, data = encode(numbers)

    assert len(data) < 1.01 * len(numbers)


@pytest.mark.parametrize(("code", "num_bytes"), [(0, 7), (1, 1), (1, 5), (2, 4), (9, 8)])
def test_bytes_that_no_peer_sends_are_refused(code, num_bytes):
    with pytest.raises(PlanError, match="please report it"):
        decode(code, np.zeros(num_bytes, np.uint8), 2)


@given(partitions(), st.data(), st.integers(1, 3))
def test_every_wanted_row_comes_from_exactly_one_place(drawn, data, num_parts):
    partition, owners = drawn
    row = st.integers(0, len(owners) - 1) if owners else st.nothing()
    parts = [data.draw(st.lists(row, max_size=40)) for _ in range(num_parts if owners else 0)]
    wanted = [i for part in parts for i in part]
    ids = [torch.tensor(part, dtype=torch.int32) for part in parts] or [torch.empty(0).long()]

    found = split_by_rank("x", ids, partition)

    firsts = [p for part in found for p in part.positions]
    repeats = [part.repeats for part in found if part.repeats is not None]
    others = [p for of_rank in repeats for p in of_rank.positions]
    assert sorted([*firsts, *others]) == list(range(len(wanted)))
    assert len(firsts) == len(set(wanted))
    assert [part.rank for part in found] == sorted({owners[i] for i in wanted})
    for part in found:
        assert part.rows.tolist() == sorted(set(part.rows.tolist()))
        ids_of_rank = partition.rows_of(part.rank)[part.rows]
        assert ids_of_rank.tolist() == [wanted[p] for p in part.positions]
        if part.repeats is not None:
            assert set(part.repeats.sources) <= set(part.positions)
            for position, source in zip(*part.repeats, strict=True):
                assert wanted[position] == wanted[source]


@pytest.mark.parametrize("outside", [-1, 20])
def test_an_id_outside_the_table_is_named(outside):
    partition = RangePartition([0, 7, 20])
    with pytest.raises(FeatureError, match=rf"feature x: id {outside} is outside .* of 20 rows"):
        split_by_rank("x", [torch.tensor([3]), torch.tensor([19, outside, 0])], partition)


KINDS = st.builds(
    RowKind,
    st.lists(st.integers(0, 3), max_size=2).map(tuple),
    st.sampled_from([torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.complex64]),
)


@given(st.lists(st.tuples(st.integers(0, 5), KINDS), max_size=6))
def test_rows_of_several_features_lie_side_by_side_in_one_buffer(parts):
    counts, kinds = [n for n, _ in parts], [kind for _, kind in parts]
    buffer = torch.zeros(packed_bytes(counts, kinds), dtype=torch.uint8)

    views = list(unpack(buffer, counts, kinds))

    for number, view in enumerate(views):
        view.view(-1).view(torch.uint8).fill_(number + 1)
    for number, (view, (n, kind)) in enumerate(zip(views, parts, strict=True)):
        assert (view.shape, view.dtype) == ((n, *kind.shape), kind.dtype)
        assert (view.reshape(-1).view(torch.uint8) == number + 1).all()


@given(
    st.lists(st.tuples(st.integers(0, 9), st.binary(max_size=50)), max_size=5), st.integers(1, 30)
)
def test_messages_arrive_whole_however_they_are_cut(messages, portion):
    here, there = socket.socketpair()
    with here, there:
        there.setblocking(False)
        reader, found = FrameReader("rank 1"), []
        sent = b"".join(
            encode_frame({"kind": number}, [np.frombuffer(data, np.uint8)])
            for number, data in messages
        )
        for start in range(0, len(sent), portion):
            here.sendall(sent[start : start + portion])
            found += reader.read(there)

        assert [(f.words["kind"], f.numbers.tobytes()) for f in found] == messages
        here.close()
        with pytest.raises(EOFError):
            list(reader.read(there))


def test_what_is_no_message_of_featsync_is_refused():
    here, there = socket.socketpair()
    with here, there:
        there.setblocking(False)
        here.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(PeerError, match=r"rank 1 sent b'GET .* same version of featsync"):
            list(FrameReader("rank 1").read(there))


def announced(served, rank, session, batch, parts):
    coded = [(number, len(rows), *encode(np.array(rows))) for number, rows in parts]
    words = {
        "session": session,
        "batch": batch,
        "parts": [[number, n, code, len(data)] for number, n, code, data in coded],
    }
    served.announce(rank, frame_of(words, [data for *_, data in coded]))


def frame_of(words, numbers=()):
    here, there = socket.socketpair()
    with here, there:
        here.sendall(encode_frame({"kind": "", **words}, numbers))
        there.setblocking(False)
        (frame,) = FrameReader("rank 1").read(there)
    return frame


def order_of(session, batch, masks=(None,)):
    packed = [None if mask is None else np.packbits(np.array(mask, bool)) for mask in masks]
    words = {
        "session": session,
        "batch": batch,
        "masks": [None if mask is None else len(mask) for mask in packed],
    }
    return frame_of(words, [mask for mask in packed if mask is not None])


def test_an_owner_sends_what_was_announced_and_is_still_wanted_once():
    served = Served()
    x, y = torch.arange(20.0).reshape(10, 2), torch.arange(10, dtype=torch.int16)
    served.add(0, x)
    served.add(1, y)
    announced(served, 3, 0, 5, [(0, [1, 4, 9]), (1, [0, 0, 2])])
    buffer = torch.empty(16 + 16, dtype=torch.uint8)

    gather(served, 3, order_of(0, 5, [[1, 0, 1], None]), buffer)

    rows = list(unpack(buffer, [2, 3], [RowKind((2,), x.dtype), RowKind((), y.dtype)]))
    assert torch.equal(rows[0], x[[1, 9]])
    assert torch.equal(rows[1], y[[0, 0, 2]])
    assert served.rows_sent == served.rows_read == 5
    with pytest.raises(PlanError, match="minibatch 5 were ordered but not announced"):
        gather(served, 3, order_of(0, 5), buffer)


def test_an_order_of_another_size_than_the_owner_would_send_is_refused():
    served = Served()
    served.add(0, torch.zeros(10, 2))
    announced(served, 1, 0, 0, [(0, [1, 2])])
    with pytest.raises(PlanError, match=r"8 bytes were ordered where .* are 16"):
        gather(served, 1, order_of(0, 0), torch.empty(8, dtype=torch.uint8))


def test_what_an_iteration_or_a_rank_announced_is_forgotten_with_it():
    served = Served()
    served.add(0, torch.zeros(10, 2))
    for rank, session in ((1, 0), (1, 1), (2, 0)):
        announced(served, rank, session, 0, [(0, [1])])
    buffer = torch.empty(16, dtype=torch.uint8)

    served.forget(1, 0)
    served.forget(1, 7)  # announced nothing
    served.lose(2)

    gather(served, 1, order_of(1, 0), buffer)
    for rank, session in ((1, 0), (2, 0)):
        with pytest.raises(PlanError, match="not announced"):
            gather(served, rank, order_of(session, 0), buffer)
