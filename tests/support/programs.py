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
    script: str, *options: object, ranks: int = 1, timeout_s: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run one of ``pipelines/`` to its end, under torchrun if there are several ranks."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*launcher, str(PROJECT / "pipelines" / script), *map(str, options)]
    with subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # Politely, so that torchrun ends its ranks as well.
            process.terminate()
            out, err = process.communicate()
            raise AssertionError(f"{script} still ran after {timeout_s} s:\n{out}{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def results_of(folder: Path, script: str, *options: object, ranks: int = 1) -> Any:
    """Run a program that has to end well, and give what it wrote with ``--json``."""
    out = folder / "results.json"
    done = run_program(script, *options, "--json", out, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())
