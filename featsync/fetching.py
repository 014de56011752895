"""From the fetch part of a plan to the moves that read tables and caches of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from featsync.errors import PlanError
from featsync.move import Call, Gather, Move
from featsync.plan import FeatureKey, Fetch, Share, Want

__all__ = ["SharedMoves", "SharedSlots", "cache_moves", "home_moves", "shared_moves"]


class SharedSlots(Protocol):
    """The cache that the ranks of a machine share; see `HostCache`."""

    @property
    def slots(self) -> torch.Tensor:
        """``(num_slots, *row_shape)``."""

    def wait_to_read(self, landings: Mapping[int, int]) -> None:
        """Block until other ranks' landings are over."""

    def wait_to_fill(self, landings: Mapping[int, int], readings: Mapping[int, int]) -> None:
        """Block until nobody reads or fills slots any more that another row had."""

    def has_read(self, number: int) -> None:
        """This rank has read the slots of a plan."""

    def has_landed(self, number: int) -> None:
        """This rank has filled the slots of a plan."""


class SharedMoves(NamedTuple):
    """What is done about a shared cache.

    Attributes:
        read: Before rows from elsewhere are waited for, while they travel.
        fill: Once they are here.
    """

    read: Sequence[Move]
    fill: Sequence[Move]


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


def shared_moves(
    key: FeatureKey, cache: SharedSlots, share: Share, target: torch.Tensor
) -> SharedMoves:
    """Read and fill slots of the cache that the ranks of a machine share.

    Args:
        key: The feature.
        cache: The cache.
        share: What to read and to fill.
        target: ``(num_rows, *row_shape)``, read from as well, once its rows are there.
    """
    what = str(key)
    return SharedMoves(
        [
            Call(what, partial(cache.wait_to_read, share.read_after)),
            Gather(what, cache.slots, share.slots, target, share.positions),
            Call(what, partial(cache.has_read, share.number)),
        ],
        [
            Call(
                what,
                partial(cache.wait_to_fill, share.fill_after_landings, share.fill_after_readings),
            ),
            Gather(what, target, share.fill_positions, cache.slots, share.fill_slots),
            Call(what, partial(cache.has_landed, share.number)),
        ],
    )
