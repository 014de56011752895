"""Write the results in ``benchmarks/results`` into the README's table, each with its command.

python benchmarks/report.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import report_ranks
from report_cells import ranged, ratio
from report_dynamic import dynamic, dynamic_link
from report_host_cache import host_cache, host_cache_link

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN = "<!-- results: benchmarks/report.py writes from here -->"
END = "<!-- results: to here -->"


Row = dict[str, Any]


def pipeline_rows(name: str, report: dict[str, Any]) -> Iterator[str]:
    """One line a configuration of one `featsync bench` report."""
    noise = report["base_against_itself"]
    floors = report["floor"]["epoch_s"]
    yield (
        f"| {name} | *no features* ({min(floors):.2f} to {max(floors):.2f}) "
        f"| {median(floors):.2f} | | | | | | | |"
    )
    for run in report["runs"]:
        config = run["config"]
        is_base = config == report["base"]
        ratios = noise if is_base else report["ratio"][config]
        label = f"{config} (against itself)" if is_base else config
        yield (
            f"| {name} | {label} | {median(run['epoch_s']):.2f} | {median(run['cpu_s']):.2f} "
            f"| {median(run['exposed_s']):.2f} | {ratio(ratios['epoch'])} | {ratio(ratios['cpu'])} "
            f"| {ratio(ratios['exposed'])} | {run['hit_rate']:.2f} | {run['wrong_rows']} |"
        )


def pipelines(reports: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The table of whole pipelines, and the command of each run."""
    if not reports:
        return
    yield "**Whole pipelines.** Ratios are to stock, pair by pair: median (least to most)."
    yield ""
    yield (
        "| run | configuration | epoch s | CPU s | exposed s | epoch ratio | CPU ratio "
        "| exposed ratio | hit rate | wrong rows |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, report in reports.items():
        yield from pipeline_rows(name, report)
    yield ""
    for name, report in reports.items():
        yield f"- {name}: `{report['command']}`"
    yield ""
    yield environment(next(iter(reports.values()))["environment"])
    yield ""


def gathers(rows: list[Row]) -> Iterator[str]:
    """The table of gathering alone."""
    yield (
        "**Gathering alone**, 1M x 128 float32, one core, ns of CPU a row "
        "(`python benchmarks/bench_gather.py`):"
    )
    yield ""
    yield (
        "| batch rows | stock | stock, tuned allocator | featsync | `index_select(out=)`, warm "
        "| / stock | / tuned | / warm | wrong rows |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        times = " | ".join(
            f"{row[f'{lane}_ns']:.0f}" for lane in ("stock", "stock_tuned", "featsync", "warm")
        )
        ratios = " | ".join(
            ranged(row[f"ratio_{base}"], *row[f"ratio_{base}_range"])
            for base in ("stock", "stock_tuned", "warm")
        )
        yield f"| {row['batch_rows']:,} | {times} | {ratios} | {row['wrong_rows']} |"
    yield ""


def exposed(rows: list[Row]) -> Iterator[str]:
    """The table of what features cost beside a busy device."""
    yield (
        "**Beside a busy device** (simulated: each step takes so long, and Python is busy for the "
        "share after the colon), the same graph. Mean of the differences between an epoch and the "
        "one without features next to it, and that as a share of stock's, with the 90 % interval "
        "of a bootstrap over rounds (`python benchmarks/bench_exposed.py`):"
    )
    yield ""
    yield (
        "| step, ms | loader workers | minibatches | configuration | exposed s an epoch "
        "| share of stock's | wrong rows |"
    )
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        for name, share in row["share_of_stock"].items():
            yield (
                f"| {row['step']} | {row['num_workers']} | {row['minibatches']} | {name} "
                f"| {row['exposed_s'][name]:.2f} "
                f"| {ranged(share['all'], share['low'], share['high'], digits=3)} "
                f"| {row['wrong_rows']} |"
            )
    yield ""


def memory(rows: list[Row]) -> Iterator[str]:
    """The table of memory."""
    yield (
        "**Memory** above the table, in minibatches of rows, and after 20 epochs, half of them "
        "left early (`python benchmarks/bench_memory.py`):"
    )
    yield ""
    yield "| lane | peak | MB, threads, descriptors after 2 epochs | after 20 | wrong rows |"
    yield "|---|---|---|---|---|"
    for row in rows:
        ends = " | ".join(
            f"{end['resident_bytes'] / 2**20:.0f}, {end['threads']}, {end['descriptors']}"
            for end in (row["after"][1], row["after"][-1])
        )
        yield f"| {row['lane']} | {row['peak_batches']:.2f} | {ends} | {row['wrong_rows']} |"
    yield ""


def planning(rows: list[Row]) -> Iterator[str]:
    """The table of planning cost: the slowest cell of each table size and order."""
    yield (
        "**Planning** on one core, million ids a second: least and most over windows and caches; "
        "*shared* is the cache of a machine, for two ranks (`python benchmarks/bench_planning.py`):"
    )
    yield ""
    yield "| cache | table rows | order of ids | least | most | target | bytes a row, slot, id |"
    yield "|---|---|---|---|---|---|---|"
    cells: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["policy"], row["rows"], row["order"]), []).append(row)
    for (policy, num_rows, order), found in cells.items():
        speeds = [row["million_ids_per_s"] for row in found]
        state = ", ".join(f"{value:.1f}" for value in found[0]["bytes"].values())
        target = found[0]["target"]
        yield (
            f"| {policy} | {num_rows:,} | {order} | {min(speeds):.1f} | {max(speeds):.1f} "
            f"| {'' if target is None else f'{target:.0f}'} | {state} |"
        )
    yield ""


def retention(rows: list[Row]) -> Iterator[str]:
    """The table of hit rates."""
    windows = sorted({row["window"] for row in rows if row["policy"] == "window"})
    yield (
        "**Hit rates** on id traces recorded with `featsync record`, the second half counted "
        "(`python benchmarks/bench_retention.py --trace ...`). `window` by lookahead, counted use:"
    )
    yield ""
    columns = ["trace", "cache", "LRU", "static", *(f"K={k}" for k in windows), "Belady, offline"]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    cells: dict[tuple[str, float], dict[tuple[str, int], float]] = {}
    for row in rows:
        if "given" not in row["score"]:
            cell = cells.setdefault((row["trace"], row["cache"]), {})
            cell[row["policy"], row["window"]] = row["hit_rate"]
    for (trace, cache), rates in cells.items():
        by_policy = {policy: rate for (policy, _), rate in rates.items()}
        shown = [by_policy["lru"], by_policy["static"]]
        shown += [rates["window", window] for window in windows]
        shown.append(by_policy["belady"])
        name = trace.split(".npz")[0]
        yield f"| {name} | {cache:.0%} | {' | '.join(f'{rate:.3f}' for rate in shown)} |"
    yield ""


def environment(facts: dict[str, Any]) -> str:
    """One line about the machine."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"Measured on {facts['cpu']}, {facts['cores']} cores, {facts['threads']} thread a process, "
        f"{facts['platform']}, with {versions}; commit {facts['commit'][:7]}."
    )


def tables(results: Path) -> Iterator[str]:
    """All tables whose results are there."""
    reports = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}

    def of_file(name: str, table: Callable[[list[Row]], Iterator[str]]) -> Iterator[str]:
        if name in reports:
            yield from table(reports[name]["rows"])

    yield from of_file("gather", gathers)
    yield from pipelines({name: report for name, report in reports.items() if "ratio" in report})
    yield from of_file("exposed", exposed)
    yield from report_ranks.partitioned(
        {name: report for name, report in reports.items() if name.startswith("partitioned_")}
    )
    yield from of_file("transports", report_ranks.transports)
    yield from of_file("transports_link", report_ranks.transports_link)
    yield from of_file("link", report_ranks.link)
    yield from of_file("traffic", report_ranks.traffic)
    yield from of_file("wake", report_ranks.wake)
    yield from of_file("planning", planning)
    yield from of_file("retention", retention)
    yield from of_file("host_cache", host_cache)
    yield from of_file("host_cache_link", host_cache_link)
    sizes = [reports[name]["rows"] for name in ("dynamic", "dynamic_large") if name in reports]
    yield from dynamic([row for rows in sizes for row in rows])
    yield from of_file("dynamic_link", dynamic_link)
    yield from of_file("memory", memory)


def main() -> None:
    """Replace what stands between the two marks."""
    lines = tables(HERE / "results")
    body = "\n".join([BEGIN, "", *lines, END])
    text = README.read_text()
    README.write_text(
        re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: body, text, flags=re.S)
    )


if __name__ == "__main__":
    main()
