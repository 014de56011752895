"""Gives each feature of a loader its cache: finds the one that is there, or makes it.

Caches live on the host's feature object, by device, so that they last as long as the feature and
loaders of one feature share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from featsync._graphbolt import feature_of
from featsync.cache_size import slots_of_tables
from featsync.counts import FeatureStats
from featsync.device import Device, free_bytes
from featsync.errors import CapacityError
from featsync.mapped import file_of
from featsync.plan import FeatureKey
from featsync.pool import bytes_of, private_block, tensor_in
from featsync.residency import CacheSettings, Residency
from featsync.segment import Segment
from featsync.session import Mover
from featsync.settings import PlannerSettings
from featsync.sources import Sources
from featsync.table import ForeignTable, RowTable, Table, TensorTable

_CACHES = "_featsync_caches"


def residencies_of(
    sources: Sources, tables: Mapping[FeatureKey, Table], settings: PlannerSettings, mover: Mover
) -> dict[FeatureKey, Residency]:
    """Find or make the cache of each feature, and note in the stats what was chosen.

    Raises:
        ConfigError: More than there is to cache, or another loader wants the same cache otherwise.
        CapacityError: The memory is not there.
    """
    cachable = {k: table for k, table in tables.items() if not isinstance(table, ForeignTable)}
    slots = {} if settings.retention == "none" else slots_of_tables(settings.device_cache, cachable)
    residencies = {}
    for key, table in tables.items():
        if not isinstance(table, ForeignTable) and slots.get(key):
            residencies[key] = _residency(
                sources.store,
                table,
                CacheSettings(slots[key], settings.retention, settings.lookahead),
                settings,
                mover,
            )
        _note(
            mover.stats.features.setdefault(key, FeatureStats()), table, slots.get(key, 0), settings
        )
    return residencies


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
        caches[name].check_settings(wanted)
        return caches[name]
    memory = _slots(table, wanted.num_slots, mover.device)
    score = settings.score_of(table.key, table.num_rows)
    caches[name] = Residency(table.key, wanted, table.num_rows, memory, score)
    return caches[name]


def _slots(table: RowTable, num_slots: int, device: Device) -> torch.Tensor:
    """Allocate a cache's memory, or say that it does not fit.

    Where another process can read the table it can reach the cache as well: loaders share it, and
    one of them may have its rows moved by a process.

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
    return isinstance(table, TensorTable) and (
        table.segment is not None or file_of(table.tensor) is not None
    )


def _note(stats: FeatureStats, table: Table, slots: int, settings: PlannerSettings) -> None:
    if isinstance(table, ForeignTable):
        stats.why = "the feature's own read() gives its rows, so they are neither pooled nor cached"
        return
    stats.row_bytes = table.kind.num_bytes
    reasons = []
    if isinstance(table, TensorTable):
        reasons.append("this rank reads the whole table itself: nothing to exchange")
    if slots:
        reasons.append(f"{slots:,} rows cached by {settings.retention}")
    else:
        reasons.append("no device cache, so no id is looked at")
    if settings.cache_scope == "host" and isinstance(table, TensorTable):
        reasons.append("cache_scope=host is no gain for a table that every rank can read")
    stats.why = "; ".join(reasons)
