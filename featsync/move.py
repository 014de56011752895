"""The one thing the Syncer does to rows: gather some of one tensor into another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Gather:
    """``target[positions] = source[rows]``, or ``target[:] = source[rows]``.

    From `Worker.submit` until the ticket was waited for nobody may write ``source``, ``rows`` or
    ``positions``, or touch ``target``.

    Attributes:
        what: Name of the feature, for errors.
        source: ``(num_source_rows, *row_shape)``, any strides.
        rows: ``(n,)`` int32 or int64, row numbers in ``source``.
        target: ``(num_target_rows, *row_shape)``, same dtype as ``source``, rows contiguous. May be
            ``source`` itself, where no row is both read and filled.
        positions: ``(n,)`` int64, distinct row numbers in ``target``; ``None``: ``target`` has n
            rows, to be filled in order.
    """

    what: str
    source: torch.Tensor
    rows: torch.Tensor
    target: torch.Tensor
    positions: torch.Tensor | None = None


@dataclass(frozen=True)
class Call:
    """Rows that only a foreign ``read`` can give: run ``action()``, which stores what it read."""

    what: str
    action: Callable[[], None]


Move = Gather | Call
