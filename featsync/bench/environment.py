"""Where a measurement was made: what has to be known to read its numbers."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

_PACKAGES = ("featsync", "torch", "dgl", "torchdata", "numpy")


def describe_environment(threads: int) -> dict[str, object]:
    """Collect versions, machine, load, and the commit of the code.

    Args:
        threads: Threads of torch's operators in each process that was measured.
    """
    commit = _git("rev-parse", "HEAD")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()}
        | {name: version for name in _PACKAGES if (version := _version(name))},
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": threads,
        "load": [round(value, 2) for value in os.getloadavg()],
        "commit": commit,
        "dirty": bool(_git("status", "--porcelain")) if commit else None,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _git(*arguments: str) -> str | None:
    """Ask git about the folder that this code lies in; ``None`` if it is not under git."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
