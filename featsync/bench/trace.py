"""The trainer's time as a chrome trace: one process a configuration, one thread a rank."""

from __future__ import annotations

from typing import Any

from featsync.bench.driver import Results


def to_trace(results: Results) -> dict[str, Any]:
    """Lay out the last timed epoch of each configuration; open it in a trace viewer."""
    events: list[dict[str, Any]] = []
    for lane, name in enumerate(results.names):
        events.append(_name("process_name", lane, 0, name))
        for rank, report in enumerate(results.samples[name][-1].epochs[-1]):
            events.append(_name("thread_name", lane, rank, f"rank {rank}"))
            start = report.marks[0][0] if report.marks else 0.0
            for index, (asked, came, done) in enumerate(report.marks):
                events.append(_span("next", lane, rank, asked - start, came - asked, index))
                events.append(_span("step", lane, rank, came - start, done - came, index))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _name(kind: str, lane: int, rank: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": lane, "tid": rank, "args": {"name": name}}


def _span(
    name: str, lane: int, rank: int, start_s: float, length_s: float, minibatch: int
) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": lane,
        "tid": rank,
        "ts": start_s * 1e6,
        "dur": length_s * 1e6,
        "args": {"minibatch": minibatch},
    }
