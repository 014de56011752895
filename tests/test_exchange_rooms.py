"""Shared memory by name: one for all who ask, on the same terms, and only the newest is kept."""

from __future__ import annotations

import gc
import json

import pytest

from featsync.errors import ConfigError
from featsync.exchange.rooms import Rooms, given_room, room_prefix
from featsync.host_lock import HostLock
from featsync.segment import Segment
from support.processes import open_descriptors

TERMS = {"slots": 5}


def ask(rooms, name="a", generation=0, terms=TERMS, by="rank 1"):
    # As it crosses a connection.
    return given_room(json.loads(json.dumps(rooms.give(name, generation, 100, terms, by))))


def test_all_who_ask_get_the_same_memory_with_a_lock_in_it():
    rooms = Rooms()
    here, there = (Segment.open(ask(rooms, by=f"rank {rank}").handle) for rank in range(2))
    here.array[HostLock.NUM_BYTES] = 7
    assert there.array[HostLock.NUM_BYTES] == 7
    assert len(there.array) == HostLock.NUM_BYTES + 100
    locks = [
        HostLock(room.array[: HostLock.NUM_BYTES], rank, "it", str)
        for rank, room in enumerate((here, there))
    ]
    with locks[0].hold(1.0), pytest.raises(Exception, match="it"), locks[1].hold(0.01):
        pytest.fail("two hold one lock")


def test_other_terms_are_refused_and_both_are_named():
    rooms = Rooms()
    ask(rooms, by="rank 0")
    with pytest.raises(ConfigError, match=r"rank 0 has .*5.*rank 3 asks for .*6"):
        ask(rooms, terms={"slots": 6}, by="rank 3")


def test_who_asks_for_an_older_generation_gets_the_newest():
    rooms = Rooms()
    first = ask(rooms)
    newer = ask(rooms, generation=2)
    assert (first.generation, newer.generation) == (0, 2)
    assert ask(rooms, generation=0) == newer
    assert ask(rooms, generation=1) == newer
    assert Segment.open(newer.handle).array[HostLock.NUM_BYTES :].sum() == 0


def test_generations_that_were_given_up_take_no_memory():
    rooms = Rooms()
    ask(rooms)
    gc.collect()
    before = open_descriptors()
    for generation in range(1, 20):
        ask(rooms, generation=generation)
    gc.collect()
    assert open_descriptors() == before


def test_rooms_of_a_table_go_with_it_and_no_others():
    rooms = Rooms()
    names = [f"{room_prefix(table)}cache" for table in (1, 12)]
    kept = [ask(rooms, name) for name in names]
    rooms.forget(room_prefix(1))
    assert ask(rooms, names[0], terms={"slots": 9}) != kept[0]
    assert ask(rooms, names[1]) == kept[1]
