"""Rows of a partitioned table over a link of limited rate, beside a busy device.

    python benchmarks/bench_link.py --json benchmarks/results/link.json

Two pretended machines (`tests/cluster`), one rank on each, a link of 1 Gbit/s. Half of the rows of
every minibatch lie on the other machine. A step is a device that is busy for so long while the CPU
is free (simulated), for steps shorter than, as long as and longer than the rows are under way. At
best a step takes as long as the longer of the two: the columns are the time it takes, divided by
that, with the bytes that the link carried (as its device counts them, and as a cable of 1,500-byte
frames would, which is what the limit allows 1 Gbit/s of) and with those that had to be sent: rows
and ids.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import dgl.graphbolt as gb
import torch
import torch.distributed as dist
from pretended_machines import leave_group, run_on_machines
from records import write_json
from torch.utils.data import IterDataPipe

import featsync
from featsync.exchange.id_code import encode
from featsync.plan import FeatureKey

RATE, BYTES_A_SECOND = "1gbit", 125e6
WIDTH = 128
STEPS = (0.5, 1.0, 2.0)  # of the time that rows and ids take at the link's rate
NODE = FeatureKey("node", None, "feat")
WARM_UP = 4  # minibatches before the clock starts


class Size(NamedTuple):
    """How much is measured.

    Attributes:
        table_rows: Of the whole table.
        batch_rows: Wanted by each minibatch of each rank.
        minibatches: In the clock.
        rounds: Times that all steps are measured, in turn.
    """

    table_rows: int
    batch_rows: int
    minibatches: int
    rounds: int


class Given(IterDataPipe[Any]):
    """Minibatches with given input nodes, without a sampler."""

    def __init__(self, nodes: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.nodes = nodes

    def __iter__(self) -> Iterator[gb.MiniBatch]:
        for nodes in self.nodes:
            minibatch = gb.MiniBatch()
            minibatch.input_nodes = nodes
            yield minibatch


def rows_of(ids: torch.Tensor) -> torch.Tensor:
    """Rows of the table, ``(n, 128)``: made up, so that no rank needs to hold it all."""
    return ids.float().unsqueeze(1) + torch.arange(WIDTH) / WIDTH


def epoch(pipe: IterDataPipe[Any], wanted: Sequence[torch.Tensor], step_s: float) -> dict[str, Any]:
    """Run one epoch; every tenth minibatch's rows are compared after the clock stopped."""
    from cluster import traffic_of  # its folder is on the path of the ranks

    held: dict[int, torch.Tensor] = {}
    dist.barrier()
    before = traffic_of()
    for number, minibatch in enumerate(pipe):
        if number == WARM_UP:
            start, cpu_start = time.perf_counter(), time.process_time()
        time.sleep(step_s)
        if number % 10 == 0 or number == len(wanted) - 1:
            held[number] = minibatch.node_features["feat"]
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    dist.barrier()
    traffic = traffic_of().since(before)
    wrong = [(rows != rows_of(wanted[number])).any(1).sum() for number, rows in held.items()]
    return {
        "step_s": seconds / (len(wanted) - WARM_UP),
        "cpu_s": cpu_s / (len(wanted) - WARM_UP),
        "sent": traffic.sent / len(wanted),
        "wire": traffic.wire / len(wanted),
        "wrong_rows": int(sum(wrong)),
    }


def measure(size: Size) -> list[dict[str, Any]]:
    """Measure all steps on this rank; returns what all ranks found, the slowest of each."""
    rank = dist.get_rank()
    half = size.table_rows // 2
    bounds = [0, half, size.table_rows]
    part = rows_of(torch.arange(bounds[rank], bounds[rank + 1]))
    feature = featsync.PartitionedFeature(part, bounds)
    store = gb.BasicFeatureStore({NODE: feature})
    number = size.minibatches + WARM_UP
    wanted = [
        [
            torch.randperm(size.table_rows, generator=generator)[: size.batch_rows]
            for _ in range(number)
        ]
        for generator in (torch.Generator().manual_seed(seed) for seed in range(2))
    ]
    # What one rank sends: rows that the other wants, and ids of those that it wants itself.
    other = [ids[(ids < half) == (rank == 0)] for ids in wanted[1 - rank]]
    own = [ids[(ids < half) == (rank == 1)] % half for ids in wanted[rank]]
    row_bytes = sum(map(len, other)) * WIDTH * 4 / number
    id_bytes = sum(len(encode(ids.sort().values.numpy())[1]) for ids in own) / number
    rows = []
    for _ in range(size.rounds):
        for share in STEPS:
            step_s = share * (row_bytes + id_bytes) / BYTES_A_SECOND
            pipe = Given(wanted[rank]).plan_feature(store, ["feat"]).sync_feature(transport="p2p")
            found = epoch(pipe, wanted[rank], step_s)
            rows.append(
                {"share": share, "device_s": step_s, "planned": row_bytes + id_bytes} | found
            )
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, rows)
    return [slower(*both) for both in zip(*everybody, strict=True)]


def slower(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What the slower rank found of one epoch, in how far it missed what is possible."""
    row = dict(max(one, other, key=lambda row: row["step_s"]))
    for name in ("sent", "wire", "planned"):
        row[name] = max(one[name], other[name])
        row[f"ratio_{name}"] = row["step_s"] / max(row["device_s"], row[name] / BYTES_A_SECOND)
    row["bytes_ratio"] = row["sent"] / row["planned"]
    row["wrong_rows"] = one["wrong_rows"] + other["wrong_rows"]
    return row


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median over the rounds, by step, with least and most of the ratios."""
    rows = []
    for share in STEPS:
        of_step = [row for row in found if row["share"] == share]
        row = {name: median(one[name] for one in of_step) for name in of_step[0]}
        row["range"] = {
            name: [min(one[name] for one in of_step), max(one[name] for one in of_step)]
            for name in ("ratio_sent", "ratio_wire", "ratio_planned")
        }
        row["wrong_rows"] = sum(one["wrong_rows"] for one in of_step)
        rows.append(row)
    return rows


def on_a_machine(size: Size, path: Path) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = measure(size)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(summary(rows)))
    leave_group()


def report(row: dict[str, Any]) -> None:
    """Print what one step gave."""
    low, high = row["range"]["ratio_wire"]
    print(
        f"device {1000 * row['device_s']:.1f} ms, step {1000 * row['step_s']:.1f} ms "
        f"({1000 * row['cpu_s']:.1f} of CPU), / best: "
        f"by bytes on a cable {row['ratio_wire']:.3f} ({low:.3f} to {high:.3f}), "
        f"counted {row['ratio_sent']:.3f}, planned {row['ratio_planned']:.3f}; "
        f"bytes {row['sent']:,.0f} / planned {row['bytes_ratio']:.4f}; "
        f"wrong rows {row['wrong_rows']}"
    )


def main() -> None:
    """Parse the command line; start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-rows", type=int, default=20_000)
    parser.add_argument("--smoke", action="store_true", help="a tiny size, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    size = Size(200_000, args.batch_rows, 80, args.rounds)
    if args.smoke:
        size = Size(2_000, 500, 4, 1)
    if "RANK" in os.environ:
        on_a_machine(size, args.json)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        if not run_on_machines([*sys.argv, "--json", str(path)], RATE):
            return
        rows = json.loads(path.read_text())
    for row in rows:
        report(row)
    write_json(args.json, rows, size=size._asdict(), rate=RATE)
    if any(row["wrong_rows"] for row in rows):
        sys.exit("wrong rows")


if __name__ == "__main__":
    main()
