"""A table split over ranks: featsync beside the obvious program, over the same ids.

That program exchanges ids and rows by all_to_all when it needs them (``pipelines/all_to_all.py``).

    python benchmarks/bench_partitioned.py                      all of it, more than an hour
    python benchmarks/bench_partitioned.py --ranks 2 --widths 128 --parts model

Each setting writes ``benchmarks/results/partitioned_<ranks>x<width>.json``. All pipelines run over
one table in the same processes and take turns, an epoch each. Two parts:

* ``busy``: beside a device that is busy for a while each step (simulated), long enough for rows and
  sampling of all ranks to fit. What features cost is the difference to the epoch without any, next
  to it. Target: at most a tenth of the obvious program's.
* ``model``: a GraphSAGE is trained on the CPU, which then works for ranks and transports at once.
  Target: at most 0.7 of the obvious program's epoch.

An epoch takes as long as its slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import partitioned_lanes
from lanes import shares
from partitioned_lanes import AGAIN, FLOOR, NAIVE, TRANSPORTS, Part, Setting
from ranks import Ranks
from records import write_json

RESULTS = Path(__file__).parent / "results"
RANKS = (2, 4)
WIDTHS = (8, 32, 128, 512)
# A third of the graph for the widest rows, which would not fit into 24 GiB beside four ranks.
FEWER_NODES = {512: 300_000}
# Milliseconds in which two cores sample and move rows for two ranks; four take twice as long.
BUSY_MS = {8: 200, 32: 250, 128: 350, 512: 500}
ROUNDS = {"busy": 6, "model": 5}
PARTS = tuple(ROUNDS)


def setting_of(ranks: int, width: int) -> Setting:
    """The table of one setting."""
    return Setting(ranks, width, nodes=FEWER_NODES.get(width, 1_000_000))


def parts_of(names: Sequence[str], setting: Setting, rounds: int | None) -> list[Part]:
    """What is measured over it."""
    busy_ms = BUSY_MS.get(setting.width, 20) * setting.ranks // 2
    steps = {"busy": str(busy_ms), "model": None}
    return [Part(rounds or ROUNDS[name], steps[name]) for name in names]


def measured(setting: Setting, part: Part, of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Put together what the ranks measured."""
    seconds = {
        name: np.max([one["seconds"][name] for one in of_ranks], 0) for name in names_of(part)
    }
    cpu = {
        name: np.sum([one["cpu_seconds"][name] for one in of_ranks], 0) for name in names_of(part)
    }
    found = {
        **asdict(setting),
        "part": "model" if part.step is None else "busy",
        "step_ms": part.step,
        "rounds": part.rounds,
        "epoch_s": {name: values.tolist() for name, values in seconds.items()},
        "cpu_s": {name: values.tolist() for name, values in cpu.items()},
        "wrong_rows": sum(one["wrong_rows"] for one in of_ranks),
        "auto": of_ranks[0]["auto"],
        "rows": of_ranks[0]["rows"],
        "epoch_ratio": ratios(seconds),
        "cpu_ratio": ratios(cpu),
    }
    costs = {name: values - seconds[FLOOR] for name, values in seconds.items() if name != FLOOR}
    found["exposed_s"] = {name: float(cost.mean()) for name, cost in costs.items()}
    found["share_of_naive"] = {name: shares(cost, costs[NAIVE]) for name, cost in costs.items()}
    return found


def names_of(part: Part) -> list[str]:
    """The pipelines that take turns."""
    return [FLOOR, NAIVE, *TRANSPORTS, *([AGAIN] if part.step is None else [])]


def ratios(values: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Each pipeline / the obvious program, round by round: median and range."""
    found = {}
    for name in values:
        if name not in (NAIVE, FLOOR):
            ratio = values[name] / values[NAIVE]
            found[name] = {
                "median": statistics.median(ratio),
                "min": float(ratio.min()),
                "max": float(ratio.max()),
            }
    return found


def report(row: dict[str, Any]) -> None:
    """Print what one part gave."""
    how = "a model" if row["step_ms"] is None else f"a device busy {row['step_ms']} ms a step"
    medians = {name: statistics.median(values) for name, values in row["epoch_s"].items()}
    print(
        f"{row['ranks']} ranks, width {row['width']}, beside {how}: epoch {medians[FLOOR]:.2f} s "
        f"without features, {medians[NAIVE]:.2f} s with {NAIVE}; wrong rows {row['wrong_rows']}"
    )
    for name, ratio in row["epoch_ratio"].items():
        share = row["share_of_naive"][name]
        cpu = row["cpu_ratio"][name]
        print(
            f"  {name:16} epoch {medians[name]:6.2f} s, ratio {ratio['median']:.3f} "
            f"({ratio['min']:.3f} to {ratio['max']:.3f}), CPU {cpu['median']:.3f}, "
            f"exposed {row['exposed_s'][name]:.2f} s, share {share['all']:.3f} "
            f"({share['low']:.3f} to {share['high']:.3f})",
            flush=True,
        )


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS)
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--rounds", type=int, help="instead of the usual number")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    parser.add_argument("--smoke", action="store_true", help="a tiny size; nothing is written")
    args = parser.parse_args()
    wrong = 0
    settings = [setting_of(ranks, width) for ranks in args.ranks for width in args.widths]
    if args.smoke:
        settings = [Setting(2, 4, nodes=2_000, batch_size=20, minibatches=3)]
    for setting in settings:
        rows = []
        parts = parts_of(args.parts, setting, 1 if args.smoke else args.rounds)
        # Processes of their own: memory of one table must not shape the allocator for the next.
        with Ranks(setting.ranks, timeout=1800.0) as ranks:
            of_ranks = ranks.call(partitioned_lanes.measure, setting, parts)
        for part, found in zip(parts, zip(*of_ranks, strict=True), strict=True):
            rows.append(measured(setting, part, found))
            report(rows[-1])
            wrong += rows[-1]["wrong_rows"]
        if not args.smoke:
            name = f"partitioned_{setting.ranks}x{setting.width}.json"
            write_json(args.results / name, rows)
    if wrong:
        sys.exit("wrong rows")


if __name__ == "__main__":
    main()
