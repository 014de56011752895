"""Messages and bytes of partitioned tables, a step and rank, as formulas.

A rank sends what the others receive, and with rows dealt out evenly every rank does the same, so
one number stands for both directions. ``bench_traffic.py`` holds them against what was counted.

With ``P`` other ranks that are asked by messages, of whom each holds ``n`` of the wanted rows:

=========  ==========  ================================================================
           messages    bytes of each
=========  ==========  ================================================================
announce   P           header + ids: 4 n, or n + 4 n (1 - d)^254 where that is less
order      P           header + n / 8 where a cache may have some of them by then
sent       P           header + a bit a row for each rank that was sent rows of the step before
rows       P           the rows that are not cached; over 8 MiB in up to 4 portions
=========  ==========  ================================================================

``d`` is the share of its rows that an owner is asked for: sorted rows are ``1 / d`` apart in the
mean, and a distance under 255 takes a byte (`featsync.exchange.id_code`). Shared memory takes no
message at all: ``P`` counts the ranks of other machines only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

__all__ = ["Expected", "Load", "id_bytes", "per_step"]

_HEADER_BYTES = 16  # of a message: magic, version, two lengths
_ALIGNMENT = 16
_PORTION_BYTES, _MOST_PORTIONS = 1 << 22, 4


class Expected(NamedTuple):
    """In one step, of one kind, in one direction."""

    messages: float
    num_bytes: float


@dataclass(frozen=True)
class Load:
    """What the minibatches of each rank want.

    Attributes:
        ranks: That hold equal parts.
        hosts: Machines that the ranks are on, equally many on each.
        transport: ``shared_memory`` within a machine, or ``p2p`` between all ranks.
        batch_rows: Distinct rows that a minibatch wants.
        remote_share: Of them, those of ranks that are asked by messages.
        part_rows: Rows that a rank holds.
        row_bytes: Bytes of a row.
        has_cache: Whether there is a cache for remote rows.
        hit_share: Of the remote rows, those that it has when it is their turn.
    """

    ranks: int
    batch_rows: float
    remote_share: float
    part_rows: float
    row_bytes: int
    hosts: int = 1
    transport: Literal["p2p", "shared_memory"] = "p2p"
    has_cache: bool = False
    hit_share: float = 0.0

    @property
    def asked(self) -> float:
        """Ranks that are asked by messages."""
        near = 1 if self.transport == "p2p" else self.ranks // self.hosts
        return self.ranks - near

    @property
    def rows_of_one(self) -> float:
        """Wanted rows that one of them holds."""
        return self.batch_rows * self.remote_share / self.asked if self.asked else 0.0


def per_step(load: Load) -> Mapping[str, Expected]:
    """Messages and bytes that a rank sends a step, and as many that it receives, by kind."""
    if not load.asked or not load.rows_of_one:
        return {}
    wanted = load.rows_of_one
    sent = wanted * (1.0 - load.hit_share)
    row_bytes = _aligned(sent * load.row_bytes)
    coded = wanted * id_bytes(wanted / load.part_rows)
    bits = wanted / 8 if load.has_cache else 0.0
    part = [0, round(wanted), 1, round(coded)]
    announce = {"kind": "announce", "session": 0, "batch": 10, "parts": [part]}
    order: dict[str, Any] = {"kind": "order", "session": 0, "batch": 10}
    order |= {"masks": [round(bits) or None], "tag": 10, "num_bytes": round(row_bytes)}
    portions = max(1, min(_MOST_PORTIONS, row_bytes // _PORTION_BYTES))
    return {
        "announce": Expected(load.asked, load.asked * (_frame(announce) + coded)),
        "order": Expected(load.asked, load.asked * (_frame(order) + bits)),
        "sent": Expected(load.asked, _answers(load, sent)),
        "rows": Expected(load.asked * portions, load.asked * row_bytes),
    }


def id_bytes(density: float) -> float:
    """Bytes an id, of distinct rows chosen at random, that share of all."""
    return min(4.0, 1.0 + 4.0 * (1.0 - density) ** 254)


def _answers(load: Load, rows: float) -> float:
    """Bytes of all answers that an owner gives in a step, to ranks that ask one after the other.

    The first gets rows out of the table; the next ones first those that were sent to an earlier one
    and that they want too, for each of whom a bit tells which of the rows that are left those are.
    """
    left = 1.0 - rows / load.part_rows
    total = 0.0
    for number in range(int(load.asked)):
        masks = [round(rows * left**earlier) for earlier in range(number)]
        answer = {"kind": "sent", "tag": 10, "masks": [masks]}
        total += _frame(answer) + sum(-(-bits // 8) for bits in masks)
    return total


def _frame(words: Mapping[str, Any]) -> int:
    return _HEADER_BYTES + len(json.dumps(words))


def _aligned(num_bytes: float) -> float:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
