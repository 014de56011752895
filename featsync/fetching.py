"""From the fetch part of a plan to the moves that read tables and caches of this process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from featsync.errors import PlanError
from featsync.move import Gather
from featsync.plan import FeatureKey, Fetch, Want

__all__ = ["cache_moves", "home_moves"]


def home_moves(
    key: FeatureKey, home: torch.Tensor, want: Want, fetch: Fetch, target: torch.Tensor
) -> Sequence[Gather]:
    """Read rows by their ids.

    Args:
        key: The feature.
        home: ``(num_rows, *row_shape)``, the table.
        want: The wanted ids.
        fetch: Which of them to read.
        target: ``(want.num_rows, *row_shape)``, to be filled there.
    """
    positions = fetch.home_positions
    if positions is None:
        parts = torch.split(target, [len(ids) for ids in want.ids])
        return [Gather(str(key), home, i, rows) for i, rows in zip(want.ids, parts, strict=True)]
    if fetch.cached_positions is None:
        raise PlanError(f"{fetch} names home positions but no cached ones")
    ids = want.ids[0] if len(want.ids) == 1 else torch.cat(want.ids)
    return [Gather(str(key), home, ids[positions], target, positions)]


def cache_moves(
    key: FeatureKey, slots: torch.Tensor, fetch: Fetch, target: torch.Tensor
) -> Sequence[Gather]:
    """Read the rows that are cached.

    Args:
        key: The feature.
        slots: ``(num_slots, *row_shape)``, the cache.
        fetch: Which rows lie in which slots.
        target: ``(num_rows, *row_shape)``, to be filled there.
    """
    if fetch.cached_positions is None:
        return []
    if fetch.cached_slots is None:
        raise PlanError(f"{fetch} names cached positions but no slots")
    return [Gather(str(key), slots, fetch.cached_slots, target, fetch.cached_positions)]
