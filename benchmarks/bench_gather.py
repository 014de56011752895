"""CPU seconds a row of gathering alone: stock's fetcher, featsync, and torch into warm memory.

    python benchmarks/bench_gather.py --json benchmarks/results/gather.json

One core, rows drawn at random without repetition. ``stock`` and ``featsync`` are whole stages over
minibatches whose ids are given, so that nothing is sampled; ``stock_tuned`` is the same stock in a
process whose allocator was told to keep its memory; ``warm`` is ``torch.index_select(out=)`` into
three tensors in turn. Each lane is a process of its own; they take turns, round by round, and the
ratios are round by round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from records import write_json
from torch.utils.data import IterDataPipe

import featsync  # noqa: F401 - registers the stages
from featsync._graphbolt import gb

LANES = ("stock", "stock_tuned", "featsync", "warm")
TUNED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
TARGETS = (("stock", 1 / 3), ("stock_tuned", 1 / 1.7), ("warm", 1.1))


class GivenIds:
    """Ids of each minibatch; no collection, since the loader would pickle one at each iter()."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self.batches = batches


class GivenMiniBatches(IterDataPipe):
    """Minibatches with input nodes and nothing else."""

    def __init__(self, ids: GivenIds) -> None:
        self.ids = ids

    def __iter__(self) -> Iterator[gb.MiniBatch]:
        for batch in self.ids.batches:
            yield gb.MiniBatch(input_nodes=batch, sampled_subgraphs=[])


def serve_lane(lane: str, num_rows: int, width: int, batch_rows: int, num_batches: int) -> None:
    """Measure one lane whenever a line arrives; prints nanoseconds of CPU a row and wrong rows."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    table = torch.randn(num_rows, width)
    batches = [torch.randperm(num_rows)[:batch_rows] for _ in range(num_batches)]
    store = gb.BasicFeatureStore({("node", None, "feat"): gb.TorchBasedFeature(table)})
    source = GivenMiniBatches(GivenIds(batches))
    if lane == "featsync":
        pipe = source.plan_feature(store, ["feat"]).sync_feature(worker="inline")
    else:
        pipe = source.fetch_feature(store, ["feat"])
    outs = [torch.empty(batch_rows, width).fill_(0) for _ in range(3)] if lane == "warm" else []
    for _ in sys.stdin:
        start = time.process_time()
        if lane == "warm":
            for i, ids in enumerate(batches):
                rows = torch.index_select(table, 0, ids, out=outs[i % 3])
        else:
            for minibatch in pipe:
                rows = minibatch.node_features["feat"]
        seconds = time.process_time() - start
        # Only now: comparing belongs to nobody's time.
        wrong = int((rows != table[batches[-1]]).any(1).sum())
        if lane == "featsync":
            wrong += sum(
                int((m.node_features["feat"] != table[m.input_nodes]).any(1).sum()) for m in pipe
            )
        print(seconds / (num_batches * batch_rows) * 1e9, wrong, flush=True)


def measure(
    num_rows: int, width: int, batch_rows: int, num_batches: int, rounds: int
) -> dict[str, object]:
    """Run the lanes in turn and compare them round by round."""
    sizes = [str(size) for size in (num_rows, width, batch_rows, num_batches)]
    lanes = {}
    for lane in LANES:
        command = [sys.executable, __file__, "--lane", lane, *sizes]
        environ = {**os.environ, **(TUNED if lane == "stock_tuned" else {})}
        lanes[lane] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
    taken: dict[str, list[float]] = {lane: [] for lane in LANES}
    wrong = 0
    for turn in range(rounds + 1):
        for lane, process in lanes.items():
            process.stdin.write("go\n")
            process.stdin.flush()
            nanoseconds, wrong_rows = process.stdout.readline().split()
            wrong += int(wrong_rows)
            if turn:  # the first round warms up
                taken[lane].append(float(nanoseconds))
    for process in lanes.values():
        process.stdin.close()
        process.wait(timeout=60)
    row: dict[str, object] = {"rows": num_rows, "width": width, "batch_rows": batch_rows}
    row |= {f"{lane}_ns": statistics.median(values) for lane, values in taken.items()}
    for base, target in TARGETS:
        ratios = [a / b for a, b in zip(taken["featsync"], taken[base], strict=True)]
        row[f"ratio_{base}"] = statistics.median(ratios)
        row[f"ratio_{base}_range"] = [min(ratios), max(ratios)]
        row[f"target_{base}"] = target
    return {**row, "pairs": rounds, "wrong_rows": wrong}


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lane", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="a tiny size, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.lane:
        serve_lane(args.lane[0], *(int(size) for size in args.lane[1:]))
        return
    sizes = (
        [(10_000, 8, 2_000)]
        if args.smoke
        else [(1_000_000, 128, batch_rows) for batch_rows in (100_000, 200_000, 300_000, 500_000)]
    )
    rows = []
    print(
        "batch rows | ns of CPU a row: "
        + ", ".join(LANES)
        + " | featsync / "
        + ", / ".join(base for base, _ in TARGETS)
        + " | wrong rows"
    )
    for num_rows, width, batch_rows in sizes:
        row = measure(num_rows, width, batch_rows, 8, 1 if args.smoke else args.rounds)
        rows.append(row)
        times = ", ".join(f"{row[f'{lane}_ns']:.0f}" for lane in LANES)
        ratios = ", ".join(
            f"{row[f'ratio_{base}']:.2f} (target {target:.2f})" for base, target in TARGETS
        )
        print(f"{batch_rows:10,} | {times} | {ratios} | {row['wrong_rows']}")
    write_json(args.json, rows)
    sys.exit(any(row["wrong_rows"] for row in rows))


if __name__ == "__main__":
    main()
