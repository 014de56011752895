"""Rows on their way from another rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from featsync.errors import PeerError


@dataclass
class Arrival:
    """What one order asked for.

    Attributes:
        rank: Who was asked.
        tag: By which order and rows are matched.
        buffer: ``(num_bytes,)`` uint8, where the rows land.
        work: The posted receive; ``None`` if the rank was gone already.
        is_named: Whether the owner has said that the rows are under way.
        error: Why they will not come.
    """

    rank: int
    tag: int
    buffer: torch.Tensor
    work: Any = None
    is_named: bool = False
    error: PeerError | None = None
