"""The transport between machines alone, over links of several rates, against bare isend and irecv.

    python benchmarks/bench_transports_link.py --json benchmarks/results/transports_link.json

As `bench_transports.py`, whose ``p2p`` has two copies by the CPU for each that the bare send has,
since a link within one machine is a copy itself. Here the ranks are on two pretended machines
(`tests/cluster`), where the link has a rate, and copies can hide behind it. Target: 0.9 of the
speed of bare isend and irecv.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import transport_lanes
from bench_transports import ratios, report
from pretended_machines import leave_group, run_on_machines
from records import write_json
from transport_lanes import Setting

RATES = ("1gbit", "4gbit", "10gbit")
SETTINGS = tuple(Setting(width=width, rows=60_000, part_rows=150_000) for width in (8, 32, 128))
SMOKE = (Setting(width=8, rows=200, part_rows=500),)


def on_a_machine(folder: Path, settings: tuple[Setting, ...], rounds: int) -> None:
    """One rank's part."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = [transport_lanes.measure(setting, rounds) for setting in settings]
    if dist.get_rank() == 0:
        (folder / "rows.json").write_text(json.dumps(found))
    leave_group()


def main() -> None:
    """Parse the command line; start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rates", nargs="+", default=RATES)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="a tiny size, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings, rounds = (SMOKE, 2) if args.smoke else (SETTINGS, args.rounds)
    if "RANK" in os.environ:
        on_a_machine(args.folder, settings, rounds)
        return
    rows = []
    for rate in RATES[:1] if args.smoke else args.rates:
        with tempfile.TemporaryDirectory() as folder:
            if not run_on_machines([*sys.argv, "--folder", folder], rate):
                return
            found = json.loads((Path(folder) / "rows.json").read_text())
        print(f"link of {rate}")
        for row in found:
            row |= {"rate": rate, "speed": ratios(row["seconds"])}
            report(row)
        rows += found
    write_json(args.json, rows)
    if any(row["wrong_rows"] for row in rows):
        sys.exit("wrong rows")


if __name__ == "__main__":
    main()
