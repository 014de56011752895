"""What features cost beside a busy device, measured as finely as sampling allows.

    python benchmarks/bench_exposed.py --json benchmarks/results/exposed.json

``featsync bench --simulate-step`` measures an epoch against the fastest one without features. How
long sampling takes differs more from epoch to epoch than featsync's whole cost, so this alternates
them finely instead, in one process over one dataset: an epoch without features, one of stock, one
of featsync, in turn, many times. A lane's cost is the mean of its differences to the epoch without
features of the same round; the interval is a bootstrap over rounds (90 %).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lanes import Lane, shares, take_turns
from records import write_json

from featsync.bench.steps import parse_simulated_step
from featsync.config import Config, load
from featsync.feature_keys import without_feature_keys
from featsync.loading import load_dataset

PIPELINES = Path(__file__).parent.parent / "pipelines"
NAMES = ("synthetic_stock", "synthetic_featsync", "synthetic_process")
# Loader workers, how long and how busy a step is, and which share of the nodes is trained on: the
# first minibatch of an epoch has no step to hide behind, which shows in short epochs.
SETTINGS = ((0, "150", 0.02), (2, "150", 0.02), (2, "150", 0.04), (0, "150:0.3", 0.02))
TINY = (
    "dataset.synthetic.nodes=2000",
    "dataset.synthetic.edges=10000",
    "batch_size=20",
)


def measure(
    num_workers: int, step: str, train_share: float, rounds: int, overrides: tuple[str, ...]
) -> dict[str, Any]:
    """Run all lanes in turn, and say what each cost above the epochs without features."""
    changes = (
        *overrides,
        f"dataset.synthetic.train_share={train_share}",
        f"num_workers={num_workers}",
        "share=true",
    )
    configs = {name: load(PIPELINES / f"{name}.yaml", changes) for name in NAMES}
    dataset = load_dataset(configs[NAMES[0]])
    busy = parse_simulated_step(step)

    def lane(name: str, config: Config) -> Lane:
        return Lane(name, config, dataset, dataset.features, lambda one: busy(one, lambda _: None))

    floor = lane("no features", without_feature_keys(configs[NAMES[1]]))
    lanes = [floor, *(lane(name, config) for name, config in configs.items())]
    take_turns(lanes, rounds)
    base = np.array(floor.seconds)
    costs = {lane.name: np.array(lane.seconds) - base for lane in lanes[1:]}
    stock = costs[NAMES[0]]
    return {
        "num_workers": num_workers,
        "step": step,
        "rounds": rounds,
        "minibatches": floor.num_minibatches,
        "floor_s": floor.seconds,
        "epoch_s": {lane.name: lane.seconds for lane in lanes[1:]},
        "exposed_s": {name: float(cost.mean()) for name, cost in costs.items()},
        "share_of_stock": {name: shares(cost, stock) for name, cost in costs.items()},
        "wrong_rows": sum(lane.wrong_rows for lane in lanes),
    }


def main() -> None:
    """Parse the command line and measure, each setting in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--setting", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--smoke", action="store_true", help="a tiny size, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = ((0, "1", 0.1),) if args.smoke else SETTINGS
    rounds, overrides = (2, TINY) if args.smoke else (args.rounds, ())
    if args.setting is not None:
        torch.set_num_threads(1)
        print(json.dumps(measure(*settings[args.setting], rounds, overrides)))
        return
    rows = []
    for number in range(len(settings)):
        # Loader workers of one setting stay until their loaders are collected, beside the next.
        command = [sys.executable, __file__, "--setting", str(number), "--rounds", str(rounds)]
        done = subprocess.run(
            [*command, *(["--smoke"] if args.smoke else [])], stdout=subprocess.PIPE, check=True
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        report(rows[-1])
    write_json(args.json, rows)
    if any(row["wrong_rows"] for row in rows):
        sys.exit("wrong rows")


def report(row: dict[str, Any]) -> None:
    """Print what one setting gave."""
    print(
        f"{row['num_workers']} loader workers, step {row['step']} ms, {row['minibatches']} "
        f"minibatches, wrong rows {row['wrong_rows']}"
    )
    for name, share in row["share_of_stock"].items():
        print(
            f"  {name:20} exposed {row['exposed_s'][name]:.3f} s an epoch, of stock's "
            f"{share['all']:.3f} ({share['low']:.3f} to {share['high']:.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
