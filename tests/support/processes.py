"""What tests ask the system about processes and what they hold."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait for what another process does; returns whether it did it in time."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def open_descriptors() -> int:
    """How many descriptors this process holds, once all garbage is gone."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))
