"""Write the results in ``benchmarks/results`` into the README's table, each with its command.

python benchmarks/report.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN = "<!-- results: benchmarks/report.py writes from here -->"
END = "<!-- results: to here -->"


def ratio(values: dict[str, float | None]) -> str:
    """Median and range of a ratio."""
    if values["median"] is None:
        return "-"
    return f"{values['median']:.2f} ({values['min']:.2f} to {values['max']:.2f})"


def pipeline_rows(name: str, report: dict[str, Any]) -> Iterator[str]:
    """One line a configuration of one `featsync bench` report."""
    noise = report["base_against_itself"]
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


def pipelines(results: Path) -> Iterator[str]:
    """The table of whole pipelines, and the command of each run."""
    reports = {
        path.stem: report
        for path in sorted(results.glob("*.json"))
        if "ratio" in (report := json.loads(path.read_text()))
    }
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


def gathers(results: Path) -> Iterator[str]:
    """The table of gathering alone."""
    path = results / "gather.json"
    if not path.exists():
        return
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
    for row in json.loads(path.read_text())["rows"]:
        times = " | ".join(
            f"{row[f'{lane}_ns']:.0f}" for lane in ("stock", "stock_tuned", "featsync", "warm")
        )
        ratios = " | ".join(
            f"{row[f'ratio_{base}']:.2f} ({row[f'ratio_{base}_range'][0]:.2f} to "
            f"{row[f'ratio_{base}_range'][1]:.2f})"
            for base in ("stock", "stock_tuned", "warm")
        )
        yield f"| {row['batch_rows']:,} | {times} | {ratios} | {row['wrong_rows']} |"
    yield ""


def memory(results: Path) -> Iterator[str]:
    """The table of memory."""
    path = results / "memory.json"
    if not path.exists():
        return
    yield (
        "**Memory** above the table, in minibatches of rows, and after 20 epochs, half of them "
        "left early (`python benchmarks/bench_memory.py`):"
    )
    yield ""
    yield "| lane | peak | MB, threads, descriptors after 2 epochs | after 20 | wrong rows |"
    yield "|---|---|---|---|---|"
    for row in json.loads(path.read_text())["rows"]:
        ends = " | ".join(
            f"{end['resident_bytes'] / 2**20:.0f}, {end['threads']}, {end['descriptors']}"
            for end in (row["after"][1], row["after"][-1])
        )
        yield f"| {row['lane']} | {row['peak_batches']:.2f} | {ends} | {row['wrong_rows']} |"
    yield ""


def environment(facts: dict[str, Any]) -> str:
    """One line about the machine."""
    return "Measured with " + ", ".join(f"{key} {value}" for key, value in facts.items()) + "."


def main() -> None:
    """Replace what stands between the two marks."""
    results = HERE / "results"
    lines = [*gathers(results), *pipelines(results), *memory(results)]
    body = "\n".join([BEGIN, "", *lines, END])
    text = README.read_text()
    README.write_text(
        re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: body, text, flags=re.S)
    )


if __name__ == "__main__":
    main()
