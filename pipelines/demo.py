"""What ``make demo`` runs: one real graph, two pipelines, one and two ranks, side by side.

Everything is done by the programs that are there for it, ``node_classification.py`` and ``featsync
bench``; this one starts them, says what they do, and puts their results into one table.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
PIPELINES = ("stock", "featsync")
RANKS = (1, 2)
EPOCHS = 8
PAIRS = 3
DEADLINE_S = 600.0
CONSOLE = Console(width=None if sys.stdout.isatty() else 110)


def main() -> None:
    """Train, compare, and print the table."""
    started = time.perf_counter()
    CONSOLE.print(
        "The graph: 63,681 Debian packages and what they depend on; the task: the section of each."
        f"\nA two-layer GraphSAGE learns it in {EPOCHS} epochs, with GraphBolt's own fetch_feature"
        " (stock), then\nwith plan_feature and sync_feature in its place (featsync). Only these"
        " lines of the YAML files differ."
    )
    with tempfile.TemporaryDirectory() as folder:
        accuracies = {
            (name, ranks): train(name, ranks, Path(folder)) for ranks in RANKS for name in PIPELINES
        }
        reports = {ranks: compare(ranks, Path(folder)) for ranks in RANKS}
    CONSOLE.print()
    CONSOLE.print(table(accuracies, reports))
    CONSOLE.print(
        "Exposed: what an epoch takes longer than one that needs no features."
        f"\nRatio: featsync by stock, median of {PAIRS} pairs (least to most)."
        "\nWrong rows: rows that differed in any bit from the table."
        f"\nTook {time.perf_counter() - started:.0f} s."
    )
    wrong = sum(run["wrong_rows"] for report in reports.values() for run in report["runs"])
    sys.exit(1 if wrong else 0)


def train(name: str, ranks: int, folder: Path) -> float:
    """Train with one pipeline; give the last epoch's validation accuracy."""
    out = folder / f"{name}-{ranks}.json"
    script = [str(HERE / "node_classification.py"), str(HERE / f"{name}.yaml")]
    script += ["--epochs", str(EPOCHS), "--json", str(out)]
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    say(f"Training with {name} on {count(ranks)}")
    follow([*launcher, *script])
    return float(json.loads(out.read_text())[-1]["accuracy"])


def compare(ranks: int, folder: Path) -> dict[str, Any]:
    """Let both pipelines run in turn; give the report."""
    out = folder / f"bench-{ranks}.json"
    configs = [str(HERE / f"{name}.yaml") for name in PIPELINES]
    say(f"Comparing both on {count(ranks)}: epochs in turn, rows compared with the table")
    options = ["--ranks", str(ranks), "--pairs", str(PAIRS), "--json", str(out)]
    follow([sys.executable, "-m", "featsync.cli", "bench", *configs, *options])
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def table(accuracies: dict[tuple[str, int], float], reports: dict[int, dict[str, Any]]) -> Table:
    """Lay out the results."""
    found = Table(title="Stock and featsync, side by side")
    found.add_column("pipeline")
    for column in ("ranks", "accuracy", "epoch s", "exposed s", "wrong rows", "ratio of epochs"):
        found.add_column(column, justify="right")
    for (name, ranks), accuracy in accuracies.items():
        run = next(one for one in reports[ranks]["runs"] if one["config"] == name)
        ratio = reports[ranks]["ratio"].get(name, {}).get("epoch")
        found.add_row(
            name,
            str(ranks),
            f"{accuracy:.4f}",
            f"{statistics.median(run['epoch_s']):.2f}",
            f"{statistics.median(run['exposed_s']):.2f}",
            f"{run['wrong_rows']:,}",
            "1"
            if ratio is None
            else f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
        )
    return found


def spread(ratio: dict[str, float]) -> str:
    """Write a ratio with its least and most."""
    return f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"


def say(what: str) -> None:
    """Say what comes next."""
    CONSOLE.rule(what, align="left")


def count(ranks: int) -> str:
    """Name a number of ranks."""
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def follow(command: list[str]) -> None:
    """Run a program that prints what it does; end with it if it fails."""
    # Set, since torchrun prints a warning where it is not.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    ended = subprocess.run(
        command, cwd=HERE.parent, env=environment, check=False, timeout=DEADLINE_S
    )
    if ended.returncode:
        CONSOLE.print(f"{' '.join(command)} failed with status {ended.returncode}", style="red")
        sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
