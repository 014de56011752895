"""Waiting for a rank: it is named when it is silent, gone, or lives and does not answer."""

from __future__ import annotations

import logging

import pytest

from featsync.errors import PeerError, PeerTimeoutError
from featsync.exchange import vigil as module
from featsync.exchange.faults import Faults
from featsync.exchange.vigil import Vigil
from featsync.world import World


class Links:
    """Of one other rank."""

    def __init__(self):
        self.is_there, self.heard, self.sent = True, 0.0, []

    def is_open(self, rank):
        return self.is_there

    def last_heard(self, rank):
        return self.heard

    def send(self, rank, words):
        self.sent.append(words["kind"])


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def vigil_over(links, faults=None, session=None):
    world = World(0, (0, 1), None, 10.0)
    return Vigil(world, links, faults or Faults(), session, rank=1, timeout=10.0)


def test_a_silent_rank_is_asked_first_and_then_named(clock):
    links = Links()
    vigil = vigil_over(links)
    vigil.look()
    assert links.sent == []
    clock.now += 3
    vigil.look()
    assert links.sent == ["ping"]
    clock.now += 8
    with pytest.raises(PeerTimeoutError, match=r"waited 10 s for rows of rank 1, which gave no"):
        vigil.look()


def test_a_rank_that_lives_is_warned_of_once_and_given_up_in_the_end(clock, caplog):
    links = Links()
    vigil = vigil_over(links)
    with caplog.at_level(logging.WARNING):
        for _ in range(59):
            clock.now += 5
            links.heard = clock.now
            vigil.look()
    assert [r.getMessage() for r in caplog.records] == [
        "rank 0 has waited 15 s for rank 1, which lives but is busy"
    ]
    clock.now = links.heard = clock.now + 6
    with pytest.raises(PeerTimeoutError, match=r"300 s for rank 1, which lives but does not"):
        vigil.look()


def test_who_has_ended_or_failed_is_named_at_once(clock):
    links, faults = Links(), Faults()
    faults.watch(4)
    faults.add(PeerError("rank 1 failed: KeyError", "rank 1"))
    with pytest.raises(PeerError, match="rank 1 failed: KeyError"):
        vigil_over(links, faults, 4).look()
    links.is_there = False
    with pytest.raises(PeerError, match="rank 1 has ended"):
        vigil_over(links).look()
