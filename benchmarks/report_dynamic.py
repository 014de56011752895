"""The README's table of rows that every step trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from report_cells import ratio


def dynamic(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line a workload."""
    if not rows:
        return
    yield (
        "**Rows that every step trains**, 2 ranks, Adagrad, 50,000 ids of a power law a step and "
        "rank (`python benchmarks/bench_dynamic.py`): ms a step; *exposed* is above a step that "
        "neither reads nor updates."
    )
    yield ""
    yield (
        "| rows | width | device busy ms (simulated) | NodeEmbedding | featsync inline | featsync "
        "| alone | / NodeEmbedding | / alone | exposed / inline's | rows read again "
        "| tables differ by |"
    )
    yield "|---" * 12 + "|"
    for row in rows:
        ms = [1e3 * row["step_s"][name] for name in _NAMES]
        found = [row[name] for name in ("of_node_embedding", "of_alone", "exposed_of_inline")]
        times = " | ".join(f"{value:.0f}" for value in ms)
        yield (
            f"| {row['rows']:,} | {row['width']} | {row['busy_ms']:g} | {times} "
            f"| {' | '.join(map(ratio, found))} | {row['patched']:.0%} "
            f"| {max(row['apart'].values()):.1g} |"
        )
    yield ""


def dynamic_link(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line a device and way."""
    yield (
        "**Rows that every step trains, on two pretended machines** over a link of 1 Gbit/s, one "
        "rank on each, Adagrad, 200,000 rows of 512 bytes, each machine half of them. *Best* is "
        "the longer of the device's time (simulated) and that of the rows that travel beside it, "
        "and the time of those that cannot: gradients, and rows that changed since they were read "
        "(`python benchmarks/bench_dynamic_link.py`):"
    )
    yield ""
    yield (
        "| device busy ms | rows a step and rank | of the other machine | read again | best, ms "
        "| configuration | step, ms | / best | MB sent a step | / rows sent | tables differ by |"
    )
    yield "|---" * 11 + "|"
    for row in rows:
        numbers = " | ".join(f"{row[name]:,.0f}" for name in ("ids", "early_rows", "rows_again"))
        for name, way in row["ways"].items():
            low, high = (1e3 * seconds for seconds in way["step_range"])
            yield (
                f"| {row['busy_ms']:g} | {numbers} | {1e3 * row['best_s']:.0f} | {name} "
                f"| {1e3 * way['step_s']:.0f} ({low:.0f} to {high:.0f}) | {way['of_best']:.2f} "
                f"| {way['sent'] / 1e6:.2f} | {way['of_planned']:.3f} | {row['apart']:g} |"
            )
    yield ""


_NAMES = ("NodeEmbedding", "featsync inline", "featsync", "alone")
