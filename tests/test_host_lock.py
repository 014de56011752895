"""The lock of a machine: one holder at a time, in any process, and a dead holder is noticed."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from featsync import futex
from featsync.errors import ConfigError, PeerError, PeerTimeoutError, PlanError
from featsync.futex import LINE_BYTES
from featsync.host_lock import HostLock
from featsync.segment import Segment
from featsync.signals import Signals
from support.processes import assert_ends_well, open_descriptors, other_process

LIMIT_S = 30.0
NEVER_S = 600.0
NUM_SIGNALS = 2
SIZE = HostLock.NUM_BYTES + Signals.num_bytes(NUM_SIGNALS) + LINE_BYTES


def name_of(rank):
    return f"rank {rank}"


def lock_of(memory, rank):
    return HostLock(memory, rank, "the shared cache", name_of)


def signals_of(memory):
    return Signals(memory[HostLock.NUM_BYTES :], NUM_SIGNALS)


def count_of(memory):
    """A number that the lock protects."""
    return memory[-LINE_BYTES:].view(np.int64)[:1]


@pytest.fixture
def segment():
    segment = Segment.create(SIZE)
    HostLock.lay(segment.array)
    return segment


@pytest.fixture
def one_long_sleep(monkeypatch):
    """Nobody looks again on their own: who is not woken comes too late."""
    monkeypatch.setattr(futex, "SLICE_S", NEVER_S)


def in_thread(body, *args):
    thread = threading.Thread(target=body, args=args, daemon=True)
    thread.start()
    return thread


def hold_until(lock, is_held, may_end):
    with lock.hold(NEVER_S):
        is_held.set()
        may_end.wait(LIMIT_S)


def increase(memory, rank, times):
    lock = lock_of(memory, rank)
    count = count_of(memory)
    for _ in range(times):
        with lock.hold(NEVER_S):
            before = int(count[0])
            for _ in range(20):  # room for others to come in between
                count[0] = before
            count[0] = before + 1


def increase_elsewhere(handle, rank, times):
    futex.SLICE_S = NEVER_S
    memory = Segment.open(handle).array
    signals_of(memory).advance(0, 1)
    increase(memory, rank, times)


@pytest.mark.usefixtures("one_long_sleep")
def test_threads_and_processes_exclude_each_other_and_none_is_forgotten(segment):
    with other_process(increase_elsewhere, segment.handle, 1, 3000) as process:
        assert signals_of(segment.array).wait(0, 1, LIMIT_S)
        threads = [in_thread(increase, segment.array, 0, 1500) for _ in range(2)]
        for thread in threads:
            thread.join(LIMIT_S)
        assert_ends_well(process)

    assert count_of(segment.array)[0] == 6000


@pytest.mark.usefixtures("one_long_sleep")
def test_who_waits_gets_it_when_it_is_released(segment):
    is_held, may_end, got_it = threading.Event(), threading.Event(), threading.Event()
    holder = in_thread(hold_until, lock_of(segment.array, 0), is_held, may_end)
    assert is_held.wait(LIMIT_S)
    waiter = in_thread(hold_until, lock_of(segment.array, 1), got_it, may_end)
    assert not got_it.wait(0.05)

    may_end.set()

    assert got_it.wait(LIMIT_S)
    holder.join(LIMIT_S)
    waiter.join(LIMIT_S)


def test_a_wait_ends_at_its_limit_and_names_the_holder(segment):
    is_held, may_end = threading.Event(), threading.Event()
    holder = in_thread(hold_until, lock_of(segment.array, 5), is_held, may_end)
    assert is_held.wait(LIMIT_S)
    lock = lock_of(segment.array, 1)

    with (
        pytest.raises(
            PeerTimeoutError, match=r"lock of the shared cache was not free within 0\.05 s: rank 5"
        ) as caught,
        lock.hold(0.05),
    ):
        pass

    assert caught.value.peer == "rank 5"
    may_end.set()
    holder.join(LIMIT_S)
    with lock.hold(0.0):
        pass


def test_the_check_is_asked_while_it_waits(segment, monkeypatch):
    monkeypatch.setattr(futex, "SLICE_S", 0.005)
    is_held, may_end = threading.Event(), threading.Event()
    holder = in_thread(hold_until, lock_of(segment.array, 0), is_held, may_end)
    assert is_held.wait(LIMIT_S)

    def check():
        raise PeerError("rank 7 has a fault", "rank 7")

    with (
        pytest.raises(PeerError, match="rank 7 has a fault"),
        lock_of(segment.array, 1).hold(LIMIT_S, check),
    ):
        pass
    may_end.set()
    holder.join(LIMIT_S)


def hold_for_ever(handle, rank):
    memory = Segment.open(handle).array
    signals = signals_of(memory)
    with lock_of(memory, rank).hold(LIMIT_S):
        count_of(memory)[0] = 1
        signals.advance(0, 1)
        signals.wait(1, 1, LIMIT_S)


def hold(lock):
    with lock.hold(LIMIT_S):
        pass


def test_a_killed_holder_is_named_to_everybody_for_ever(segment):
    locks = [lock_of(segment.array, rank) for rank in range(2)]
    heard = []

    def wait():
        with pytest.raises(PeerError) as caught:
            hold(locks[0])
        heard.append(caught.value)

    with other_process(hold_for_ever, segment.handle, 3) as holder:
        assert signals_of(segment.array).wait(0, 1, LIMIT_S)
        waiter = in_thread(wait)
        holder.kill()
        holder.join(LIMIT_S)
        waiter.join(LIMIT_S)

    for lock in locks:
        for _ in range(2):
            with pytest.raises(PeerError) as caught:
                hold(lock)
            heard.append(caught.value)
    assert len(heard) == 5
    for error in heard:
        assert not isinstance(error, PeerTimeoutError)
        assert error.peer == "rank 3"
        assert "rank 3 ended while it held the lock of the shared cache" in str(error)
        assert "half done" in str(error)


def test_a_killed_process_that_holds_nothing_harms_nobody(segment):
    with other_process(increase_elsewhere, segment.handle, 1, 10) as process:
        assert_ends_well(process)

    hold(lock_of(segment.array, 0))


def test_a_holder_thread_that_ends_is_noticed(segment):
    lock = lock_of(segment.array, 0)

    thread = in_thread(lock._try)  # no `with`: that would release it
    thread.join(LIMIT_S)

    with pytest.raises(PeerError, match="rank 0 ended while it held"):
        hold(lock_of(segment.array, 1))


def test_holding_twice_is_refused_and_the_first_still_holds(segment):
    lock = lock_of(segment.array, 0)

    with lock.hold(LIMIT_S), pytest.raises(PlanError, match="already holds the lock of the shared"):
        hold(lock)
    hold(lock_of(segment.array, 1))


def test_a_body_that_raises_releases_it(segment):
    with pytest.raises(ZeroDivisionError), lock_of(segment.array, 0).hold(LIMIT_S):
        raise ZeroDivisionError

    hold(lock_of(segment.array, 1))


def test_the_word_that_wakes_begins_again_at_its_end(segment):
    words = segment.array[LINE_BYTES:].view(np.uint32)
    words[0] = 2**32 - 1

    hold(lock_of(segment.array, 0))

    assert words[0] == 0
    hold(lock_of(segment.array, 0))


def test_memory_without_a_lock_is_refused():
    memory = Segment.create(1000).array

    with pytest.raises(ConfigError, match="the lock of the shared cache: no lock was laid"):
        lock_of(memory, 0)
    with pytest.raises(ConfigError, match="8 bytes into a line"):
        HostLock.lay(memory[8:])
    with pytest.raises(ConfigError, match="it needs 128"):
        HostLock.lay(memory[:100])


def test_a_lock_leaves_nothing_behind():
    before = open_descriptors()
    segment = Segment.create(SIZE)
    HostLock.lay(segment.array)
    lock = lock_of(segment.array, 0)
    hold(lock)
    assert open_descriptors() > before

    del segment, lock

    assert open_descriptors() == before
