"""The README's table of rows that every step trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from report_cells import ratio


def dynamic(rows: list[dict[str, Any]]) -> Iterator[str]:
    """One line a workload."""
    yield (
        "**Rows that every step trains**, 2 ranks, Adagrad, 1M rows, 50,000 ids of a power law a "
        "step and rank (`python benchmarks/bench_dynamic.py`): ms a step; *exposed* is above a "
        "step that neither reads nor updates."
    )
    yield ""
    yield (
        "| width | device busy ms (simulated) | NodeEmbedding | featsync inline | featsync | alone "
        "| / NodeEmbedding | / alone | exposed / inline's | rows read again | tables differ by |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        ms = [1e3 * row["step_s"][name] for name in _NAMES]
        found = [row[name] for name in ("of_node_embedding", "of_alone", "exposed_of_inline")]
        yield (
            f"| {row['width']} | {row['busy_ms']:g} | {' | '.join(f'{value:.0f}' for value in ms)} "
            f"| {' | '.join(map(ratio, found))} | {row['patched']:.0%} "
            f"| {max(row['apart'].values()):.1g} |"
        )
    yield ""


_NAMES = ("NodeEmbedding", "featsync inline", "featsync", "alone")
