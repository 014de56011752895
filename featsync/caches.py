"""Gives each feature of a loader its cache: finds the one that is there, or makes it.

Caches live on the host's feature object, by device, so that they last as long as the feature and
loaders of one feature share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from featsync._graphbolt import feature_of
from featsync.cache_size import slots_of_tables
from featsync.counts import FeatureStats
from featsync.device import Device, free_bytes
from featsync.errors import CapacityError
from featsync.flights import Mover
from featsync.host_cache.cache import HostCache
from featsync.host_cache.opening import CacheFinder, num_slots_of_host
from featsync.host_cache.placement import RowCosts, num_held_by_each
from featsync.mapped import file_of
from featsync.partitioned_table import PartitionedTable, Parts
from featsync.plan import FeatureKey
from featsync.pool import bytes_of, private_block, tensor_in
from featsync.residency import CacheSettings, Residency, check_settings
from featsync.segment import Segment
from featsync.settings import PlannerSettings
from featsync.sources import Sources
from featsync.table import DynamicTable, ForeignTable, RowTable, Table, TensorTable

_CACHES = "_featsync_caches"
_SHARED_CACHES = "_featsync_shared_caches"


class Caches(NamedTuple):
    """The caches of a loader's features.

    Attributes:
        own: Of this rank.
        shared: Of all ranks of this machine together.
    """

    own: dict[FeatureKey, Residency]
    shared: dict[FeatureKey, HostCache]


def caches_of(
    sources: Sources, tables: Mapping[FeatureKey, Table], settings: PlannerSettings, mover: Mover
) -> Caches:
    """Find or make the cache of each feature, and note in the stats what was chosen.

    Raises:
        ConfigError: More than there is to cache, or another loader or rank wants the same cache
            otherwise.
        CapacityError: The memory is not there.
    """
    cachable = {
        k: table
        for k, table in tables.items()
        if not isinstance(table, ForeignTable | DynamicTable)
    }
    slots = {} if settings.retention == "none" else slots_of_tables(settings.device_cache, cachable)
    caches = Caches({}, {})
    for key, table in tables.items():
        stats = mover.stats.features.setdefault(key, FeatureStats())
        if isinstance(table, ForeignTable):
            stats.why = (
                "the feature's own read() gives its rows, so they are neither pooled nor cached"
            )
            continue
        stats.row_bytes = table.kind.num_bytes
        if isinstance(table, DynamicTable):
            stats.why = (
                "its rows change; each machine holds its part in memory, where they are written "
                "through: read early, and again where somebody wrote meanwhile; never cached"
            )
            continue
        shares = _shares_of(table, slots.get(key, 0), settings, mover.device)
        if shares.own:
            wanted = CacheSettings(shares.own, settings.retention, settings.lookahead)
            caches.own[key] = _residency(sources.store, table, wanted, settings, mover)
        if shares.of_host and isinstance(table, PartitionedTable):
            wanted = CacheSettings(shares.of_host, settings.retention, settings.lookahead)
            caches.shared[key] = _shared(sources.store, table, wanted, settings)
        stats.why = "; ".join(_reasons(table, shares, settings))
    return caches


class _Shares(NamedTuple):
    """Slots of one rank, by what they hold."""

    own: int
    of_host: int


def _shares_of(
    table: RowTable, num_slots: int, settings: PlannerSettings, device: Device
) -> _Shares:
    """Split slots into those that a rank keeps to itself and those that it shares."""
    if num_slots == 0 or settings.cache_scope != "host" or not _has_neighbours(table):
        return _Shares(num_slots, 0)
    engine, width = table.parts.engine, table.kind.num_bytes
    if engine is None:
        return _Shares(num_slots, 0)
    costs = RowCosts(*(cost.row_seconds(width) for cost in engine.profile.cache_costs))
    window = settings.lookahead if settings.retention == "window" else 0
    uses = _cachable(settings.score_of(table.key, table.num_rows), table.parts, device)
    num_ranks = len(table.parts.ranks_of_host)
    own = num_held_by_each(uses, num_slots, num_ranks, window, costs)
    return _Shares(own, num_slots - own)


def _cachable(score: NDArray[Any] | None, parts: Parts, device: Device) -> NDArray[Any] | None:
    """The scores of the rows that a cache is for: those of other machines, if there are any."""
    if score is None or device.torch_device.type != "cpu":
        return score
    is_far = np.isin(parts.partition.owners, parts.ranks_of_host, invert=True)
    return score[is_far] if is_far.any() else score


def _has_neighbours(table: RowTable) -> TypeGuard[PartitionedTable]:
    return isinstance(table, PartitionedTable) and len(table.parts.ranks_of_host) > 1


def _shared(
    store: Any, table: PartitionedTable, wanted: CacheSettings, settings: PlannerSettings
) -> HostCache:
    feature = feature_of(store, table.key)
    finders: dict[FeatureKey, tuple[CacheSettings, CacheFinder]]
    finders = feature.__dict__.setdefault(_SHARED_CACHES, {})
    if table.key not in finders:
        score = settings.score_of(table.key, table.num_rows)
        finders[table.key] = wanted, CacheFinder(table, wanted, score)
    found, finder = finders[table.key]
    check_settings(table.key, found, wanted)
    return finder.find()


def _residency(
    store: Any,
    table: RowTable,
    wanted: CacheSettings,
    settings: PlannerSettings,
    mover: Mover,
) -> Residency:
    feature = feature_of(store, table.key)
    caches: dict[tuple[FeatureKey, torch.device], Residency]
    caches = feature.__dict__.setdefault(_CACHES, {})
    name = (table.key, mover.device.torch_device)
    if name in caches and caches[name].fits(table.num_rows, table.kind):
        check_settings(table.key, caches[name].settings, wanted)
        return caches[name]
    memory = _slots(table, wanted.num_slots, mover.device)
    score = settings.score_of(table.key, table.num_rows)
    caches[name] = Residency(table.key, wanted, table.num_rows, memory, score)
    return caches[name]


def _slots(table: RowTable, num_slots: int, device: Device) -> torch.Tensor:
    """Allocate a cache's memory, or say that it does not fit.

    Where another process can read the table, if only by way of another transport, it can reach the
    cache as well: loaders share it, and one of them may have its rows moved by a process.

    Raises:
        CapacityError: It does not fit; nothing was taken.
    """
    shape, dtype = (num_slots, *table.kind.shape), table.kind.dtype
    needed, free = bytes_of(shape, dtype), free_bytes(device)
    if needed > free:
        raise CapacityError(
            f"plan_feature.device_cache: {num_slots:,} rows of {table.key} need {needed:,} bytes "
            f"on {device.torch_device}, where {free:,} are free. Ask for a smaller cache."
        )
    if device.torch_device.type != "cpu" or needed == 0:
        return torch.empty(shape, dtype=dtype, device=device.torch_device)
    block = Segment.create(needed).array if _is_shared(table) else private_block(needed)
    return tensor_in(block, shape, dtype)


def _is_shared(table: RowTable) -> bool:
    if isinstance(table, PartitionedTable):
        return table.parts.segment is not None
    return table.segment is not None or file_of(table.tensor) is not None


def _reasons(table: RowTable, shares: _Shares, settings: PlannerSettings) -> Iterator[str]:
    if isinstance(table, TensorTable):
        yield "this rank reads the whole table itself: nothing to exchange"
    if shares.own:
        yield f"{shares.own:,} rows cached by {settings.retention}"
    if shares.of_host and isinstance(table, PartitionedTable):
        num_ranks = len(table.parts.ranks_of_host)
        yield (
            f"{num_slots_of_host(table, shares.of_host):,} rows cached by {settings.retention}, "
            f"once for the {num_ranks} ranks of this machine"
        )
    if shares == (0, 0):
        yield "no device cache, so no id is looked at"
    elif settings.cache_scope == "host" and isinstance(table, TensorTable):
        yield "cache_scope=host is no gain for a table that every rank can read"
    elif settings.cache_scope == "host" and not _has_neighbours(table):
        yield "no other rank on this machine to share with"
