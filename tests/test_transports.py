"""The conformance kit over every transport of the table, and over a toy that a user might add."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featsync.device import CpuDevice
from featsync.errors import PeerError
from featsync.move import Call
from featsync.partition import RangePartition
from featsync.plan import FeatureKey, Fetch, Want
from featsync.remote_rows import Delivery, RemoteRows
from featsync.routes import route_of
from featsync.testing import check_transport, local_engines, local_tables
from featsync.testing.local_ranks import LocalGroup
from featsync.transports import TRANSPORTS, Fetches, Landing, Pull, Transport
from support.processes import wait_until
from support.strategies import partitions

KEY = FeatureKey("node", None, "x")


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_transport_keeps_the_contract(name, num_ranks):
    check_transport(TRANSPORTS[name], num_ranks)


def test_a_rank_that_lives_but_whose_rows_cannot_come_is_named(monkeypatch):
    """That gloo refuses a receive, on a connection that it gave up, is not the user's to see."""

    def refuse(*_):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(LocalGroup, "recv", refuse)
    with local_engines(2) as (engine, _):
        session = engine.open_session()
        arrival = engine.ask(1, {"kind": "order"}, (), torch.empty(1, dtype=torch.uint8))

        with pytest.raises(PeerError, match="rank 0 is cut off from the rows of rank 1") as caught:
            list(engine.wait(arrival, session))

    assert caught.value.peer == "rank 1"


def test_rows_are_ordered_before_those_of_the_minibatch_before_have_landed():
    """Else a link would be idle between the two; the worker has done nothing here."""
    rows = torch.arange(20.0).reshape(10, 2)
    with local_engines(2) as engines:
        table, _ = local_tables(KEY, rows, RangePartition([0, 5, 10]), engines, same_host=False)
        remote = RemoteRows({KEY: table}, {KEY: route_of(table, "p2p")})
        ids, targets = torch.tensor([9, 0, 4, 7]), torch.zeros(2, 4, 2)
        moves = []
        for batch in range(2):
            remote.announce(batch, {KEY: Want((ids,))})
            delivery = Delivery(Fetch(len(ids)), targets[batch])
            fetches = remote.fetch(batch, {KEY: delivery})
            moves += [*fetches.first, *fetches.last]

        assert wait_until(lambda: engines[1].served.rows_read == 4)
        assert not targets.any()
        CpuDevice().execute(moves)
        assert torch.equal(targets, rows[ids].expand(2, 4, 2))
        remote.close()


class Toy(Transport):
    """Reaches into the other rank's memory, which ranks of one process can."""

    @staticmethod
    def reaches(table, rank):
        return True

    def announce(self, batch: int, pulls: Sequence[Pull]) -> None:
        pass

    def fetch(self, batch: int, landings: Sequence[Landing]) -> Fetches:
        return Fetches(last=[Call("toy", lambda one=one: self.copy(one)) for one in landings])

    def copy(self, landing: Landing) -> None:
        rows = landing.pull.table.parts.readable[landing.pull.rank]
        landing.target[torch.from_numpy(landing.positions)] = rows[torch.from_numpy(landing.rows)]


def test_one_file_and_one_line_add_a_transport(monkeypatch):
    check_transport(Toy)
    monkeypatch.setitem(TRANSPORTS, "toy", Toy)
    rows = torch.arange(20.0).reshape(10, 2)
    with local_engines(2) as engines:
        for table in local_tables(KEY, rows, RangePartition([0, 5, 10]), engines):
            route = route_of(table, "toy")
            assert route.transport == "toy"
            assert torch.equal(read(table, route, torch.tensor([9, 0, 4])), rows[[9, 0, 4]])


def read(table, route, ids):
    remote = RemoteRows({KEY: table}, {KEY: route})
    target = torch.zeros((len(ids), *table.kind.shape), dtype=table.kind.dtype)
    remote.announce(0, {KEY: Want((ids,))})
    fetches = remote.fetch(0, {KEY: Delivery(Fetch(len(ids)), target)})
    CpuDevice().execute([*fetches.first, *fetches.last])
    remote.close()
    return target


class Careless(Toy):
    """Breaks one promise."""


class MovesAtOnce(Careless):
    def fetch(self, batch, landings):
        for landing in landings:
            self.copy(landing)
        return Fetches()


class IgnoresMasks(Careless):
    def copy(self, landing):
        pull = landing.pull
        rows = pull.table.parts.readable[pull.rank]
        landing.target[torch.from_numpy(pull.positions)] = rows[torch.from_numpy(pull.rows)]


class Rounds(Careless):
    def copy(self, landing):
        super().copy(landing)
        if landing.target.is_floating_point():
            landing.target.copy_(landing.target.half())


@pytest.mark.parametrize("broken", [MovesAtOnce, IgnoresMasks, Rounds])
def test_the_kit_finds_broken_promises(broken):
    with pytest.raises(AssertionError, match=r"fetch\(\) has moved rows|are not what they should"):
        check_transport(broken)


@settings(max_examples=25)
@given(partitions(), st.data())
def test_rows_are_sent_once_however_often_they_are_wanted_and_nothing_else(drawn, data):
    """Over messages, between 2 to 6 ranks of this process."""
    partition, owners = drawn
    num_ranks = partition.num_ranks
    rows = torch.arange(float(2 * len(owners))).reshape(-1, 2)
    row = st.integers(0, max(0, len(owners) - 1))
    with local_engines(num_ranks) as engines:
        sent = [engine.served for engine in engines]
        for table, engine in zip(
            local_tables(KEY, rows, partition, engines, same_host=False), engines, strict=True
        ):
            wanted = data.draw(st.lists(row, max_size=30)) if owners else []
            ids = torch.tensor(wanted, dtype=torch.int64)
            before = [served.rows_sent for served in sent]
            assert torch.equal(read(table, route_of(table, "p2p"), ids), rows[ids])
            found = np.bincount([owners[i] for i in set(wanted)] or [0], minlength=num_ranks)
            found *= bool(wanted)
            found[engine.world.rank] = 0
            read_now = [s.rows_sent - b for s, b in zip(sent, before, strict=True)]
            assert read_now == found.tolist()
