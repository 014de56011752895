"""The command line run in the test's own process, and files of pipelines for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from featsync import cli

# For the graph of `support.folders.homogeneous_folder`.
SAMPLE = {"sample_neighbor": {"fanouts": [3, 3]}}
KEYS = {"node_feature_keys": ["feat", "mapped"], "edge_feature_keys": ["weight"]}
STOCK = [SAMPLE, {"fetch_feature": KEYS}]
FEATSYNC = [SAMPLE, {"plan_feature": KEYS}, {"sync_feature": {}}]


def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Run ``featsync``; gives exit status, and what it printed on both channels."""
    monkeypatch.setattr(sys, "argv", ["featsync", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    return ended.value.code or 0, printed.out, printed.err


def write_pipeline(path: Path, folder: Path, stages: list[dict[str, Any]], **changes: Any) -> str:
    """Write the configuration of a pipeline over a dataset folder; gives its path as typed."""
    settings = {"dataset": {"path": str(folder)}, "batch_size": 16, "stages": stages}
    path.write_text(yaml.safe_dump({**settings, **changes}))
    return str(path)
