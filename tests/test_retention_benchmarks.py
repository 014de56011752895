"""The retention benchmarks run, and read what they say they read."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script, *options):
    """Run a benchmark as a user does; return what it prints."""
    command = [sys.executable, str(BENCHMARKS / script), *map(str, options)]
    environment = {"PYTHONPATH": str(BENCHMARKS.parent), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("script", ["bench_planning.py", "bench_retention.py"])
def test_smoke_prints_a_table_and_writes_rows_with_their_environment(script, tmp_path):
    table = run(
        script, "--smoke", "--windows", 2, "--caches", 0.1, "--json", tmp_path / "rows.json"
    )

    record = json.loads((tmp_path / "rows.json").read_text())
    assert "hit rate" in table
    assert record["rows"]
    assert {"python", "numpy", "torch", "cpu_count"} <= set(record["environment"])


def test_retention_is_measured_on_every_feature_of_a_recorded_trace(tmp_path):
    arrays = {}
    for key in ("node/None/feat", "edge/a:b:c/weight"):
        batches = [np.arange(start, start + 30) % 50 for start in range(0, 80, 10)]
        arrays[f"{key}/ids"] = np.concatenate(batches)
        arrays[f"{key}/offsets"] = np.cumsum([0] + [len(ids) for ids in batches])
        arrays[f"{key}/num_rows"] = np.int64(50)
    np.savez(tmp_path / "trace.npz", **arrays)

    run("bench_retention.py", "--trace", tmp_path / "trace.npz", "--json", tmp_path / "rows.json")

    record = json.loads((tmp_path / "rows.json").read_text())
    traces = {row["trace"] for row in record["rows"]}
    assert traces == {"trace.npz:node/None/feat", "trace.npz:edge/a:b:c/weight"}
    for row in record["rows"]:
        assert 0 <= row["hit_rate"] <= 1
