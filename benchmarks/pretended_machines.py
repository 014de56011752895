"""Ranks of a benchmark on pretended machines, see `tests/cluster`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

__all__ = ["leave_group", "run_on_machines"]

_ROOT = Path(__file__).parent.parent
_IMPOSSIBLE = 2  # the launcher's status where a system lacks what it needs, and says what


def run_on_machines(
    command: Sequence[str], rate: str, ranks: int = 1, time_limit_s: int = 1500
) -> bool:
    """Run a Python script on ranks of two machines that a link of limited rate joins, and wait.

    Args:
        command: The script and its arguments; ``RANK`` is in its environment.
        rate: Of the link, as ``tc`` has it.
        ranks: Of each machine.
        time_limit_s: Seconds until it has to be over.

    Returns:
        Whether this system can; where not, it says why not.

    Raises:
        subprocess.CalledProcessError: The script failed on some rank.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "cluster", "--plain", "--rate", rate, "--ranks", str(ranks)),
            *("--time-limit", str(time_limit_s), "--", sys.executable, *command),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT / "tests"), str(_ROOT)])},
        check=False,
    )
    if done.returncode == _IMPOSSIBLE:
        print("not measured: this system cannot pretend two machines")
        return False
    done.check_returncode()
    return True


def leave_group() -> None:
    """End a rank's part in the default group, when all ranks are through; collective."""
    dist.barrier()
    # torch 2.2 holds the GIL while it ends, and hangs if a thread still has to let go of the
    # barrier's tensor.
    time.sleep(0.2)
    dist.destroy_process_group()
