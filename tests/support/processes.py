"""What tests ask the system about processes and what they hold, and processes of their own."""

from __future__ import annotations

import gc
import multiprocessing as mp
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


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


def open_handles() -> tuple[int, int]:
    """Threads and descriptors of this process, without what the collector would end.

    Sampled ids that loader workers sent are left out as well: each comes with a descriptor, and how
    many have arrived differs from run to run.
    """
    gc.collect()
    descriptors = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            descriptors += not str(entry.readlink()).startswith("/dev/shm/torch_")
        except FileNotFoundError:
            continue  # the one that listed them
    return threading.active_count(), descriptors


def assert_no_more_handles_than(before: tuple[int, int]) -> None:
    """Threads and descriptors have not become more; those told to end may take their time."""
    deadline = time.monotonic() + 20
    while (now := open_handles()) > before or now[1] > before[1]:
        assert time.monotonic() < deadline, f"threads and descriptors: {before}, then {now}"


def shared_memory_names() -> set[str]:
    """Entries of /dev/shm but for those of other programs' sampled tensors."""
    return {p.name for p in Path("/dev/shm").iterdir() if not p.name.startswith(("torch_", "sem."))}


@contextmanager
def other_process(body: Callable[..., object], *args: object) -> Iterator[mp.process.BaseProcess]:
    """Run ``body(*args)``, importable by name, in another process; killed at the end."""
    process = mp.get_context("spawn").Process(target=body, args=args)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()


def assert_ends_well(process: mp.process.BaseProcess, seconds: float = 60.0) -> None:
    """Wait until a process has ended, and fail with its exit code unless that is 0."""
    process.join(seconds)
    assert process.exitcode == 0, f"{process.name} ended with {process.exitcode} (None: runs still)"


def in_small_shm(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a mount namespace of its own, where /dev/shm has 8 MiB."""
    unshare = shutil.which("unshare")
    command = [unshare or "unshare", "-m", "sh", "-c"]
    script = 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$0" "$@"'
    if (
        unshare is None
        or subprocess.run([*command, script, "true"], capture_output=True).returncode
    ):
        pytest.skip("mount namespaces are not permitted here (unshare -m)")
    return subprocess.run(
        [*command, script, sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
