"""Memory above stock, and whether anything grows over 20 epochs.

    python benchmarks/bench_memory.py --json benchmarks/results/memory.json

Each lane is a process of its own that iterates minibatches with given ids (nothing is sampled) and
reports its peak resident memory (shared memory included) above what it had before the first, in
minibatches of rows; then resident memory, threads, descriptors and /dev/shm after each of 20
epochs, every second of which is left half way. Promise: at most two minibatches of rows above
stock, and nothing grows.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import threading
from pathlib import Path

import torch
from bench_gather import GivenIds, GivenMiniBatches
from records import write_json

import featsync
from featsync._graphbolt import gb

LANES = ("stock", "inline", "thread", "process")


def resident_bytes(field: str) -> int:
    """One line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def state() -> dict[str, int]:
    """What must not grow."""
    gc.collect()
    return {
        "resident_bytes": resident_bytes("VmRSS"),
        "threads": threading.active_count(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "shm_entries": len(list(Path("/dev/shm").iterdir())),
    }


def run_lane(lane: str, num_rows: int, width: int, batch_rows: int, num_epochs: int) -> None:
    """Measure one lane and print the result as JSON."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    table = torch.randn(num_rows, width)
    # Sizes differ by up to a fifth, as sampled minibatches do.
    sizes = [batch_rows - (i * 7919) % (batch_rows // 5) for i in range(12)]
    batches = [torch.randperm(num_rows)[:size] for size in sizes]
    store = gb.BasicFeatureStore({("node", None, "feat"): gb.TorchBasedFeature(table)})
    source = GivenMiniBatches(GivenIds(batches))
    if lane == "stock":
        pipe = source.fetch_feature(store, ["feat"])
    else:
        store = featsync.share(store) if lane == "process" else store
        pipe = source.plan_feature(store, ["feat"]).sync_feature(worker=lane)
    loader = gb.DataLoader(pipe)
    store.read("node", None, "feat").sum()  # the table counts for nobody
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    after, wrong = [], 0
    for epoch in range(num_epochs):
        for index, minibatch in enumerate(loader):
            rows = minibatch.node_features["feat"]
            wrong += int((rows[::97] != table[minibatch.input_nodes[::97]]).any(1).sum())
            if epoch % 2 and index == len(batches) // 2:
                break
        del minibatch, rows
        after.append(state())
    batch_bytes = batch_rows * width * table.element_size()
    peak = (resident_bytes("VmHWM") - before) / batch_bytes
    print(json.dumps({"peak_batches": peak, "after": after, "wrong_rows": wrong}))


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lane", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="a tiny size, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.lane:
        run_lane(args.lane[0], *(int(size) for size in args.lane[1:]))
        return
    sizes = (20_000, 32, 5_000, 4) if args.smoke else (1_000_000, 128, 200_000, 20)
    rows = []
    print(
        "lane | peak above the table, minibatches of rows | MB, threads, descriptors, /dev/shm "
        "after the second and the last epoch | wrong rows"
    )
    for lane in LANES:
        command = [sys.executable, __file__, "--lane", lane, *(str(size) for size in sizes)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        row = {"lane": lane, **json.loads(done.stdout.splitlines()[-1])}
        rows.append(row)
        first, last = row["after"][1], row["after"][-1]
        shown = [
            f"{end['resident_bytes'] / 2**20:.0f}, {end['threads']}, {end['descriptors']}, "
            f"{end['shm_entries']}"
            for end in (first, last)
        ]
        print(
            f"{lane:7} | {row['peak_batches']:.2f} | {shown[0]} -> {shown[1]} | {row['wrong_rows']}"
        )
    write_json(args.json, rows, sizes=sizes)
    sys.exit(any(row["wrong_rows"] for row in rows))


if __name__ == "__main__":
    main()
