"""From measurements to the JSON with fixed keys, and from that to tables for the terminal.

``exposed_s`` is an epoch minus the floor, ``wait_s`` the time in ``next()`` minus the floor's; the
floor is the fastest epoch without features of any configuration. Sampling takes longer in one epoch
than in another, features or not: ``exposed_usual_s`` is an epoch minus the median floor.

CPU seconds are those of all ranks together, wall seconds those of the slowest rank. Rows and bytes
are totals of the timed epochs, of which the base has more than the others, since each of them is
paired with its own run of the base.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from rich.table import Table

from featsync.bench.driver import Options, Results, Sample
from featsync.bench.protocol import EpochReport

SCHEMA = 1
_SOURCES = ("host", "cache", "peer")
Measure = Callable[[Sample], float]


def to_json(
    results: Results, options: Options, environment: dict[str, object], command: str
) -> dict[str, Any]:
    """Make the report; see `featsync.bench.report` for what its numbers mean."""
    floor = results.floor
    measures: dict[str, Measure] = {
        "epoch": lambda sample: sample.epoch_s,
        "cpu": lambda sample: sample.cpu_s,
        "exposed": lambda sample: sample.epoch_s - floor.epoch_s,
        "wait": lambda sample: sample.next_s - floor.next_s,
        "exposed_usual": lambda sample: sample.epoch_s - results.usual_floor_s,
    }
    ratio = {
        name: {what: _ratio(pairs, measure) for what, measure in measures.items()}
        for name, pairs in results.pairs.items()
    }
    against_itself = ratio.pop(results.base)
    return {
        "schema": SCHEMA,
        "command": command,
        "environment": environment,
        "workload": results.workload | _how(options),
        "runs": [_run(results, name, options.ranks, measures) for name in results.names],
        "floor_s": floor.epoch_s,
        "noise": {what: _spread(against_itself[what]) for what in ("epoch", "cpu")},
        "ratio": ratio,
        "base": results.base,
        "base_against_itself": against_itself,
        "floor": {
            "next_s": floor.next_s,
            "cpu_s": floor.cpu_s,
            "epoch_s": [sample.epoch_s for sample in results.floors],
        },
    }


def tables(report: dict[str, Any]) -> list[Table]:
    """Lay out a report: seconds with wrong rows beside them, ratios, and the choices made."""
    choices = [_choices_table(report)] if any(run["why"] for run in report["runs"]) else []
    return [_seconds_table(report), _ratio_table(report), *choices]


def wrong_rows(report: dict[str, Any]) -> int:
    """Rows that differed from their table, of all configurations."""
    return sum(run["wrong_rows"] for run in report["runs"])


def _how(options: Options) -> dict[str, object]:
    step: object = options.model
    if options.simulated is not None:
        step = f"simulated, {options.simulated.seconds * 1000:g} ms"
        if options.simulated.python_share:
            step += f", Python busy for {options.simulated.python_share:g} of it"
    return {
        "model": step,
        "ranks": options.ranks,
        "epochs": options.epochs,
        "pairs": options.pairs,
    }


def _run(results: Results, name: str, ranks: int, measures: dict[str, Measure]) -> dict[str, Any]:
    samples = results.samples[name]
    timed = _reports(samples)
    # The base's twin is the same configuration: what it got wrong counts as well.
    twin = _reports(pair[1] for pair in results.pairs.get(name, ()) if name == results.base)
    warm_up = results.warm_ups[name]
    rows = {source: sum(report.rows[source] for report in timed) for source in _SOURCES}
    total = sum(rows.values())
    checks = [report.check for report in (*timed, *twin, *warm_up)]
    return {
        "config": name,
        "ranks": ranks,
        **{f"{what}_s": [measure(one) for one in samples] for what, measure in measures.items()},
        "timed_epochs": sum(len(sample.epochs) for sample in samples),
        "rows": total,
        "bytes": {source: sum(report.num_bytes[source] for report in timed) for source in _SOURCES},
        "hit_rate": rows["cache"] / total if total else 0.0,
        "wrong_rows": sum(check.wrong for check in checks),
        "checked_rows": sum(check.checked for check in checks),
        "transport": timed[0].transport,
        "why": timed[0].why,
        "minibatches": [report.minibatches for report in samples[0].epochs[0]],
        "stages_s": _mean_stages(timed),
    }


def _reports(samples: Iterable[Sample]) -> list[EpochReport]:
    return [report for sample in samples for epoch in sample.epochs for report in epoch]


def _mean_stages(reports: list[EpochReport]) -> dict[str, float]:
    return {
        name: statistics.mean(report.stages[name] for report in reports)
        for name in reports[0].stages
    }


def _ratio(pairs: list[tuple[Sample, Sample]], measure: Measure) -> dict[str, float | None]:
    """Other by base, pair by pair; pairs whose base had nothing to measure are left out."""
    ratios = [measure(other) / measure(base) for base, other in pairs if measure(base) > 0]
    if not ratios:
        return {"median": None, "min": None, "max": None}
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def _spread(ratio: dict[str, float | None]) -> float | None:
    if ratio["min"] is None or ratio["max"] is None:
        return None
    return ratio["max"] - ratio["min"]


def _seconds_table(report: dict[str, Any]) -> Table:
    table = Table(title=f"Median of an epoch; floor without features {report['floor_s']:.3f} s")
    table.add_column("configuration")
    for column in (
        "epoch s",
        "CPU s",
        "exposed s",
        "wait s",
        "MB from host",
        "hit rate",
        "wrong rows",
    ):
        table.add_column(column, justify="right")
    for run in report["runs"]:
        seconds = [
            f"{statistics.median(run[name]):.3f}"
            for name in ("epoch_s", "cpu_s", "exposed_s", "wait_s")
        ]
        wrong = f"{run['wrong_rows']:,} of {run['checked_rows']:,}"
        table.add_row(
            run["config"],
            *seconds,
            f"{run['bytes']['host'] / run['timed_epochs'] / 1e6:,.0f}",
            f"{run['hit_rate']:.3f}",
            f"[bold red]{wrong}[/]" if run["wrong_rows"] else wrong,
        )
    return table


def _ratio_table(report: dict[str, Any]) -> Table:
    pairs = report["workload"]["pairs"]
    table = Table(title=f"Ratio to {report['base']}: median (least to most) of {pairs} pairs")
    table.add_column("configuration")
    for column in ("epoch", "CPU", "exposed", "wait"):
        table.add_column(column, justify="right")
    rows = {**report["ratio"], f"{report['base']} again": report["base_against_itself"]}
    for name, ratio in rows.items():
        table.add_row(name, *(_cell(ratio[what]) for what in ("epoch", "cpu", "exposed", "wait")))
    return table


def _choices_table(report: dict[str, Any]) -> Table:
    table = Table(title="What was chosen")
    for column in ("configuration", "feature", "transport", "why"):
        table.add_column(column)
    for run in report["runs"]:
        for feature, why in run["why"].items():
            table.add_row(run["config"], feature, run["transport"][feature], why)
    return table


def _cell(ratio: dict[str, float | None]) -> str:
    if ratio["median"] is None:
        return "nothing to compare"
    return f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"
