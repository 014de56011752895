"""What the results of a benchmark need to be worth keeping: their environment, as JSON."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import numpy as np
import torch


def environment() -> dict[str, object]:
    """Describe what a measurement depends on."""
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "cpu_model": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def write_json(path: Path | None, rows: list[dict[str, object]], **facts: object) -> None:
    """Write rows and their environment, if a path is given."""
    if path:
        record = {"schema": 1, "environment": environment(), **facts, "rows": rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")


def _cpu_model() -> str:
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
