"""Rows that every step trains, on 2 ranks: against DGL's NodeEmbedding, and beside a busy device.

    python benchmarks/bench_dynamic.py --json benchmarks/results/dynamic.json

All programs train one table with Adagrad on the same ids, an epoch each in turn, in the same
processes:

* *NodeEmbedding*: ``dgl.nn.NodeEmbedding`` with ``dgl.optim.SparseAdagrad``. Target: 6 times as
  many steps a second at width 128, 4 times at width 16.
* *featsync*: read ahead by a thread and patched; *inline*: read when needed.
* *alone*: one process does what both ranks do, merged, on a table of its own, and waits for nobody.
  Target: featsync takes at most 1.5 times as long.

With ``busy_ms`` each step has a device that is busy for so long while the CPU is free (simulated).
*exposed* is what a step takes longer than the *floor*, which neither reads nor updates: its rows
are there. Target: at most half of *inline*. The share of rows that were read again (*patched*)
explains it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dynamic_lanes
import numpy as np
from dynamic_lanes import ALONE, FLOOR, INLINE, NODE_EMBEDDING, THREAD, Workload
from ranks import Ranks
from records import write_json

ROWS, IDS, STEPS = 1_000_000, 50_000, 8
# Milliseconds that a device is busy, long enough for early reads of two ranks on two cores.
BUSY_MS = {16: 40.0, 128: 120.0}
CLOSE = 1e-4  # tables may differ by the order of float sums


def workloads(rows: int, widths: Sequence[int], rounds: int, is_small: bool) -> list[Workload]:
    """What is measured."""
    if is_small:
        return [Workload(2_000, 4, 300, 3, 1), Workload(2_000, 4, 300, 3, 1, 1.0)]
    return [
        Workload(rows, width, IDS, STEPS, rounds, busy_ms)
        for width in widths
        for busy_ms in (0.0, BUSY_MS.get(width, 40.0))
    ]


def measured(work: Workload, of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Put together what the ranks measured: an epoch takes as long as its slowest rank."""
    names = of_ranks[0]["seconds"]
    step = {
        name: np.max([one["seconds"][name] for one in of_ranks], 0) / work.steps for name in names
    }
    exposed = {name: seconds - step[FLOOR].min() for name, seconds in step.items()}
    return {
        **asdict(work),
        "step_s": {name: statistics.median(values) for name, values in step.items()},
        "exposed_s": {name: statistics.median(values) for name, values in exposed.items()},
        "of_node_embedding": ratio(step[THREAD], step[NODE_EMBEDDING]),
        "of_alone": ratio(step[THREAD], step[ALONE]),
        "exposed_of_inline": ratio(exposed[THREAD], exposed[INLINE]),
        "patched": float(np.mean([one["patched"] for one in of_ranks])),
        "apart": of_ranks[0]["apart"],
    }


def ratio(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Epoch by epoch: median and range."""
    found = one / other
    return {
        "median": float(statistics.median(found)),
        "min": float(found.min()),
        "max": float(found.max()),
    }


def report(row: dict[str, Any]) -> None:
    """Print what one workload gave."""
    print(
        f"{row['rows']:,} rows of {row['width']} floats, {row['ids']:,} ids a step and rank, a "
        f"device busy {row['busy_ms']:g} ms (simulated): {row['patched']:.0%} of rows read again"
    )
    for name, seconds in row["step_s"].items():
        exposed = 1e3 * row["exposed_s"][name]
        print(f"  {name:16} {1e3 * seconds:8.1f} ms a step, {exposed:8.1f} of them exposed")
    for name in ("of_node_embedding", "of_alone", "exposed_of_inline"):
        found = row[name]
        print(f"  featsync {name}: {found['median']:.3f} ({found['min']:.3f}-{found['max']:.3f})")
    apart = ", ".join(f"{name} {value:.2g}" for name, value in row["apart"].items())
    print(f"  tables differ from featsync's by at most: {apart}", flush=True)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=ROWS, help="of the table")
    parser.add_argument("--widths", type=int, nargs="*", default=[16, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="a tiny size, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for work in workloads(args.rows, args.widths, args.rounds, args.smoke):
        with Ranks(2, timeout=900.0) as ranks:
            rows.append(measured(work, ranks.call(dynamic_lanes.measure, work)))
        report(rows[-1])
    write_json(args.json, rows)
    if any(max(row["apart"].values()) > CLOSE for row in rows):
        sys.exit("tables differ")


if __name__ == "__main__":
    main()
