"""The example programs, run as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]


def run_program(
    script: str, *options: object, ranks: int = 1, timeout_s: float = 150.0
) -> subprocess.CompletedProcess[str]:
    """Run one of ``pipelines/`` to its end, under torchrun if there are several ranks."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*launcher, str(PROJECT / "pipelines" / script), *map(str, options)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def results_of(folder: Path, script: str, *options: object, ranks: int = 1) -> Any:
    """Run a program that has to end well, and give what it wrote with ``--json``."""
    out = folder / "results.json"
    done = run_program(script, *options, "--json", out, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())
