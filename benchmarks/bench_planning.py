"""What planning costs: CPU time of push, settle and hits, and bytes, on one core.

Every batch is new (ids that repeat flatter by a factor of two), the cache is full before the clock
starts, and CPU time of this thread is measured, so that other work on the machine matters less.
A rate counts each id of a batch once, with all three calls. ``shared`` is the cache that ranks of a
machine share, planned for two of them under its lock; the others are a rank's own.

    python benchmarks/bench_planning.py [--json F] [--smoke]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from host_replay import SharedByTwo
from id_traces import Ids, power_law
from records import write_json

from featsync.retention import RETENTION, Retention

DRAWS = 400_000
WARM_UP_BATCHES = 12
Policy = Retention | SharedByTwo
POLICIES: dict[str, Callable[[int, int, int], Policy]] = {**RETENTION, "shared": SharedByTwo}
# Million ids a second that planning should reach, by rows of the table and order of the ids.
TARGETS = {
    ("window", 1_000_000, "sorted"): 20.0,
    ("window", 10_000_000, "sorted"): 10.0,
    ("window", 1_000_000, "sampled"): 15.0,
    ("window", 10_000_000, "sampled"): 8.0,
    ("shared", 1_000_000, "sorted"): 14.0,
    ("shared", 1_000_000, "sampled"): 14.0,
}
BYTES_ALLOWED = {
    "window": {"row": 9.0, "slot": 14.0, "window_id": 9.0},
    "shared": {"row": 13.0, "slot": 23.0, "window_id": 0.0},
}


def main() -> None:
    """Measure all combinations and print a table."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    print(HEAD)
    rows: list[dict[str, object]] = []
    for num_rows in options.rows:
        longest = 2 * max(options.windows) + WARM_UP_BATCHES + options.batches
        sampled = list(islice(power_law(num_rows, options.draws, seed=0), longest))
        for order in options.orders:
            batches = sampled if order == "sampled" else [np.sort(ids) for ids in sampled]
            for cache in options.caches:
                for policy, window in product(options.policies, options.windows):
                    retention = POLICIES[policy](num_rows, int(num_rows * cache), window)
                    row = {"policy": policy, "rows": num_rows, "order": order}
                    row |= {"cache": cache, "window": window}
                    row |= measure(retention, batches, options.batches)
                    row |= judge(row)
                    rows.append(row)
                    print(line(row), flush=True)
    missed = [row for row in rows if row["met"] is False]
    print(f"{len(missed)} of {len(rows)} rows miss their target rate; fixed cost of a small batch:")
    small = [fixed_cost(*chosen) for chosen in product(options.policies, options.windows)]
    write_json(options.json, rows, small_batches=small, bytes_allowed=BYTES_ALLOWED)


def measure(retention: Policy, batches: list[Ids], count: int) -> dict[str, Any]:
    """Run a policy through batches and time the last ``count`` steps."""
    coming = iter(batches)
    for ids in islice(coming, retention.window):
        retention.push(ids)
    for ids in islice(coming, WARM_UP_BATCHES):
        retention.push(ids)
        retention.settle()
        retention.hits()
    steps = [timed_step(retention, ids) for ids in islice(coming, count)]
    sizes = np.array([step["ids"] for step in steps])
    total = np.array([step["push"] + step["settle"] + step["hits"] for step in steps]) / sizes
    parts = {
        name: float(np.median(np.array([step[name] for step in steps]) / sizes)) * 1e9
        for name in ("push", "settle", "hits")
    }
    return {
        "ids": int(sizes.mean()),
        "ns_per_id": float(np.median(total)) * 1e9,
        "ns_per_id_min": float(total.min()) * 1e9,
        "ns_per_id_max": float(total.max()) * 1e9,
        "ns_per_id_parts": parts,
        "million_ids_per_s": 1e-6 / float(np.median(total)),
        "hit_rate": float(np.mean([step["hit_rate"] for step in steps])),
        "bytes": state_bytes(retention, batches),
    }


def timed_step(retention: Policy, ids: Ids) -> dict[str, float]:
    """Make one batch known, settle one, ask for the next; return CPU seconds of each."""
    push, _ = timed(lambda: retention.push(ids))
    settle, _ = timed(retention.settle)
    ask, slots = timed(retention.hits)
    return {
        "ids": len(ids),
        "push": push,
        "settle": settle,
        "hits": ask,
        "hit_rate": float((slots >= 0).mean()),
    }


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return CPU seconds of this thread in a call, and its result."""
    start = time.thread_time()
    result = call()
    return time.thread_time() - start, result


def fixed_cost(policy: str, window: int) -> dict[str, object]:
    """Measure a batch so small that its ids cost nothing: microseconds of the three calls."""
    retention = POLICIES[policy](1_000_000, 100_000, window)
    batches = list(islice(power_law(1_000_000, 1_000, seed=1), 400))
    result = measure(retention, batches, 300)
    microseconds = result["ns_per_id"] * result["ids"] / 1e3
    print(f"  {policy}, window {window:2}: {microseconds:5.0f} us for {result['ids']} ids")
    return {"policy": policy, "window": window, "ids": result["ids"], "us_per_batch": microseconds}


def state_bytes(retention: Policy, batches: list[Ids]) -> dict[str, float]:
    """Add up the arrays of a policy: bytes a table row, a slot, and an id of the window.

    The ids themselves, which the minibatches hold too, are not counted. An id of the window is one
    place in a batch as large as the largest, times window + 1 batches.
    """
    if isinstance(retention, SharedByTwo):
        return retention.state_bytes()
    row = slot = window = 0
    for array in arrays_of(retention):
        if len(array) == retention.num_rows:
            row += array.nbytes
        elif len(array) in (retention.num_slots, retention.num_slots + 1, 2 * retention.num_slots):
            slot += array.nbytes
        else:
            window += array.nbytes
    ids = max(map(len, batches)) * (retention.window + 1)
    return {
        "row": row / retention.num_rows,
        "slot": slot / max(retention.num_slots, 1),
        "window_id": window / ids,
    }


def arrays_of(part: object) -> Iterator[np.ndarray[Any, Any]]:
    """Find the arrays of an object and of the objects of this package that it is made of."""
    for value in vars(part).values():
        if isinstance(value, np.ndarray):
            yield value
        elif type(value).__module__.startswith("featsync."):
            yield from arrays_of(value)


def judge(row: dict[str, Any]) -> dict[str, Any]:
    """Compare a row with its targets; ``met`` is None where there is none."""
    target = TARGETS.get((row["policy"], row["rows"], row["order"]))
    allowed = BYTES_ALLOWED.get(row["policy"], {})
    fits = all(row["bytes"][name] <= limit for name, limit in allowed.items())
    return {
        "target": target,
        "met": None if target is None else row["million_ids_per_s"] >= target,
        "bytes_fit": fits,
    }


HEAD = (
    "policy      rows order   cache  K    ids | ns an id: all (min-max)  push settle  hits |"
    " M ids/s target met | hit rate | bytes a row, slot, window id"
)


def line(row: dict[str, Any]) -> str:
    """Format one row of the table under HEAD."""
    parts, size = row["ns_per_id_parts"], row["bytes"]
    met = {True: "yes", False: "NO", None: ""}[row["met"]]
    return (
        f"{row['policy']:6} {row['rows']:9} {row['order']:7} {row['cache']:5.0%} "
        f"{row['window']:2} {row['ids']:6} | "
        f"{row['ns_per_id']:9.1f} ({row['ns_per_id_min']:3.0f}-{row['ns_per_id_max']:3.0f})"
        f"{parts['push']:9.1f}{parts['settle']:7.1f}{parts['hits']:6.1f} | "
        f"{row['million_ids_per_s']:7.1f} {row['target'] or '':6} {met:3} | "
        f"{row['hit_rate']:8.3f} | {size['row']:5.2f} {size['slot']:5.2f} {size['window_id']:5.2f}"
        + ("" if row["bytes_fit"] else "  over the limit")
    )


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["window", "shared"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--caches", type=float, nargs="+", default=[0.02, 0.1, 0.2])
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--orders", nargs="+", choices=["sorted", "sampled"])
    parser.add_argument("--draws", type=int, default=DRAWS, help="ids drawn for the largest batch")
    parser.add_argument("--batches", type=int, default=24, help="batches that are timed")
    parser.add_argument("--threads", type=int, default=1, help="threads torch may use")
    parser.add_argument("--json", type=Path, help="file to write rows and environment to")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only to see that it runs")
    options = parser.parse_args()
    options.orders = options.orders or ["sorted", "sampled"]
    if options.smoke:
        options.rows, options.draws, options.batches = [20_000], 4_000, 4
    return options


if __name__ == "__main__":
    main()
