"""Counters in shared memory: who waits is woken, in any process, and sees what was written."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featsync import futex
from featsync.errors import ConfigError, PeerError, PlanError
from featsync.futex import LINE_BYTES, FutexWord
from featsync.segment import Segment
from featsync.signals import Signals
from support.processes import open_descriptors

LIMIT_S = 30.0
NEVER_S = 600.0


@pytest.fixture
def one_long_sleep(monkeypatch):
    """Nobody looks again on their own: who misses a wake-up sleeps on beyond the test's limit."""
    monkeypatch.setattr(futex, "SLICE_S", NEVER_S)


@pytest.fixture
def short_sleeps(monkeypatch):
    monkeypatch.setattr(futex, "SLICE_S", 0.005)


def new_signals(count=1):
    return Signals(Segment.create(Signals.num_bytes(count)).array, count)


def in_thread(body, *args):
    """Start a thread; what `body` returns is in the list by the time it is joined."""
    results = []
    thread = threading.Thread(target=lambda: results.append(body(*args)), daemon=True)
    thread.start()
    return thread, results


def is_asleep(thread):
    """Whether a thread sleeps on a word of shared memory; the GIL's own words are private."""
    number, _, operation, *_ = (
        *Path(f"/proc/self/task/{thread.native_id}/syscall").read_text().split(),
        "",
        "",
    )
    return (number, operation) == ("202", "0x0")


def act_while_asleep(action):
    """Wait until the main thread sleeps, then act."""
    while not is_asleep(threading.main_thread()):
        time.sleep(0.001)
    action()


def test_all_counters_begin_at_0_and_have_a_line_each():
    memory = Segment.create(4096).array
    memory[Signals.num_bytes(3) :] = 9
    signals = Signals(memory, 3)

    assert [signals.value(i) for i in range(3)] == [0, 0, 0]
    signals.advance(1, 0x0102030405)

    assert Signals.num_bytes(3) == 3 * LINE_BYTES
    written = np.flatnonzero(memory[: Signals.num_bytes(3)])
    assert written.tolist() == [64, 65, 66, 67, 68]
    assert (memory[Signals.num_bytes(3) :] == 9).all()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**62)), max_size=30))
def test_counters_only_rise_and_all_who_map_them_see_the_same(steps):
    segment = Segment.create(Signals.num_bytes(4))
    signals = Signals(segment.array, 4)
    others = Signals(Segment.open(segment.handle, writable=False).array, 4)
    expected = [0, 0, 0, 0]

    for counter, to in steps:
        if to < expected[counter]:
            with pytest.raises(
                PlanError, match=f"signal {counter} stands at .* would fall to {to}"
            ):
                signals.advance(counter, to)
        else:
            signals.advance(counter, to)
            expected[counter] = to
        assert [others.value(i) for i in range(4)] == expected
        assert all(others.wait(i, expected[i], 0.0) for i in range(4))
        assert not any(others.wait(i, expected[i] + 1, 0.0) for i in range(4))


def test_a_wait_ends_at_its_limit():
    signals = new_signals()
    start = time.monotonic()

    assert not signals.wait(0, 1, 0.05)
    assert time.monotonic() - start >= 0.05


@pytest.mark.usefixtures("one_long_sleep")
def test_an_advance_wakes_all_who_wait_for_so_much_and_no_others():
    signals = new_signals(2)
    woken = [in_thread(signals.wait, 1, count, NEVER_S) for count in (1, 2, 2)]
    thread, results = in_thread(signals.wait, 1, 3, NEVER_S)

    signals.advance(1, 2)
    for waiter, _ in woken:
        waiter.join(LIMIT_S)
    assert [outcome for _, outcome in woken] == [[True], [True], [True]]
    assert thread.is_alive()
    assert results == []

    signals.advance(1, 3)
    thread.join(LIMIT_S)
    assert results == [True]


@pytest.mark.usefixtures("one_long_sleep")
@pytest.mark.parametrize(("before", "after"), [(2**32 - 1, 2**32), (0, 2**32), (5, 2**40 + 5)])
def test_counts_beyond_32_bits_wake_too(before, after):
    signals = new_signals()
    signals.advance(0, before)
    thread, results = in_thread(signals.wait, 0, after, NEVER_S)
    while not is_asleep(thread):
        time.sleep(0.001)

    signals.advance(0, after)

    thread.join(LIMIT_S)
    assert results == [True]


@pytest.mark.usefixtures("one_long_sleep")
def test_waiting_holds_no_gil():
    """Otherwise the thread that advances could not run before the limit is over."""
    signals = new_signals()
    thread, _ = in_thread(act_while_asleep, lambda: signals.advance(0, 1))

    assert signals.wait(0, 1, 10.0)
    thread.join(LIMIT_S)


@pytest.mark.usefixtures("short_sleeps")
def test_the_check_is_asked_again_and_again_and_what_it_raises_ends_the_wait():
    signals = new_signals()
    calls = []

    def check():
        calls.append(None)
        if len(calls) == 3:
            raise PeerError("rank 1 has ended", "rank 1")

    with pytest.raises(PeerError, match="rank 1 has ended"):
        signals.wait(0, 1, LIMIT_S, check)
    assert len(calls) == 3


@pytest.mark.usefixtures("short_sleeps")
def test_a_counter_that_moves_all_the_time_does_not_keep_the_check_away():
    signals = new_signals()
    is_over = threading.Event()

    def keep_moving():
        while not is_over.is_set():
            signals.advance(0, signals.value(0) + 1)

    def check():
        raise PeerError("enough", "rank 1")

    thread, _ = in_thread(keep_moving)
    try:
        with pytest.raises(PeerError, match="enough"):
            signals.wait(0, 2**62, LIMIT_S, check)
    finally:
        is_over.set()
        thread.join(LIMIT_S)


@pytest.mark.usefixtures("one_long_sleep")
def test_a_change_between_looking_and_sleeping_keeps_awake():
    memory = Segment.create(64).array
    asked = []

    def is_done():
        asked.append(None)
        memory[0] = 1  # as another process might, just after it was looked at
        return len(asked) > 1

    thread, results = in_thread(FutexWord(memory).wait_until, is_done, NEVER_S, None)

    thread.join(LIMIT_S)
    assert results == [True]


def interrupt_main_thread(number):
    signal.pthread_kill(threading.main_thread().ident, number)


@pytest.mark.usefixtures("one_long_sleep")
def test_a_keyboard_interrupt_ends_a_wait():
    signals = new_signals()
    thread, _ = in_thread(act_while_asleep, lambda: interrupt_main_thread(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        signals.wait(0, 1, LIMIT_S)
    thread.join(LIMIT_S)


@pytest.mark.usefixtures("one_long_sleep")
def test_a_signal_that_is_handled_does_not_end_a_wait():
    signals = new_signals()
    handled = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.set())

    def interrupt():
        interrupt_main_thread(signal.SIGUSR1)
        handled.wait(LIMIT_S)
        signals.advance(0, 1)

    thread, _ = in_thread(act_while_asleep, interrupt)
    try:
        assert signals.wait(0, 1, LIMIT_S)
        assert handled.is_set()
        thread.join(LIMIT_S)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signals_keep_their_memory_and_leave_nothing_behind():
    before = open_descriptors()
    signals = new_signals(5)

    signals.advance(4, 7)
    assert signals.wait(4, 7, 0.0)
    assert open_descriptors() > before

    del signals
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("part", "found"), [(slice(8, None), "8 bytes into a line"), (slice(64), "64 bytes that")]
)
def test_memory_that_does_not_fit_is_refused(part, found):
    memory = Segment.create(1000).array[part]

    with pytest.raises(ConfigError, match=f"2 signals: .*{found}.*it needs 128 from the start"):
        Signals(memory, 2)


def test_processors_that_order_stores_otherwise_are_refused(monkeypatch):
    monkeypatch.setattr(futex.platform, "machine", lambda: "aarch64")

    with pytest.raises(ConfigError, match=r"order of stores of x86_64.*aarch64.*transport='p2p'"):
        new_signals()


def test_what_the_kernel_refuses_is_an_error():
    word = FutexWord(Segment.create(64).array)
    word._address += 1

    with pytest.raises(OSError, match="FUTEX_WAKE: Invalid argument"):
        word.wake()
    with pytest.raises(OSError, match="FUTEX_WAIT: Invalid argument"):
        word.wait_until(lambda: False, 1.0, None)
