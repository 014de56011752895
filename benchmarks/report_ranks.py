"""Tables of what happens between ranks: split tables, transports, the link, traffic, waking."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from report_cells import ranged, ratio

Row = dict[str, Any]


def partitioned(reports: Mapping[str, Any]) -> Iterator[str]:
    """The two tables of featsync beside the obvious program; reports by name."""
    rows = [row for report in reports.values() for row in report["rows"]]
    rows.sort(key=lambda row: (row["ranks"], row["width"]))
    if any(row["part"] == "model" for row in rows):
        yield from _beside_a_model([row for row in rows if row["part"] == "model"])
    if any(row["part"] == "busy" for row in rows):
        yield from _beside_a_device([row for row in rows if row["part"] == "busy"])


def _beside_a_model(rows: list[Row]) -> Iterator[str]:
    yield (
        "**A table split over ranks, while a model is trained.** Rows hashed over the ranks of "
        "this machine, `synthetic` with 1M nodes (0.3M at width 512), batches of 1,024, fanouts "
        "10-10-10; GraphSAGE on the CPU. Beside the obvious program, which exchanges ids and rows "
        "by all_to_all when it needs them (`pipelines/all_to_all.py`). Pipelines take turns over "
        "one table; ratios are to that program, round by round: median (least to most) "
        "(`python benchmarks/bench_partitioned.py`):"
    )
    yield ""
    yield (
        "| ranks | width | configuration | epoch s | CPU s | epoch ratio | CPU ratio | wrong rows |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        for name in row["epoch_s"]:
            compared = name in row["epoch_ratio"]
            ratios = [
                ratio(row[f"{what}_ratio"][name]) if compared else "" for what in ("epoch", "cpu")
            ]
            times = [median(row[f"{what}_s"][name]) for what in ("epoch", "cpu")]
            yield (
                f"| {row['ranks']} | {row['width']} | {_named(name, row)} | {times[0]:.2f} "
                f"| {times[1]:.2f} | {ratios[0]} | {ratios[1]} | {row['wrong_rows']} |"
            )
    yield ""


def _beside_a_device(rows: list[Row]) -> Iterator[str]:
    yield (
        "**The same beside a busy device** (simulated). What features cost: the mean of the "
        "differences between an epoch and the one without features next to it; and that as a "
        "share of the obvious program's, with the 90 % interval of a bootstrap over rounds:"
    )
    yield ""
    yield (
        "| ranks | width | step, ms | minibatches | configuration | exposed s an epoch "
        "| share of all_to_all's | wrong rows |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        for name, share in row["share_of_naive"].items():
            yield (
                f"| {row['ranks']} | {row['width']} | {row['step_ms']} | {row['minibatches']} "
                f"| {_named(name, row)} | {row['exposed_s'][name]:.2f} "
                f"| {ranged(share['all'], share['low'], share['high'], digits=3)} "
                f"| {row['wrong_rows']} |"
            )
    yield ""


def _named(name: str, row: Row) -> str:
    if name == "auto":
        return f"auto ({'+'.join(transport for transport, _ in row['auto'].values())})"
    return f"*{name}*" if name == "no features" else name


def transports(rows: list[Row]) -> Iterator[str]:
    """The table of transports alone."""
    yield (
        "**Transports alone**, between two ranks of this machine: speed as a share of raw isend "
        "and irecv of as many bytes (`p2p`: until rows are in a buffer; and where they belong), "
        "and of `index_select(out=)` from the peer's memory (`shared_memory`: a minibatch's moves; "
        "and those where other machines hold the rest) (`python benchmarks/bench_transports.py`):"
    )
    yield ""
    yield (
        "| rows | bytes a row | raw, ms | p2p, landed | p2p, in place | `index_select`, ms "
        "| shared_memory | scattered | bytes an id | ids' share of all bytes | wrong rows |"
    )
    yield "|---" * 11 + "|"
    for row in rows:
        raw, select = (1e3 * median(row["seconds"][name]) for name in ("raw", "select"))
        landed, in_place, memory, scattered = (
            ratio(row["speed"][way]) for way in ("landed", "in place", "memory", "scattered")
        )
        yield (
            f"| {row['rows']:,} | {4 * row['width']:,} | {raw:.2f} | {landed} | {in_place} "
            f"| {select:.2f} | {memory} | {scattered} | {row['bytes_an_id']:.2f} "
            f"| {row['share_of_ids']:.2%} | {row['wrong_rows']} |"
        )
    yield ""


def transports_link(rows: list[Row]) -> Iterator[str]:
    """The table of the transport between machines alone."""
    yield (
        "**`p2p` over a link of limited rate** between two pretended machines: speed as a share of "
        "raw isend and irecv of as many bytes, until rows are in a buffer; and where they belong "
        "(`python benchmarks/bench_transports_link.py`):"
    )
    yield ""
    yield (
        "| link | rows | bytes a row | raw, ms | p2p, landed | p2p, in place | bytes an id "
        "| ids' share of all bytes | wrong rows |"
    )
    yield "|---" * 9 + "|"
    for row in rows:
        landed, in_place = (ratio(row["speed"][way]) for way in ("landed", "in place"))
        yield (
            f"| {row['rate']} | {row['rows']:,} | {4 * row['width']:,} "
            f"| {1e3 * median(row['seconds']['raw']):.2f} | {landed} | {in_place} "
            f"| {row['bytes_an_id']:.2f} | {row['share_of_ids']:.2%} | {row['wrong_rows']} |"
        )
    yield ""


def link(rows: list[Row]) -> Iterator[str]:
    """The table of steps over a link of limited rate."""
    yield (
        "**Over a link of 1 Gbit/s** between two pretended machines, one rank on each, beside a "
        "busy device (simulated), half of the rows on the other machine. *Best* is the longer of "
        "the device's time and bytes ÷ rate: bytes as a cable carries them, as the network device "
        "counts them, or as planned, rows and ids alone. Medians (least to most) over rounds, of "
        "the slower rank (`python benchmarks/bench_link.py`):"
    )
    yield ""
    yield (
        "| device, ms | step, ms | CPU, ms | / best, by bytes on a cable | counted | planned "
        "| bytes / planned | wrong rows |"
    )
    yield "|---" * 8 + "|"
    for row in rows:
        times = " | ".join(f"{1e3 * row[f'{what}_s']:.1f}" for what in ("device", "step", "cpu"))
        ratios = " | ".join(
            ranged(row[name], *row["range"][name], digits=3)
            for name in ("ratio_wire", "ratio_sent", "ratio_planned")
        )
        yield f"| {times} | {ratios} | {row['bytes_ratio']:.4f} | {row['wrong_rows']} |"
    yield ""


def wake(rows: list[Row]) -> Iterator[str]:
    """The table of how long it takes to wake another process."""
    yield (
        "**Waking another process** of this machine: from telling it to the end of its wait; "
        "*poll* looks every half millisecond (`python benchmarks/bench_wake.py`):"
    )
    yield ""
    yield "| way | median, µs | target | p99, µs | most, µs | CPU, µs a wait |"
    yield "|---" * 6 + "|"
    for row in rows:
        target = f"{row['target_us']:.0f}" if "target_us" in row else ""
        yield (
            f"| {row['way']} | {row['median_us']:.1f} | {target} | {row['p99_us']:.1f} "
            f"| {row['max_us']:,.0f} | {row['cpu_us']:.1f} |"
        )
    yield ""


def traffic(rows: list[Row]) -> Iterator[str]:
    """The table of messages and bytes, counted and by formula."""
    yield (
        "**Messages and bytes** that a rank sends a step, counted, and what the formulas "
        "(benchmarks/README.md) say of them (`python benchmarks/bench_traffic.py`):"
    )
    yield ""
    yield (
        "| ids | ranks | machines | transport | bytes a row | rows wanted | cached | messages "
        "| bytes of ids | of rows | of the rest | formula off by | wrong rows |"
    )
    yield "|---" * 13 + "|"
    for row in rows:
        case, load, sent = row["case"], row["load"], row["sent"]
        rest = sum(sent[kind]["bytes"] for kind in ("order", "sent"))
        messages = sum(of_kind["messages"] for of_kind in sent.values())
        yield (
            f"| {case['ids']} | {case['ranks']} | {case['hosts']} | {case['transport']} "
            f"| {load['row_bytes']} | {load['batch_rows']:,.0f} | {load['hit_share']:.0%} "
            f"| {messages:.1f} | {sent['announce']['bytes']:,.0f} | {sent['rows']['bytes']:,.0f} "
            f"| {rest:,.0f} | {row['off']:.2%} | {row['wrong_rows']} |"
        )
    yield ""
