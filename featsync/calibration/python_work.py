"""A trainer's Python that does nothing but count, and what it gets done in some time.

Whoever moves rows beside it takes three things from it. The GIL: each time that another thread of
the process wants it, the counting stops until that thread has let go of it, and for the change of
threads. A core: where there are more busy threads than cores, whoever they belong to. And speed:
caches and memory are shared. The second is not what is to be measured here, and depends on how busy
the machine is otherwise: the kernel says for how long a thread was ready to run and had no core
(``schedstat``), and that time is left out. Where the kernel does not say, it is counted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["eager_switches", "run_python"]

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_CHUNK = 200
_SWITCH_S = 0.0002


def run_python(seconds: float) -> tuple[int, float]:
    """Count for some time.

    Args:
        seconds: For how long.

    Returns:
        How far, and in how many seconds, without those in which this thread had no core.
    """
    work, value = 0, 1
    waited = _seconds_without_core()
    started = now = time.perf_counter()
    while now - started < seconds:
        for _ in range(_CHUNK):
            value = (value * 31 + 7) % 1_000_003
        work += 1
        now = time.perf_counter()
    return work, now - started - (_seconds_without_core() - waited)


@contextmanager
def eager_switches() -> Iterator[None]:
    """Let threads wait less for the GIL than usual, so that many messages fit into a short time.

    Usually a thread asks for it 5 ms long before it is given it, about ten times a message. What
    the thread that has to give it loses each time is the same, seldom or often.
    """
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def _seconds_without_core() -> float:
    """Seconds so far in which this thread was ready to run and another one ran."""
    try:
        _, waited_ns, _ = _SCHEDSTAT.read_text().split()
    except (OSError, ValueError):
        return 0.0
    return int(waited_ns) * 1e-9
