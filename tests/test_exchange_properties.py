"""What holds of every exchange, whatever 2 to 5 ranks want and however their steps interleave.

The ranks are those of `featsync.testing`: real engines in one process, whose messages are seen.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featsync.device import CpuDevice
from featsync.exchange.packing import packed_bytes
from featsync.move import Gather
from featsync.partition import OwnerPartition
from featsync.plan import FeatureKey, Fetch, Want
from featsync.remote_rows import Delivery, RemoteRows
from featsync.routes import route_of
from featsync.row_kind import RowKind
from featsync.testing.local_ranks import Mailboxes, local_engines, local_tables
from featsync.transports import TRANSPORTS
from support.strategies import partitions, table_of

WIDE, NARROW = FeatureKey("node", None, "wide"), FeatureKey("edge", None, "narrow")
KINDS = {WIDE: ((5,), torch.float32), NARROW: ((), torch.int16)}


@dataclass(frozen=True)
class Wish:
    """What one minibatch of one rank wants of one feature, and which of it is cached by then."""

    ids: list[int]
    cached: set[int]

    @property
    def missing(self):
        return [i for i in self.ids if i not in self.cached]


@dataclass(frozen=True)
class Run:
    """What all ranks want, and in which order they take their steps.

    Attributes:
        owners: Of each feature, the owner of each of its rows.
        wishes: Of each rank, for each of its minibatches, by feature.
        ahead: Of each rank, how many minibatches are announced before they are fetched.
        turns: Ranks; each takes its next step. What is left is done rank by rank.
    """

    owners: dict[FeatureKey, list[int]]
    wishes: list[list[dict[FeatureKey, Wish]]]
    ahead: list[int]
    turns: list[int]

    @property
    def num_ranks(self):
        return len(self.wishes)

    def missing_of(self, owner, rank, batch):
        """Distinct rows of each feature that a rank wants of an owner for one minibatch."""
        return {
            key: sum(self.owners[key][i] == owner for i in set(wish.missing))
            for key, wish in self.wishes[rank][batch].items()
        }


@st.composite
def wishes(draw, num_rows):
    ids = draw(st.lists(st.integers(0, num_rows - 1), max_size=20)) if num_rows else []
    return Wish(ids, draw(st.sets(st.sampled_from(ids))) if ids else set())


@st.composite
def runs(draw):
    num_ranks = draw(st.integers(2, 5))
    owners = {
        key: draw(partitions(num_ranks, num_ranks, draw(st.sampled_from([0, 20]))))[1]
        for key in KINDS
    }
    of_a_minibatch = st.fixed_dictionaries(
        {}, optional={key: wishes(len(owners[key])) for key in KINDS}
    )
    wanted = [draw(st.lists(of_a_minibatch, max_size=4)) for _ in range(num_ranks)]
    ahead = [draw(st.integers(1, 3)) for _ in range(num_ranks)]
    turns = draw(st.lists(st.integers(0, num_ranks - 1), max_size=60))
    return Run(owners, wanted, ahead, turns)


class Reader:
    """One rank's iteration, step by step.

    Attributes:
        delivered: For each minibatch and feature the rows that arrived, and which are expected.
        gathered: How often each position of each minibatch and feature was gathered to.
    """

    def __init__(self, tables, transport, wholes, wanted, ahead):
        routes = {key: route_of(table, transport) for key, table in tables.items()}
        self.rows = RemoteRows(tables, routes)
        self.wholes, self.wanted = wholes, wanted
        self.delivered, self.gathered = [], Counter()
        self.steps = self._steps(ahead)

    def _steps(self, ahead):
        for batch in range(len(self.wanted) + ahead):
            if batch < len(self.wanted):
                wants = {
                    key: Want((torch.tensor(wish.ids, dtype=torch.int64),))
                    for key, wish in self.wanted[batch].items()
                }
                self.rows.announce(batch, wants)
                yield
            if batch >= ahead:
                yield from self._fetch(batch - ahead)

    def _fetch(self, batch):
        deliveries, wanted = {}, {}
        for key, wish in self.wanted[batch].items():
            target = torch.zeros(len(wish.ids), *KINDS[key][0], dtype=KINDS[key][1])
            is_missing = [i not in wish.cached for i in wish.ids]
            positions = torch.tensor(is_missing, dtype=torch.bool).nonzero().view(-1)
            deliveries[key] = Delivery(Fetch(len(wish.ids), positions), target)
            wanted[key] = torch.zeros_like(target)
            wanted[key][positions] = self.wholes[key][torch.tensor(wish.missing).long()]
        fetches = self.rows.fetch(batch, deliveries)
        moves = [*fetches.first, *fetches.last]
        self.gathered += Counter(
            (batch, move.what, int(position))
            for move in moves
            if isinstance(move, Gather)
            for position in move.positions
        )
        for move in moves:
            CpuDevice().execute([move])
            yield
        self.delivered += [(deliveries[key].target, wanted[key]) for key in wanted]


def carried_out(run, transport, same_host):
    """Carry a run out; returns the readers, and the mailboxes of their messages."""
    mailboxes = Mailboxes()
    wholes = {key: table_of(len(run.owners[key]), *KINDS[key]) for key in KINDS}
    with local_engines(run.num_ranks, mailboxes=mailboxes) as engines:
        parts = {
            key: local_tables(
                key,
                whole,
                OwnerPartition(torch.tensor(run.owners[key]).long().numpy(), run.num_ranks),
                engines,
                same_host=same_host,
            )
            for key, whole in wholes.items()
        }
        readers = [
            Reader(
                {key: tables[rank] for key, tables in parts.items()},
                transport,
                wholes,
                run.wishes[rank],
                run.ahead[rank],
            )
            for rank in range(run.num_ranks)
        ]
        for rank in run.turns:
            next(readers[rank].steps, None)
        for reader in readers:
            for _ in reader.steps:
                pass
            reader.rows.close()
    return readers, mailboxes


@settings(max_examples=150)
@pytest.mark.parametrize(
    ("transport", "same_host"),
    [*((name, True) for name in TRANSPORTS), ("auto", False), ("p2p", False)],
    ids=lambda value: {True: "one machine", False: "machines"}.get(value, value),
)
@given(run=runs())
def test_invariant_every_rank_gets_its_rows_each_from_one_place_and_nothing_else_is_sent(
    transport, same_host, run
):
    readers, mailboxes = carried_out(run, transport, same_host)

    by_message = transport == "p2p" or not same_host
    for rank, reader in enumerate(readers):
        for found, wanted in reader.delivered:
            assert torch.equal(found, wanted)
        assert set(reader.gathered.values()) <= {1}
        wished = [(key, w.missing) for wanted in run.wishes[rank] for key, w in wanted.items()]
        num_sent = sum(run.owners[key][i] != rank for key, ids in wished for i in set(ids))
        num_places = sum(len(ids) for _, ids in wished)
        assert reader.gathered.total() == num_places - by_message * num_sent
    assert sorted(message.num_bytes for message in mailboxes.sent) == sorted(
        wanted_bytes(run) if by_message else []
    )


def wanted_bytes(run):
    """Bytes that each rank wants of each other rank for each minibatch, where it wants any."""
    kinds = {key: RowKind(*kind) for key, kind in KINDS.items()}
    for rank in range(run.num_ranks):
        for batch in range(len(run.wishes[rank])):
            for owner in set(range(run.num_ranks)) - {rank}:
                missing = run.missing_of(owner, rank, batch)
                num_bytes = packed_bytes(list(missing.values()), [kinds[key] for key in missing])
                if num_bytes:
                    yield num_bytes


@settings(max_examples=150)
@given(run=runs())
def test_invariant_ranks_send_in_the_order_in_which_their_peers_receive(run):
    _, mailboxes = carried_out(run, "p2p", same_host=False)

    assert by_pair(mailboxes.sent) == by_pair(mailboxes.posted)


def by_pair(messages):
    """Tags and sizes of the messages from one rank to another, in order."""
    found = defaultdict(list)
    for message in messages:
        found[message.sender, message.receiver].append((message.tag, message.num_bytes))
    return found
