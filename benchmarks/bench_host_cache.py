"""One cache for the ranks of a machine: rows over the link, and how its slots are split by costs.

Counted on ids that GraphBolt sampled for four ranks which share an epoch, with the planners that a
session uses and without moving a row. Rows are assigned to ranks at random; only those of another
machine count. The second half of the steps is counted, so caches are warm.

Two tables. *Sources*: rows that cross the link, as a share of those wanted, with caches of each
rank's own and with one for the machine; *dedup* counts a row that several ranks of a machine lack
in one step once. *Splits*: what a row costs where each rank keeps all its slots to itself, shares
all, or splits them as `featsync.host_cache.placement` says from counts of another epoch, for links
that are 18, 3.5 and 1 times as slow as another rank's memory, which is twice as slow as own memory.

    python benchmarks/bench_host_cache.py --json benchmarks/results/host_cache.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from host_replay import Caches, Found, IsFar, Score, replay
from id_traces import Ids
from records import write_json
from sampled_ids import Epoch, SampledIds, sample

from featsync.host_cache.placement import RowCosts, SharesFound, num_held_by_each, shares_found
from featsync.scores import presampled_counts

WINDOW = 8
RANKS_OF_MACHINE = 2
# One cache for the machine must bring at most so much of what private caches bring, by their size.
TARGETS = {0.05: {"lru": 0.52, "window_dedup": 0.77}, 0.1: {"lru": 0.30, "window_dedup": 0.54}}
PEER = 2.0  # where own memory is 1
HOMES_BY_PEER = (18.0, 3.5, 1.0)
NOISE = 1.01


def main() -> None:
    """Measure and print both tables."""
    options = parse_options()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for dataset in options.datasets:
        sampled = sample(dataset, options.epoch, num_epochs=2)
        owners = np.random.default_rng(0).integers(0, options.epoch.num_ranks, sampled.num_rows)
        print_head(dataset, sampled, options.epoch)
        rows += list(sources(dataset, sampled, owners, options.caches))
        rows += list(splits(dataset, sampled, owners, options.split_caches))
    missed = [row for row in rows if not row["met"]]
    write_json(options.json, rows, epoch=options.epoch._asdict(), targets_missed=len(missed))
    print(f"\n{len(missed)} of {len(rows)} lines miss their target")
    sys.exit(bool(missed) and not options.smoke)


def sources(
    dataset: str, sampled: SampledIds, owners: Ids, caches: list[float]
) -> Iterator[dict[str, Any]]:
    """Shares of the wanted rows that cross the link, on all machines of two ranks together."""
    print(
        "  rows over the link / wanted\n"
        "  cache   LRU  +dedup  window  +dedup  one cache  saved by: dedup  window  sharing |"
        " one / LRU (target)  / window+dedup (target) | CPU ns an id"
    )
    for cache in caches:
        num_slots = int(cache * sampled.num_rows)
        lru = of_machines(sampled, owners, Caches(num_slots, 0, 1, "lru"))
        window = of_machines(sampled, owners, Caches(num_slots, 0, WINDOW))
        one = of_machines(sampled, owners, Caches(0, RANKS_OF_MACHINE * num_slots, WINDOW))
        shares = {
            "lru": lru.home / lru.wanted,
            "lru_dedup": lru.distinct_home / lru.wanted,
            "window": window.home / window.wanted,
            "window_dedup": window.distinct_home / window.wanted,
            "one_cache": one.home / one.wanted,
        }
        saved = {
            "dedup": shares["lru"] - shares["lru_dedup"],
            "window": shares["lru_dedup"] - shares["window_dedup"],
            "sharing": shares["window_dedup"] - shares["one_cache"],
        }
        ratios = {base: shares["one_cache"] / shares[base] for base in ("lru", "window_dedup")}
        targets = TARGETS.get(cache, {})
        row = {"table": "sources", "dataset": dataset, "cache": cache, "slots": num_slots}
        row |= {"shares": shares, "saved": saved, "ratios": ratios, "targets": targets}
        row["plan_ns"] = {"window": window.plan_ns, "one_cache": one.plan_ns}
        row["met"] = all(ratios[base] <= target for base, target in targets.items())
        print(source_line(row), flush=True)
        yield row


def of_machines(sampled: SampledIds, owners: Ids, caches: Caches) -> Found:
    """Replay one machine after the other, and add up."""
    found = []
    for first in range(0, len(sampled.epochs[0]), RANKS_OF_MACHINE):
        batches = sampled.epochs[0][first : first + RANKS_OF_MACHINE]
        is_far = far_from(owners, range(first, first + RANKS_OF_MACHINE))
        found.append(replay(sampled.num_rows, caches, batches, is_far))
    *counts, times = (list(column) for column in zip(*found, strict=True))
    return Found(*map(sum, counts), plan_ns=float(np.mean(times)))


def splits(
    dataset: str, sampled: SampledIds, owners: Ids, caches: list[float]
) -> Iterator[dict[str, Any]]:
    """What a row costs by split and by costs, on a machine of two ranks and on one of four."""
    print(
        "  seconds a row, in those of own memory; half of all rows lie on another machine\n"
        "  ranks cache  home/peer | all own  all shared  own slots kept: seconds, computed |"
        " of the better end"
    )
    batches, other_epoch = sampled.epochs
    score = presampled_counts((ids for own in other_epoch for ids in own), sampled.num_rows)
    for num_ranks in (RANKS_OF_MACHINE, 2 * RANKS_OF_MACHINE):
        # Of four ranks all are on one machine, and the other has the rows of half of them.
        is_far = far_from(owners, range(RANKS_OF_MACHINE))
        machine = Machine(sampled.num_rows, batches[:num_ranks], is_far, score.astype(np.float64))
        for cache in caches:
            for home_by_peer in HOMES_BY_PEER:
                row = {"table": "splits", "dataset": dataset, "ranks": num_ranks, "cache": cache}
                row |= {"home_by_peer": home_by_peer}
                row |= machine.split(int(cache * sampled.num_rows), home_by_peer)
                print(split_line(row), flush=True)
                yield row


class Machine:
    """One machine of which splits are tried.

    Args:
        num_rows: Rows of the table.
        batches: Of each rank and step the ids.
        is_far: Which rows lie elsewhere.
        score: How often each row was used in another epoch.
    """

    def __init__(
        self, num_rows: int, batches: list[list[Ids]], is_far: IsFar, score: Score
    ) -> None:
        self._num_rows, self._batches, self._is_far, self._score = num_rows, batches, is_far, score
        self._uses = score[is_far(np.arange(num_rows))]
        self._found: dict[tuple[int, int], SharesFound] = {}

    def split(self, num_slots: int, home_by_peer: float) -> dict[str, Any]:
        """Choose a split, and replay it and both ends."""
        num_ranks, costs = len(self._batches), RowCosts(1.0, PEER, PEER * home_by_peer)
        own = num_held_by_each(self._uses, num_slots, num_ranks, WINDOW, costs)
        seconds = {
            name: self._replayed(split, num_slots).seconds(num_ranks, costs)
            for name, split in (("own", num_slots), ("shared", 0), ("chosen", own))
        }
        rest = num_ranks * (num_slots - own)
        computed = shares_found(self._uses, own, rest, num_ranks, WINDOW)
        ratio = seconds["chosen"] / min(seconds["own"], seconds["shared"])
        return {
            "slots": num_slots,
            "kept": own / num_slots,
            "seconds": seconds,
            "computed": computed.seconds(num_ranks, costs),
            "found": self._replayed(own, num_slots)._asdict(),
            "ratio": ratio,
            "met": ratio <= NOISE,
        }

    def _replayed(self, own: int, num_slots: int) -> SharesFound:
        if (own, num_slots) not in self._found:
            shared = min(len(self._batches) * (num_slots - own), self._num_rows)
            caches = Caches(own, shared, WINDOW, score=self._score)
            found = replay(self._num_rows, caches, self._batches, self._is_far)
            counts = (found.own, found.shared, found.home)
            shares = (count / found.wanted for count in counts)
            self._found[own, num_slots] = SharesFound(*shares)
        return self._found[own, num_slots]


def far_from(owners: Ids, ranks: range) -> IsFar:
    """Tell which rows none of some ranks holds."""
    is_far = ~np.isin(owners, ranks)
    return lambda ids: is_far.take(ids)


def print_head(dataset: str, sampled: SampledIds, epoch: Epoch) -> None:
    """Say what is counted."""
    sizes = [len(ids) for own in sampled.epochs[0] for ids in own]
    print(
        f"\n{dataset}: {sampled.num_rows:,} rows, {epoch.num_ranks} ranks, {epoch.steps} steps of "
        f"{epoch.seeds} seeds, fanouts {epoch.fanouts}, {int(np.mean(sizes)):,} ids a minibatch"
    )


def source_line(row: dict[str, Any]) -> str:
    """One line of the first table."""
    shares, saved, ratios, targets = (row[k] for k in ("shares", "saved", "ratios", "targets"))
    bounds = {base: f"({targets[base]:.2f})" if base in targets else "" for base in ratios}
    return (
        f"  {row['cache']:5.0%}  {shares['lru']:.3f}  {shares['lru_dedup']:.3f}   "
        f"{shares['window']:.3f}   {shares['window_dedup']:.3f}      {shares['one_cache']:.3f}"
        f"            {saved['dedup']:.3f}   {saved['window']:.3f}    {saved['sharing']:.3f} |"
        f" {ratios['lru']:9.3f} {bounds['lru']:8} {ratios['window_dedup']:15.3f} "
        f"{bounds['window_dedup']:8} | {row['plan_ns']['one_cache']:.0f} "
        f"(own caches: {row['plan_ns']['window']:.0f})" + ("" if row["met"] else "  MISSED")
    )


def split_line(row: dict[str, Any]) -> str:
    """One line of the second table."""
    seconds = row["seconds"]
    return (
        f"  {row['ranks']:5} {row['cache']:5.0%} {row['home_by_peer']:10.1f} | "
        f"{seconds['own']:7.3f} {seconds['shared']:11.3f} {row['kept']:12.0%}: "
        f"{seconds['chosen']:9.3f} {row['computed']:9.3f} | {row['ratio']:.3f}"
        + ("" if row["met"] else "  MISSED")
    )


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--datasets", nargs="+", default=["debian", "synthetic"])
    parser.add_argument("--caches", type=float, nargs="+", default=[0.05, 0.1])
    parser.add_argument("--split-caches", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    parser.add_argument("--json", type=Path, help="file to write rows and environment to")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only to see that it runs")
    options = parser.parse_args()
    options.epoch = Epoch(num_ranks=4, steps=60, seeds=256, fanouts=(10, 10, 5))
    if options.smoke:
        options.datasets, options.caches, options.split_caches = ["tiny"], [0.1], [0.2]
        options.epoch = Epoch(num_ranks=4, steps=20, seeds=16, fanouts=(5, 5))
    return options


if __name__ == "__main__":
    main()
