"""The values that pass from the Planner to the Syncer: what is wanted, whence it comes, what stays.

A plan is a value. The Planner decides and touches no row; the Syncer moves rows and decides
nothing. Everything here is frozen and can be made, printed and tested without a process group.

Words used throughout::

    ids        row numbers in a feature's home table (global node or edge ids)
    positions  row numbers within one minibatch, all tensors of a feature laid end to end
    slots      row numbers in a device cache
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from featsync.retention.contract import Keep

__all__ = ["FeatureKey", "FeaturePlan", "Fetch", "Keep", "Plan", "Want"]


class FeatureKey(NamedTuple):
    """Names one feature as the host does; ``type`` is ``None`` on homogeneous graphs.

    Example:
        >>> str(FeatureKey("node", None, "feat"))
        'node/None/feat'
    """

    domain: str
    type: str | None
    name: str

    def __str__(self) -> str:
        return f"{self.domain}/{self.type}/{self.name}"


@dataclass(frozen=True)
class Want:
    """The rows that one minibatch wants of one feature.

    Attributes:
        ids: One ``(num_rows,)`` int32 or int64 tensor for each tensor to deliver: one for a node
            feature, one a layer for an edge feature.
        layers: To which layer each of ``ids`` belongs; empty for a node feature.
    """

    ids: tuple[torch.Tensor, ...]
    layers: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of all tensors together."""
        return sum(len(ids) for ids in self.ids)


@dataclass(frozen=True)
class Fetch:
    """For every wanted row of one feature exactly one source: a cache slot, or the home table.

    Attributes:
        num_rows: Wanted rows.
        home_positions: ``(num_home,)`` int64, ascending, the positions to read from the home
            table; ``None`` means all of them, and then no id was looked at.
        cached_positions: ``(num_cached,)`` int64, ascending, the positions to read from the cache.
        cached_slots: ``(num_cached,)`` int64, the slot of each.
    """

    num_rows: int
    home_positions: torch.Tensor | None = None
    cached_positions: torch.Tensor | None = None
    cached_slots: torch.Tensor | None = None

    @property
    def num_cached(self) -> int:
        """Rows that the cache serves."""
        return 0 if self.cached_positions is None else len(self.cached_positions)

    @property
    def num_home(self) -> int:
        """Rows that the home table serves."""
        return self.num_rows - self.num_cached


@dataclass(frozen=True)
class FeaturePlan:
    """One feature's part of a plan.

    Attributes:
        fetch: Sources of the rows of the plan's minibatch.
        keep: Rows of the minibatch before it that are to be written to slots before anything of
            ``fetch`` is read; ``None`` where nothing is ever kept.
    """

    fetch: Fetch
    keep: Keep | None = None


@dataclass(frozen=True)
class Plan:
    """What to do when minibatch ``batch - 1`` is delivered: keep of it, and fetch for ``batch``.

    Attributes:
        batch: Index of the minibatch whose rows are fetched, from 0 in each epoch.
        features: One part for each feature that the minibatch wants.
        seconds: Time it took to decide.
    """

    batch: int
    features: Mapping[FeatureKey, FeaturePlan]
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = (
            f"{key}: {part.fetch.num_home} from home, {part.fetch.num_cached} from cache"
            + (f", {len(part.keep.positions)} of {self.batch - 1} kept" if part.keep else "")
            for key, part in self.features.items()
        )
        return f"plan {self.batch}: " + "; ".join(parts)
