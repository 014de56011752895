"""Tables of `bench_host_cache.py` and `bench_host_cache_link.py` for the README."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]

_SHOWN_CACHE = 0.1


def host_cache(rows: list[Row]) -> Iterator[str]:
    """Rows over the link as counted, and what splits cost."""
    yield (
        "**One cache for a machine**, counted on ids that GraphBolt sampled (fanouts 10-10-5, 256 "
        "seeds a rank, two machines of two ranks, rows assigned at random, window 8; the second "
        "half of 60 steps; `python benchmarks/bench_host_cache.py`). Rows over the link, as a "
        "share of those wanted from there; *dedup*: what two ranks lack in one step counts once:"
    )
    yield ""
    columns = ["ids", "cache a rank", "LRU", "+ dedup", "window", "+ dedup", "one cache"]
    columns += ["/ LRU (target)", "/ window + dedup (target)", "saved by dedup, window, sharing"]
    yield from _head(columns)
    for row in (row for row in rows if row["table"] == "sources"):
        shares = " | ".join(f"{share:.3f}" for share in row["shares"].values())
        ratios = " | ".join(
            f"{ratio:.2f} ({row['targets'][base]:.2f})" for base, ratio in row["ratios"].items()
        )
        saved = ", ".join(f"{share:.3f}" for share in row["saved"].values())
        yield f"| {row['dataset']} | {row['cache']:.0%} | {shares} | {ratios} | {saved} |"
    yield ""
    yield (
        "Own slots and shared ones, split by costs: seconds a row, in those of own memory, where "
        "memory of another rank takes 2 and the link so many times as long as that. *Kept* are the "
        "slots that a rank does not share, from counts of another epoch; caches of 10 % a rank, "
        "those of 5 and 20 % are in `results/host_cache.json`:"
    )
    yield ""
    columns = ["ids", "ranks", "link / peer", "kept", "all kept", "all shared"]
    yield from _head([*columns, "split", "as computed", "/ the better end"])
    for row in (row for row in rows if row["table"] == "splits" and row["cache"] == _SHOWN_CACHE):
        seconds = [row["seconds"][name] for name in ("own", "shared", "chosen")]
        yield (
            f"| {row['dataset']} | {row['ranks']} | {row['home_by_peer']:g} "
            f"| {row['kept']:.0%} | {' | '.join(f'{s:.2f}' for s in [*seconds, row['computed']])} "
            f"| {row['ratio']:.3f} |"
        )
    yield ""


def host_cache_link(rows: list[Row]) -> Iterator[str]:
    """Rows and bytes between pretended machines."""
    yield (
        "**The same between two pretended machines**, moved by the stages; the second of two "
        "epochs of 60 steps, width 32 (`python benchmarks/bench_host_cache_link.py`):"
    )
    yield ""
    columns = ["ids", "cache a rank", "scope", "retention", "rows over the link", "/ wanted"]
    yield from _head([*columns, "/ LRU", "MB on the link", "/ LRU", "wrong rows"])
    for row in rows:
        yield (
            f"| {row['dataset']} | {row['cache']:.0%} | {row['scope']} | {row['retention']} "
            f"| {row['link_rows']:,} | {row['link_rows'] / row['far_rows']:.3f} "
            f"| {row['rows_of_lru']:.2f} | {row['sent'] / 1e6:.1f} | {row['bytes_of_lru']:.2f} "
            f"| {row['wrong_rows']} |"
        )
    yield ""


def _head(columns: list[str]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
