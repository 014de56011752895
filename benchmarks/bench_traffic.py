"""Messages and bytes between ranks: counted, beside what the formulas say.

    python benchmarks/bench_traffic.py --json benchmarks/results/traffic.json

Two, three and four ranks iterate over random ids and over a sampled graph, whose rows are dealt out
at random. Formulas (`traffic_formulas.py`) and counts have to agree within 2 %. No times are taken.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import traffic_ranks
from ranks import Ranks
from records import write_json
from traffic_formulas import Expected, Load, per_step
from traffic_ranks import Case, Counted

from featsync.exchange.traffic import Amount

TOLERANCE = 0.02
SMALL = {"rows": 20_000, "batch": 3_000, "steps": 6}
SMALL_GRAPH = {"rows": 20_000, "batch": 100, "steps": 6}


def cases(is_smoke: bool) -> Iterator[Case]:
    """What is counted."""
    random = Case("random", 2)
    graph = Case("sampled", 2, batch=500)
    if is_smoke:
        random, graph = replace(random, **SMALL), replace(graph, **SMALL_GRAPH)
    widths = (16,) if is_smoke else (8, 128)
    for case, ranks, width in itertools.product((random, graph), (2, 3, 4), widths):
        yield replace(case, ranks=ranks, width=width)
    for case in (random, graph):
        yield replace(case, ranks=3, cache=case.rows // 10)
        yield replace(case, ranks=4, transport="shared_memory")
        yield replace(case, ranks=4, hosts=2, transport="shared_memory")
    # Few rows of many, so that ids do not compress; and many of few.
    yield replace(random, ranks=2, batch=random.rows // 200)
    yield replace(random, ranks=2, batch=random.rows // 2)


def compare(case: Case, counted: Sequence[Counted]) -> dict[str, Any]:
    """Hold counts of all ranks against the formulas; both a step and rank."""
    steps = sum(one.steps for one in counted)
    wanted = sum(one.wanted for one in counted)
    remote = sum(one.remote for one in counted)
    load = Load(
        ranks=case.ranks,
        hosts=case.hosts,
        transport=case.transport,
        batch_rows=wanted / steps,
        remote_share=remote / wanted,
        part_rows=case.rows / case.ranks,
        row_bytes=4 * case.width,
        has_cache=case.cache > 0,
        hit_share=sum(one.hits for one in counted) / (remote or 1),
    )
    expected = per_step(load)
    kinds = ("announce", "order", "sent", "rows")
    row: dict[str, Any] = {
        "case": asdict(case),
        "load": asdict(load),
        "wrong_rows": sum(one.wrong_rows for one in counted),
    }
    for side in ("sent", "received"):
        amounts = {
            kind: [getattr(one.traffic, side).get(kind, Amount()) for one in counted]
            for kind in kinds
        }
        row[side] = {
            kind: {
                "messages": sum(one.messages for one in found) / steps,
                "bytes": sum(one.num_bytes for one in found) / steps,
            }
            for kind, found in amounts.items()
        }
    row["expected"] = {kind: expected.get(kind, Expected(0, 0))._asdict() for kind in kinds}
    row["off"] = max(_off(row, "sent"), _off(row, "received"))
    return row


def _off(row: dict[str, Any], side: str) -> float:
    """How far the sums of messages and of bytes are from what was expected."""
    counted, expected = row[side].values(), row["expected"].values()
    pairs = (
        (sum(one["messages"] for one in counted), sum(one["messages"] for one in expected)),
        (sum(one["bytes"] for one in counted), sum(one["num_bytes"] for one in expected)),
    )
    return max(abs(found - wanted) / max(wanted, 1e-9) if found else 0.0 for found, wanted in pairs)


def report(row: dict[str, Any]) -> None:
    """Print one case."""
    case, load = row["case"], row["load"]
    print(
        f"{case['ids']} ids, {case['ranks']} ranks on {case['hosts']} hosts, {case['transport']}, "
        f"width {case['width']}, {load['batch_rows']:,.0f} rows a minibatch"
        f"{', cache' * load['has_cache']}: off by {row['off']:.2%}, wrong rows {row['wrong_rows']}"
    )
    for kind, wanted in row["expected"].items():
        sent = row["sent"][kind]
        print(
            f"  {kind:9} messages {sent['messages']:6.2f} of {wanted['messages']:6.2f}, "
            f"bytes {sent['bytes']:12,.0f} of {wanted['num_bytes']:12,.0f}",
            flush=True,
        )


def main() -> None:
    """Parse the command line, count, and fail if formulas and counts disagree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="small sizes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for num_ranks in (2, 3, 4):
        with Ranks(num_ranks) as ranks:
            for case in (case for case in cases(args.smoke) if case.ranks == num_ranks):
                rows.append(compare(case, ranks.call(traffic_ranks.count, case)))
                report(rows[-1])
    write_json(args.json, rows)
    if any(row["off"] > TOLERANCE or row["wrong_rows"] for row in rows):
        sys.exit("formulas and counts disagree, or rows are wrong")


if __name__ == "__main__":
    main()
