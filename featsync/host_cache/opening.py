"""Finds the cache that a machine's ranks share for a feature, or has it made; not collective."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from featsync.errors import ConfigError
from featsync.exchange.rooms import room_prefix
from featsync.host_cache.cache import HostCache
from featsync.host_cache.layout import CacheMemory, CacheShape
from featsync.host_cache.uses import NoUses, Uses, UsesOfRanks
from featsync.host_lock import HostLock
from featsync.partitioned_table import PartitionedTable
from featsync.residency import CacheSettings
from featsync.retention.arrays import Score
from featsync.retention.levels import CountedLevels, Levels, ScoreLevels
from featsync.segment import Segment

__all__ = ["CacheFinder"]

# What each retention knows of uses to come.
_USES: dict[str, Callable[[CacheMemory], Uses]] = {
    "window": lambda memory: UsesOfRanks(memory.words, memory.progress),
    "static": lambda memory: NoUses(),
}


class _Wish(NamedTuple):
    table: PartitionedTable
    settings: CacheSettings
    score: Score | None


class CacheFinder:
    """The shared cache of one feature, as long as it can be trusted; then the next.

    Args:
        table: The feature's table.
        settings: Of the cache; slots are those that this rank adds.
        score: Per-row score ``(num_rows,)``, or ``None`` for counted use.

    Raises:
        ConfigError: The retention cannot be planned for several ranks.
    """

    def __init__(
        self, table: PartitionedTable, settings: CacheSettings, score: Score | None
    ) -> None:
        if settings.retention not in _USES:
            raise ConfigError(
                f"plan_feature.retention = {settings.retention!r}: with cache_scope=host it can be "
                f"{' or '.join(sorted(_USES))}"
            )
        self._wish = _Wish(table, settings, score)
        self._generation = -1
        self._cache: HostCache | None = None

    def find(self) -> HostCache:
        """Give the cache; may wait for the rank of this machine that keeps it.

        Raises:
            ConfigError: Another rank of this machine has other settings.
            CapacityError: There is no shared memory for it.
            PeerError: The rank that keeps it has ended.
        """
        while self._cache is None or not self._cache.is_trusted():
            self._generation, self._cache = _open(self._wish, self._generation + 1)
        return self._cache


def num_slots_of_host(table: PartitionedTable, num_slots: int) -> int:
    """Slots of all ranks of this machine together, when each adds so many."""
    return min(num_slots * len(table.parts.ranks_of_host), table.num_rows)


def _open(wish: _Wish, generation: int) -> tuple[int, HostCache]:
    """See the newest cache there is, of this generation at least."""
    table, settings, score = wish
    parts = table.parts
    engine, ranks = parts.engine, parts.ranks_of_host
    if engine is None:
        raise ValueError(f"{table.key} lies on one rank only: there is nobody to share with")
    shape = CacheShape(
        table.num_rows, num_slots_of_host(table, settings.num_slots), len(ranks), settings.window
    )
    num_bytes = CacheMemory.num_bytes(shape, table.kind)
    terms = {
        "slots a rank": settings.num_slots,
        "retention": settings.retention,
        "lookahead": settings.window,
        "score": None if score is None else _digest(score),
    }
    room = engine.room(f"{room_prefix(parts.number)}cache", generation, num_bytes, terms)
    segment = Segment.open(room.handle)
    memory = CacheMemory(shape, table.kind, segment.array[HostLock.NUM_BYTES :])
    own = ranks.index(parts.rank)

    def name_of(rank: int) -> str:
        return engine.world.name(ranks[rank])

    lock = HostLock(segment.array[: HostLock.NUM_BYTES], own, f"the cache of {table.key}", name_of)
    uses = _USES[settings.retention](memory)
    levels = _levels(shape, memory, score)
    place = (engine.world.global_ranks, parts.number)
    cache = HostCache(memory, lock, uses, levels, own, place, name_of, engine.timeout)
    return room.generation, cache


def _levels(shape: CacheShape, memory: CacheMemory, score: Score | None) -> Levels:
    if score is not None:
        return ScoreLevels(score, shape.num_slots)
    return CountedLevels(shape.num_rows, shape.num_slots, memory.counts, memory.totals)


def _digest(score: Score) -> str:
    return hashlib.blake2b(np.ascontiguousarray(score).tobytes(), digest_size=8).hexdigest()
