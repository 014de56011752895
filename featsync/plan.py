"""The values that pass from the Planner to the Syncer: what is wanted, whence it comes, what stays.

A plan is a value. The Planner decides and touches no row; the Syncer moves rows and decides
nothing. Everything here is frozen and can be made, printed and tested without a process group.

Words used throughout::

    ids        row numbers in a feature's home table (global node or edge ids)
    positions  row numbers within one minibatch, all tensors of a feature laid end to end
    slots      row numbers in a cache
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from featsync.retention.contract import Keep

__all__ = ["FeatureKey", "FeaturePlan", "Fetch", "Keep", "Plan", "Share", "Want"]


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
class Share:
    """What a rank reads from the cache that its machine shares, and what it brings into it.

    Ranks are numbered within the machine. Each of them numbers its plans.

    Attributes:
        number: Of this plan.
        positions: ``(num_shared,)`` int64, ascending, the positions to read.
        slots: ``(num_shared,)`` int64, the slot of each.
        read_after: By rank, the plan whose rows have to be in their slots before that.
        fill_positions: ``(num_filled,)`` int64, rows of this minibatch to be written to slots once
            they are here.
        fill_slots: ``(num_filled,)`` int64, the slot of each.
        fill_after_landings: By rank, the plan whose rows have to be in their slots before that.
        fill_after_readings: By rank, the plan that has to have read its rows before that.
    """

    number: int
    positions: torch.Tensor
    slots: torch.Tensor
    read_after: Mapping[int, int]
    fill_positions: torch.Tensor
    fill_slots: torch.Tensor
    fill_after_landings: Mapping[int, int]
    fill_after_readings: Mapping[int, int]


@dataclass(frozen=True)
class Fetch:
    """For every wanted row of one feature exactly one source: a slot of a cache, or home.

    Attributes:
        num_rows: Wanted rows.
        home_positions: ``(num_home,)`` int64, ascending, the positions to read from the home
            table; ``None`` means all of them, and then no id was looked at.
        cached_positions: ``(num_cached,)`` int64, ascending, the positions to read from the cache.
        cached_slots: ``(num_cached,)`` int64, the slot of each.
        share: What comes from the cache of the machine, where there is one.
    """

    num_rows: int
    home_positions: torch.Tensor | None = None
    cached_positions: torch.Tensor | None = None
    cached_slots: torch.Tensor | None = None
    share: Share | None = None

    @property
    def num_cached(self) -> int:
        """Rows that caches serve."""
        num_own = 0 if self.cached_positions is None else len(self.cached_positions)
        return num_own + (0 if self.share is None else len(self.share.positions))

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
