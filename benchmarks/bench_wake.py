"""How long a sleeping process takes to go on once another one says so.

One process pauses for a random time, in which the other falls asleep, notes the time and tells it;
the other notes when its wait returned. Both read the one monotonic clock of the machine, so the
difference is the wake-up: telling, waking, and Python going on. Ways that take turns, block by
block::

    futex     featsync.signals: advance in one process, wait in the other
    eventfd   os.eventfd_write, os.eventfd_read
    poll      looking at the shared count, asleep half a millisecond in between: the yardstick

CPU is that of the waiting process for each wait, pauses of about a millisecond included.

    python benchmarks/bench_wake.py [--rounds N] [--json F] [--smoke]
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt
from records import write_json

from featsync.segment import Segment
from featsync.signals import Signals

WAYS = ("futex", "eventfd", "poll")
TARGET_US = 50.0  # median of futex
PAUSES_S = (0.0005, 0.002)
POLL_PAUSE_S = 0.0005
BLOCK = 250  # wake-ups of one way, then it is the next one's turn
LIMIT_S = 30.0
TOLD, HEARD = 0, 1  # counters: one of each process


def listen(signals: Signals, event: int, control: Connection) -> None:
    """Wait as asked: ``(way, rounds)`` in, times of waking and CPU seconds out; ``None`` ends."""
    waits: dict[str, Callable[[int], object]] = {
        "futex": lambda count: signals.wait(TOLD, count, LIMIT_S),
        "eventfd": lambda _: os.eventfd_read(event),
        "poll": lambda count: poll(signals, count),
    }
    while (asked := control.recv()) is not None:
        way, rounds = asked
        woken_ns = []
        count = signals.value(HEARD)
        start = time.process_time()
        for _ in range(rounds):
            count += 1
            waits[way](count)
            woken_ns.append(time.monotonic_ns())
            signals.advance(HEARD, count)
        control.send((woken_ns, time.process_time() - start))


def poll(signals: Signals, count: int) -> None:
    """Wait as one does without help of the system."""
    while signals.value(TOLD) < count:
        time.sleep(POLL_PAUSE_S)


def tell(signals: Signals, event: int, way: str, rounds: int) -> list[int]:
    """Wake the other process again and again; returns when each time."""
    told_ns = []
    count = signals.value(TOLD)
    for _ in range(rounds):
        time.sleep(random.uniform(*PAUSES_S))
        count += 1
        told_ns.append(time.monotonic_ns())
        if way == "eventfd":
            os.eventfd_write(event, 1)
        signals.advance(TOLD, count)  # all ways count, so that they can take turns
        if not signals.wait(HEARD, count, LIMIT_S):
            raise SystemExit(f"{way}: no answer to wake-up {count} within {LIMIT_S:g} s")
    return told_ns


def measure(rounds: int, block: int) -> tuple[dict[str, npt.NDArray[np.float64]], dict[str, float]]:
    """Microseconds of all wake-ups, and CPU seconds of all waits, by way."""
    signals = Signals(Segment.create(Signals.num_bytes(2)).array, 2)
    event = os.eventfd(0)
    here, there = mp.Pipe()
    listener = mp.get_context("fork").Process(
        target=listen, args=(signals, event, there), daemon=True
    )
    listener.start()
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu_s = dict.fromkeys(WAYS, 0.0)
    for turn in range(1 + rounds // block):
        for way in WAYS:
            here.send((way, block))
            told_ns = tell(signals, event, way, block)
            woken_ns, seconds = here.recv()
            if turn:  # the first warms up
                taken[way] += [
                    (woken - told) / 1e3 for told, woken in zip(told_ns, woken_ns, strict=True)
                ]
                cpu_s[way] += seconds
    here.send(None)
    listener.join(LIMIT_S)
    return {way: np.array(values) for way, values in taken.items()}, cpu_s


def cost_of_advancing(times: int) -> float:
    """Microseconds of an advance that nobody waits for."""
    signals = Signals(Segment.create(Signals.num_bytes(1)).array, 1)
    start = time.perf_counter()
    for count in range(times):
        signals.advance(0, count)
    return (time.perf_counter() - start) / times * 1e6


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5000, help="wake-ups of each way")
    parser.add_argument("--smoke", action="store_true", help="a tiny size, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rounds, block = (40, 20) if args.smoke else (args.rounds, min(args.rounds, BLOCK))
    random.seed(1)
    wake_ups, cpu_s = measure(rounds, block)
    rows: list[dict[str, object]] = []
    print("way      | wake-up, us: median       p99       max | CPU us a wait")
    for way, values in wake_ups.items():
        median, p99, most = (float(np.percentile(values, q)) for q in (50, 99, 100))
        cpu_us = cpu_s[way] / len(values) * 1e6
        print(f"{way:8} | {median:19.1f} {p99:9.1f} {most:9.1f} | {cpu_us:13.1f}")
        row: dict[str, object] = {"way": way, "wake_ups": len(values), "median_us": median}
        row |= {"p99_us": p99, "max_us": most, "cpu_us": cpu_us}
        if way == "futex":
            row |= {"target_us": TARGET_US, "met": median < TARGET_US}
        rows.append(row)
    unheard_us = cost_of_advancing(1000 if args.smoke else 100_000)
    print(
        f"target for futex: median under {TARGET_US:g} us; an advance unheard: {unheard_us:.1f} us"
    )
    write_json(args.json, rows, advance_us=unheard_us)


if __name__ == "__main__":
    main()
