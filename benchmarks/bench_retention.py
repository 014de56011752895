"""How many rows each policy finds in its cache, beside the most that is possible.

A trace is one stream. Hits are counted in its second half: the first is the warm-up epoch, whose
uses are also the score that is given to the policies that take one. Checks the promise: ``window``
is within half a point of ``lru`` and of ``static`` with the same score, or better, and within half
a point of Belady's rule once the window covers the cache, that is, when 99 of 100 slots hold a row
that a batch in the window uses.

    python benchmarks/bench_retention.py [--trace FILE.npz ...] [--json F] [--smoke]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from belady import belady_hits
from id_traces import Ids, IdTrace, load_traces, power_law
from records import write_json

from featsync.retention import MAX_WINDOW, RETENTION, Retention

HALF_A_POINT = 0.005
COVERED = 0.99
Score = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """What a policy made of a trace.

    Attributes:
        hit_rate: Share of the ids of the second half that were inside.
        named_share: Share of the slots that held a row named in the window, at one step.
    """

    hit_rate: float
    named_share: float


def main() -> None:
    """Measure all traces and print a table of each."""
    options = parse_options()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    broken = 0
    for trace in traces_of(options):
        trace_rows, complaints = measure(trace, options.caches, options.windows)
        rows += trace_rows
        broken += len(complaints)
        print("\n".join(complaints) or "  The promise holds in every column.")
    write_json(options.json, rows, promises_broken=broken)
    print(f"\n{broken} breaches of the promise in {len(rows)} measurements")


def measure(
    trace: IdTrace, caches: list[float], windows: list[int]
) -> tuple[list[dict[str, object]], list[str]]:
    """Run one trace through all policies; return its rows and where the promise is broken."""
    half = len(trace.batches) // 2
    score = uses_of(trace.batches[:half], trace.num_rows)
    num_ids = sum(map(len, trace.batches[half:]))
    print(
        f"\n{trace.name}: {trace.num_rows:,} rows, {len(trace.batches)} batches of "
        f"{num_ids // max(len(trace.batches) - half, 1):,} ids; hit rates of the last "
        f"{len(trace.batches) - half}"
    )
    print(
        f"  {'':26}" + "".join(f"   K={window:<4}" for window in windows) + "  (* covers the cache)"
    )
    rows: list[dict[str, object]] = []
    complaints = []
    for cache in caches:
        num_slots = int(cache * trace.num_rows)

        def run(policy: str, given: Score | None, window: int, slots: int = num_slots) -> Outcome:
            retention = RETENTION[policy](trace.num_rows, slots, window, given)
            return second_half(retention, trace.batches)

        outcomes = {("lru", "", 0): run("lru", None, 1)}
        for scored, given in (("counted", None), ("given", score)):
            outcomes["static", scored, 0] = run("static", given, 1)
            for window in windows:
                outcomes["window", scored, window] = run("window", given, window)
        best = belady_hits(trace.batches, trace.num_rows, num_slots)[half:].sum() / num_ids
        rates = {key: outcome.hit_rate for key, outcome in outcomes.items()}
        rates["belady", "", 0] = float(best)
        covering = {w for w in windows if outcomes["window", "counted", w].named_share >= COVERED}
        print_cache(cache, rates, windows, covering)
        complaints += breaches(cache, rates, windows, covering)
        rows += [
            {
                "trace": trace.name,
                "rows": trace.num_rows,
                "cache": cache,
                "slots": num_slots,
                "policy": policy,
                "score": scored,
                "window": window,
                "covers_cache": window in covering,
                "hit_rate": value,
            }
            for (policy, scored, window), value in rates.items()
        ]
    return rows, complaints


def second_half(retention: Retention, batches: list[Ids]) -> Outcome:
    """Run a stream of batches; watch the second half, and the slots in its middle."""
    half = len(batches) // 2
    hits = wanted = 0
    named_share = 0.0
    for ids in batches[: retention.window]:
        retention.push(ids)
    for step, ids in enumerate(batches):
        ahead = batches[step + 1 : step + 1 + retention.window]
        if len(ahead) == retention.window:
            retention.push(ahead[-1])
        if step >= half:
            hits += int(np.count_nonzero(retention.hits() >= 0))
            wanted += len(ids)
        retention.settle()
        if step == (half + len(batches)) // 2:
            is_named = np.isin(retention.resident, np.concatenate(ahead)) if ahead else np.zeros(1)
            named_share = float(is_named.mean()) if len(is_named) else 1.0
    return Outcome(hits / max(wanted, 1), named_share)


def uses_of(batches: list[Ids], num_rows: int) -> Score:
    """Count the uses of each row, as a score."""
    score = np.zeros(num_rows)
    for ids in batches:
        score[ids] += 1
    return score


def breaches(
    cache: float,
    rates: dict[tuple[str, str, int], float],
    windows: list[int],
    covering: set[int],
) -> list[str]:
    """Say where ``window`` falls short of what is promised."""
    complaints = []
    for scored in ("counted", "given"):
        for window in windows:
            rivals = {"static": rates["static", scored, 0], "lru": rates["lru", "", 0]}
            if window in covering:
                rivals["belady"] = rates["belady", "", 0]
            ours = rates["window", scored, window]
            complaints += [
                f"  BROKEN at cache {cache:.0%}, K={window}, {scored} use: {ours:.4f} is "
                f"{100 * (theirs - ours):.2f} points below {rival}"
                for rival, theirs in rivals.items()
                if ours < theirs - HALF_A_POINT
            ]
    return complaints


def print_cache(
    cache: float,
    rates: dict[tuple[str, str, int], float],
    windows: list[int],
    covering: set[int],
) -> None:
    """Print the lines of one cache size."""
    lru, best = rates["lru", "", 0], rates["belady", "", 0]
    counted, given = rates["static", "counted", 0], rates["static", "given", 0]
    print(
        f"  cache {cache:4.0%}  lru {lru:.4f}  static {counted:.4f} by counted use, "
        f"{given:.4f} by given  belady {best:.4f}"
    )
    for scored in ("counted", "given"):
        cells = [
            f"   {rates['window', scored, window]:.4f}{'*' if window in covering else ' '}"
            for window in windows
        ]
        print(f"    window, {scored + ' use':16}" + "".join(cells), flush=True)


def traces_of(options: argparse.Namespace) -> list[IdTrace]:
    """Read the traces that were named, or make up two."""
    if options.trace:
        return [trace for path in options.trace for trace in load_traces(path)]
    return [
        IdTrace(
            f"power law, {num_rows:,} rows, seed {options.seed}",
            num_rows,
            list(islice(power_law(num_rows, options.draws, options.seed), options.batches)),
        )
        for num_rows in options.rows
    ]


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--trace", type=Path, nargs="+", help="recorded traces (.npz)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 4_000_000])
    parser.add_argument("--draws", type=int, default=400_000, help="ids drawn for a large batch")
    parser.add_argument("--batches", type=int, default=80, help="batches of a made-up trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--caches", type=float, nargs="+", default=[0.02, 0.05, 0.1, 0.2])
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--json", type=Path, help="file to write rows and environment to")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only to see that it runs")
    options = parser.parse_args()
    if not all(1 <= window <= MAX_WINDOW for window in options.windows):
        parser.error(f"--windows must lie in 1..{MAX_WINDOW}")
    if options.smoke:
        options.rows, options.draws, options.batches = [5_000], 2_000, 20
    return options


if __name__ == "__main__":
    main()
