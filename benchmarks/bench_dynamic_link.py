"""Rows that every step trains, on two machines that a link of limited rate joins.

    python benchmarks/bench_dynamic_link.py --json benchmarks/results/dynamic_link.json

Two pretended machines (`tests/cluster`), one rank on each, a link of 1 Gbit/s. Each machine holds
half of the rows; Adagrad's state lies beside them. Of the rows that a minibatch reads, those of the
other machine travel while the step before is used; its gradients, and the rows that were changed
since they were read, have to travel between two steps. So at best a step takes as long as the
longer of the device's time (simulated) and that of the early rows, and the time of the others.
``inline`` reads everything between two steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from dynamic_lanes import INLINE, THREAD, Featsync, Workload, ids_of
from pretended_machines import leave_group, run_on_machines
from records import write_json

RATE, BYTES_A_SECOND = "1gbit", 125e6
BUSY_MS = (0.0, 60.0, 120.0, 240.0)
WORK = Workload(rows=200_000, width=128, ids=15_000, steps=12, rounds=5)
SMOKE = Workload(rows=2_000, width=8, ids=200, steps=3, rounds=1)


def measure(work: Workload) -> dict[str, Any]:
    """Run both ways in turn; seconds and bytes of a step, and what they are made of."""
    from cluster import traffic_of  # its folder is on the path of the ranks

    rank = dist.get_rank()
    start = torch.randn((work.rows, work.width), generator=torch.Generator().manual_seed(3))
    lanes = {name: Featsync(work, rank, start, worker) for name, worker in _WAYS.items()}
    wanted = [ids_of(work, other) for other in range(2)]
    found: dict[str, dict[str, list[float]]] = {name: {"step_s": [], "sent": []} for name in lanes}
    for turn in range(work.rounds + 1):  # the first warms up
        for name, lane in lanes.items():
            dist.barrier()
            before, begun = traffic_of(), time.perf_counter()
            lane.epoch(wanted)
            dist.barrier()
            seconds = time.perf_counter() - begun
            if turn:
                found[name]["step_s"].append(seconds / work.steps)
                found[name]["sent"].append(traffic_of().since(before).sent / work.steps)
    apart = float((lanes[INLINE].table() - lanes[THREAD].table()).abs().max())
    half = work.rows // 2
    away = [int(((ids < half) != (rank == 0)).sum()) for ids in wanted[rank]]
    rows = sum(away) / work.steps
    return {
        "ways": found,
        "apart": apart,
        "rows": rows,
        "again": rows * lanes[THREAD].patched_share(),
        "ids": sum(map(len, wanted[rank])) / work.steps,
    }


_WAYS = {INLINE: "inline", THREAD: "thread"}


def on_a_machine(folder: Path, work: Workload) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, measure(work))
    if dist.get_rank() == 0:
        (folder / "row.json").write_text(json.dumps(summary(work, everybody)))
    leave_group()


def summary(work: Workload, of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the slower rank, round by round; of both the mean number of rows."""
    row_bytes = 4 * work.width
    early, again = (np.mean([one[name] for one in of_ranks]) for name in ("rows", "again"))
    early_s, rest_s = (n * row_bytes / BYTES_A_SECOND for n in (early, early + again))
    best = max(work.busy_ms / 1e3, early_s) + rest_s
    row: dict[str, Any] = {
        "width": work.width,
        "busy_ms": work.busy_ms,
        "ids": np.mean([one["ids"] for one in of_ranks]),
        "early_rows": early,
        "rows_again": again,
        "best_s": best,
        "apart": max(one["apart"] for one in of_ranks),
        "ways": {},
    }
    for name in _WAYS:
        steps, sent = (
            np.max([one["ways"][name][what] for one in of_ranks], 0) for what in ("step_s", "sent")
        )
        row["ways"][name] = {
            "step_s": median(steps),
            "step_range": [float(steps.min()), float(steps.max())],
            "of_best": median(steps) / best,
            "sent": median(sent),
            "of_planned": median(sent) / (row_bytes * (2 * early + again)),
        }
    return row


def report(row: dict[str, Any]) -> None:
    """Print what one device gave."""
    print(
        f"device {row['busy_ms']:g} ms: {row['ids']:,.0f} rows a step and rank, "
        f"{row['early_rows']:,.0f} of the other machine, {row['rows_again']:,.0f} again; at best "
        f"{1e3 * row['best_s']:.1f} ms; tables differ by {row['apart']:g}"
    )
    for name, way in row["ways"].items():
        low, high = (1e3 * seconds for seconds in way["step_range"])
        print(
            f"  {name:15} {1e3 * way['step_s']:6.1f} ms ({low:.1f} to {high:.1f}), / best "
            f"{way['of_best']:.3f}; {way['sent'] / 1e6:.2f} MB sent, "
            f"/ rows {way['of_planned']:.3f}",
            flush=True,
        )


def main() -> None:
    """Parse the command line; start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=WORK.rounds)
    parser.add_argument("--busy-ms", type=float, nargs="+", default=BUSY_MS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="a tiny size, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if "RANK" in os.environ:
        facts = json.loads((args.folder / "work.json").read_text())
        on_a_machine(args.folder, Workload(**facts))
        return
    rows = []
    for busy_ms in (0.0,) if args.smoke else args.busy_ms:
        work = SMOKE if args.smoke else WORK
        facts = {**vars(work), "busy_ms": busy_ms}
        facts["rounds"] = work.rounds if args.smoke else args.rounds
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "work.json").write_text(json.dumps(facts))
            if not run_on_machines([__file__, "--folder", folder], RATE):
                return
            rows.append(json.loads((Path(folder) / "row.json").read_text()))
        report(rows[-1])
    write_json(args.json, rows, rate=RATE)
    if any(row["apart"] for row in rows):
        sys.exit("tables differ")


if __name__ == "__main__":
    main()
