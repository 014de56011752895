"""One cache for the ranks of a machine, on two pretended machines: rows and bytes over their link.

    python benchmarks/bench_host_cache_link.py --json benchmarks/results/host_cache_link.json

Two machines (`tests/cluster`) with two ranks each and 1 Gbit/s between them. Rows of a table of
width 32 are assigned to ranks at random, so half of those that a rank wants lie on the other
machine; rows of the rank beside it are read from memory. Ids are those of two epochs that
GraphBolt sampled; the first warms the caches, the second is counted. Ranks keep step, as training
makes them (here with one number that they add up). Counted are the rows that `featsync.stats` says
other ranks sent, and the bytes that the network devices sent. All delivered rows are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dgl.graphbolt as gb
import numpy as np
import torch
import torch.distributed as dist
from bench_link import RATE, Given
from pretended_machines import leave_group, run_on_machines
from records import write_json
from sampled_ids import Epoch, sample

import featsync
from featsync.plan import FeatureKey

NUM_RANKS, RANKS_OF_MACHINE = 4, 2
WIDTH, ROW_BYTES = 32, 128
NODE = FeatureKey("node", None, "feat")


class Config(NamedTuple):
    """What is compared.

    Attributes:
        scope: Of the cache: ``rank`` or ``host``.
        retention: Of the cache.
        lookahead: Minibatches.
        cache: Share of the table that each rank has slots for.
    """

    scope: str
    retention: str
    lookahead: int
    cache: float


def configs_of(caches: Sequence[float]) -> list[Config]:
    """All of them, yardsticks first."""
    kinds = (("rank", "lru", 2), ("rank", "window", 8), ("host", "window", 8))
    return [Config(*kind, cache) for cache in caches for kind in kinds]


def rows_of(ids: torch.Tensor) -> torch.Tensor:
    """Rows of the table, ``(n, 32)``: made up, so that no rank needs to hold it all."""
    return ids.float().unsqueeze(1) + torch.arange(WIDTH) / WIDTH


class Rank:
    """One rank's part of the measurement.

    Args:
        folder: Where the ids lie: of all epochs, ranks and steps one after the other.
    """

    def __init__(self, folder: Path) -> None:
        self.rank = dist.get_rank()
        facts = json.loads((folder / "facts.json").read_text())
        ids = np.load(folder / "ids.npy", mmap_mode="r")
        ends = np.cumsum(facts["lengths"])
        minibatches = list(zip(ends - facts["lengths"], ends, strict=True))
        of_rank = minibatches[self.rank :: NUM_RANKS]
        own = [torch.from_numpy(np.array(ids[start:end])) for start, end in of_rank]
        self.epochs = [own[: len(own) // 2], own[len(own) // 2 :]]
        generator = torch.Generator().manual_seed(0)
        self.owners = torch.randint(NUM_RANKS, (facts["num_rows"],), generator=generator)
        self.part = rows_of((self.owners == self.rank).nonzero().squeeze(1))
        on_machine = self.owners // RANKS_OF_MACHINE == self.rank // RANKS_OF_MACHINE
        self.num_far = int((~on_machine[torch.cat(self.epochs[1])]).sum())

    def measure(self, config: Config) -> dict[str, Any]:
        """Run two epochs; what this rank saw of the second."""
        from cluster import traffic_of  # its folder is on the path of the ranks

        feature = featsync.PartitionedFeature(self.part, self.owners)
        source = Given(self.epochs[0])
        pipe = source.plan_feature(
            gb.BasicFeatureStore({NODE: feature}),
            ["feat"],
            lookahead=config.lookahead,
            retention=config.retention,
            device_cache=config.cache,
            cache_scope=config.scope,
        ).sync_feature(transport="shared_memory")
        wrong = self._epoch(pipe, self.epochs[0])
        stats = featsync.stats(pipe)
        stats.reset()
        source.nodes = self.epochs[1]
        dist.barrier()
        before, start = traffic_of(), time.perf_counter()
        cpu_start = time.process_time()
        wrong += self._epoch(pipe, self.epochs[1])
        cpu_s = time.process_time() - cpu_start
        dist.barrier()
        seconds, sent = time.perf_counter() - start, traffic_of().since(before).sent
        (feature_stats,) = stats.features.values()
        return {
            "link_rows": feature_stats.rows["peer"],
            "far_rows": self.num_far,
            "sent": sent if self.rank % RANKS_OF_MACHINE == 0 else 0,
            "epoch_s": seconds,
            "cpu_s": cpu_s,
            "plan_s": stats.plan_s,
            "wrong_rows": wrong,
            "why": feature_stats.why,
        }

    @staticmethod
    def _epoch(pipe: Any, wanted: Sequence[torch.Tensor]) -> int:
        wrong = 0
        for ids, minibatch in zip(wanted, pipe, strict=True):
            wrong += int((minibatch.node_features["feat"] != rows_of(ids)).any(1).sum())
            dist.all_reduce(torch.zeros(1))
        return wrong


def on_a_machine(folder: Path, configs: list[Config]) -> None:
    """Measure all configurations on this rank; the first one writes what all found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = Rank(folder)
    rows = []
    for config in configs:
        found: list[Any] = [None] * NUM_RANKS
        dist.all_gather_object(found, rank.measure(config))
        names = ("link_rows", "far_rows", "sent", "cpu_s", "plan_s", "wrong_rows")
        row = {name: sum(one[name] for one in found) for name in names}
        row["epoch_s"] = max(one["epoch_s"] for one in found)
        rows.append({**config._asdict(), **row, "why": found[0]["why"]})
        if rank.rank == 0:
            print(f"{config}: {row}", flush=True)
    if rank.rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    leave_group()


def launch(dataset: str, epoch: Epoch, caches: Sequence[float]) -> list[dict[str, Any]] | None:
    """Sample, start the ranks and wait for them; ``None`` where the system cannot."""
    with tempfile.TemporaryDirectory() as folder:
        sampled = sample(dataset, epoch, num_epochs=2)
        in_turn = [own[step] for e in sampled.epochs for step in range(epoch.steps) for own in e]
        np.save(Path(folder) / "ids.npy", np.concatenate(in_turn))
        facts = {"num_rows": sampled.num_rows, "lengths": [len(ids) for ids in in_turn]}
        (Path(folder) / "facts.json").write_text(json.dumps(facts))
        del sampled, in_turn
        command = [__file__, "--folder", folder, "--caches", *map(str, caches)]
        if not run_on_machines(command, RATE, RANKS_OF_MACHINE):
            return None
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "rows.json").read_text())
    return [{"dataset": dataset, **row} for row in rows]


def report(rows: list[dict[str, Any]]) -> None:
    """Print a table; ratios are to the private LRU of the same size."""
    print(
        "dataset    cache  scope retention | rows over the link / far rows  / LRU | MB sent  / LRU"
        "  / rows | planning and epoch, s | wrong rows"
    )
    for row in rows:
        base = next(
            one
            for one in rows
            if (one["dataset"], one["cache"], one["retention"])
            == (row["dataset"], row["cache"], "lru")
        )
        row["rows_of_lru"] = row["link_rows"] / base["link_rows"]
        row["bytes_of_lru"] = row["sent"] / base["sent"]
        print(
            f"{row['dataset']:10} {row['cache']:5.0%} {row['scope']:>6} {row['retention']:9} | "
            f"{row['link_rows']:11,} {row['link_rows'] / row['far_rows']:16.3f} "
            f"{row['rows_of_lru']:6.3f} | {row['sent'] / 1e6:7.1f} {row['bytes_of_lru']:6.3f} "
            f"{row['sent'] / (row['link_rows'] * ROW_BYTES):7.3f} | {row['plan_s']:10.1f} "
            f"{row['epoch_s']:10.1f} | {row['wrong_rows']}"
        )


def main() -> None:
    """Parse the command line; start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--datasets", nargs="+", default=["debian", "synthetic"])
    parser.add_argument("--caches", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="a tiny size, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.folder is not None:
        on_a_machine(args.folder, configs_of(args.caches))
        return
    epoch = Epoch(NUM_RANKS, args.steps, 256, (10, 10, 5))
    if args.smoke:
        args.datasets, args.caches, epoch = ["tiny"], [0.1], Epoch(NUM_RANKS, 6, 16, (5, 5))
    rows = []
    for dataset in args.datasets:
        found = launch(dataset, epoch, args.caches)
        if found is None:
            return
        rows += found
    report(rows)
    write_json(args.json, rows, epoch=epoch._asdict(), rate=RATE, row_bytes=ROW_BYTES)
    if any(row["wrong_rows"] for row in rows):
        sys.exit("wrong rows")


if __name__ == "__main__":
    main()
