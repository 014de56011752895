"""Command line: see the package."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from .launch import Cluster, Run, why_impossible
from .machines import ClusterError

_USAGE = 2


def main() -> None:
    """Run a command on every host of a pretended cluster, and say what crossed the link."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster",
        description="Run a command on several pretended machines of this one.",
        epilog="Example: python -m tests.cluster --hosts 2 --ranks 2 -- python train.py",
    )
    parser.add_argument("--hosts", type=int, default=2, help="machines (default 2)")
    parser.add_argument("--ranks", type=int, default=1, help="processes on each (default 1)")
    parser.add_argument(
        "--rate", default="1gbit", help="of each connection, or none (default 1gbit)"
    )
    parser.add_argument("--shm", default="1g", help="size of each /dev/shm (default 1g)")
    parser.add_argument("--own-names", action="store_true", help="host names host0, host1, …")
    parser.add_argument("--plain", action="store_true", help="no torchrun, only its environment")
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path, help="write what crossed the link there")
    parser.add_argument("command", nargs="+", help="after --: program and arguments")
    args = parser.parse_args()
    if args.hosts < 2 or args.ranks < 1:
        parser.error("--hosts: two or more, --ranks: one or more")
    rate = None if args.rate == "none" else args.rate
    if (reason := why_impossible(args.hosts)) is not None:
        parser.exit(_USAGE, f"{reason}\n")
    try:
        with Cluster(args.hosts, rate, args.shm, args.own_names) as cluster:
            start = cluster.plain if args.plain else cluster.torchrun
            began = time.monotonic()
            run = start(args.command, args.ranks, {})
            statuses = run.wait(args.time_limit, say=_say)
            _report(run, time.monotonic() - began, args.json)
    except ClusterError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted")
    if failed := {label: status for label, status in statuses.items() if status}:
        sys.exit(f"failed, exit status: {failed}")


def _say(label: str, line: str) -> None:
    print(f"{label} | {line}", flush=True)  # noqa: T201


def _report(run: Run, seconds: float, path: Path | None) -> None:
    traffic = run.traffic()
    _say("link", f"{seconds:.1f} s")
    for number, (sent, received, wire) in enumerate(traffic):
        _say("link", f"host {number} sent {sent:,} bytes ({wire:,} with all headers)"
             f" and received {received:,}")  # fmt: skip
    if path is not None:
        rows = [one._asdict() for one in traffic]
        path.write_text(json.dumps({"seconds": seconds, "hosts": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
