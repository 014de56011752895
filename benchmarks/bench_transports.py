"""Transports alone, between two ranks of this machine, against what they are made of.

    python benchmarks/bench_transports.py --json benchmarks/results/transports.json

* ``p2p`` against isend and irecv of as many bytes that are ready, between the same two processes,
  the receive posted first. It has to be told, to read the rows out of the table, and, in place, to
  put them where they belong, besides.
* ``shared_memory`` against ``torch.index_select(out=)`` of the same rows out of the peer's mapped
  memory, into warm memory, in order of their addresses.

Ways take turns; a ratio is of two next to each other. Targets: 0.9 of the speed of both; at most 4
bytes an id.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import transport_lanes
from ranks import Ranks
from records import write_json
from transport_lanes import Setting

_AGAINST = {"landed": "raw", "in place": "raw", "memory": "select", "scattered": "select"}
SETTINGS = (
    Setting(width=8, rows=150_000, part_rows=500_000),
    Setting(width=32, rows=150_000, part_rows=500_000),
    Setting(width=128, rows=150_000, part_rows=500_000),
    Setting(width=512, rows=50_000, part_rows=150_000),
    # Few of many: ids that do not compress.
    Setting(width=128, rows=1_000, part_rows=500_000),
)
SMOKE = (Setting(width=8, rows=200, part_rows=500), Setting(width=4096, rows=600, part_rows=1_000))


def ratios(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Speed of each way as a share of that which it is held against: median and range."""
    found = {}
    for way, base in _compared(seconds):
        values = [b / s for b, s in zip(seconds[base], seconds[way], strict=True)]
        found[way] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return found


def _compared(seconds: dict[str, Any]) -> list[tuple[str, str]]:
    return [(way, base) for way, base in _AGAINST.items() if way in seconds]


def report(row: dict[str, Any]) -> None:
    """Print what one setting gave."""
    print(
        f"{row['rows']:,} rows of {4 * row['width']} bytes: {row['bytes_an_id']:.2f} bytes an id, "
        f"{row['share_of_ids']:.2%} of the bytes, wrong rows {row['wrong_rows']}"
    )
    for way, base in _compared(row["seconds"]):
        took, against = (statistics.median(row["seconds"][name]) for name in (way, base))
        ratio = row["speed"][way]
        print(
            f"  {way:9} {1e3 * took:7.2f} ms, {base} {1e3 * against:7.2f} ms: speed "
            f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
            flush=True,
        )


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--smoke", action="store_true", help="a tiny size, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with Ranks(2) as ranks:
        for setting in SMOKE if args.smoke else SETTINGS:
            rounds = 2 if args.smoke else args.rounds
            row = ranks.call(transport_lanes.measure, setting, rounds)[0]
            row["speed"] = ratios(row["seconds"])
            rows.append(row)
            report(row)
    write_json(args.json, rows)
    if any(row["wrong_rows"] for row in rows):
        sys.exit("wrong rows")


if __name__ == "__main__":
    main()
