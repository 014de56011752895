"""The ranks of one machine, replayed in one process with the planners that a session uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from id_traces import Ids

from featsync.host_cache.cache import HostCache
from featsync.host_cache.layout import CacheMemory, CacheShape
from featsync.host_cache.uses import UsesOfRanks
from featsync.host_lock import HostLock
from featsync.plan import FeatureKey, Want
from featsync.pool import private_block
from featsync.retention import RETENTION
from featsync.retention.levels import CountedLevels, ScoreLevels
from featsync.row_kind import RowKind
from featsync.window import PlanWindow

NODE = FeatureKey("node", None, "feat")
KIND = RowKind((1,), torch.uint8)  # no row is moved
PATIENCE_S = 10.0

Score = npt.NDArray[np.float64]
IsFar = Callable[[Ids], npt.NDArray[np.bool_]]


class Caches(NamedTuple):
    """What the ranks of a machine have.

    Attributes:
        own: Slots of each rank's own cache.
        shared: Slots of the cache that they share, of all together.
        window: Minibatches known ahead.
        retention: Of the own cache; the shared one looks ahead.
        score: Of rows; ``None``: counted use.
    """

    own: int
    shared: int
    window: int
    retention: str = "window"
    score: Score | None = None


class Found(NamedTuple):
    """Where the rows of other machines came from, all ranks and counted steps together.

    Attributes:
        own: From the rank's own cache.
        shared: From the shared one.
        home: From the other machine.
        distinct_home: The same, a row that several ranks lack in one step counted once.
        plan_ns: CPU nanoseconds of planning, a wanted id.
    """

    own: int
    shared: int
    home: int
    distinct_home: int
    plan_ns: float

    @property
    def wanted(self) -> int:
        """All of them."""
        return self.own + self.shared + self.home


def replay(num_rows: int, caches: Caches, batches: list[list[Ids]], is_far: IsFar) -> Found:
    """Plan all minibatches, the ranks in turn; count the second half of the steps.

    Args:
        num_rows: Rows of the table.
        caches: What there is.
        batches: Of each rank and step the ids.
        is_far: Which rows lie on other machines.
    """
    windows = _windows(num_rows, caches, len(batches), is_far)
    steps = len(batches[0])
    wants = [[{NODE: Want((torch.from_numpy(ids),))} for ids in own] for own in batches]
    for known, window in zip(wants, windows, strict=True):
        for want in known[: caches.window]:
            window.push(want)
    own = shared = home = distinct_home = num_ids = 0
    seconds = 0.0
    for step in range(steps):
        missed = []
        for rank, window in enumerate(windows):
            start = time.process_time()
            fetch = window.plan().features[NODE].fetch
            if step + caches.window < steps:
                window.push(wants[rank][step + caches.window])
            seconds += time.process_time() - start
            num_ids += len(batches[rank][step])
            if step < steps // 2:
                continue
            ids = batches[rank][step].take(fetch.home_positions.numpy())
            missed.append(ids[is_far(ids)])
            own += fetch.num_cached - (0 if fetch.share is None else len(fetch.share.positions))
            shared += 0 if fetch.share is None else len(fetch.share.positions)
            home += len(missed[-1])
        if missed:
            distinct_home += len(np.unique(np.concatenate(missed)))
    return Found(own, shared, home, distinct_home, 1e9 * seconds / num_ids)


def _windows(num_rows: int, caches: Caches, num_ranks: int, is_far: IsFar) -> list[PlanWindow]:
    retention = RETENTION[caches.retention]
    shared = _shared(num_rows, caches, num_ranks) if caches.shared else [None] * num_ranks
    return [
        PlanWindow(
            {NODE: retention(num_rows, caches.own, caches.window, caches.score)}
            if caches.own
            else {},
            {} if cache is None else {NODE: cache},
            {NODE: is_far},
        )
        for cache in shared
    ]


class SharedByTwo:
    """A shared cache with the face of a `Retention`: batches belong to two ranks in turn.

    Args:
        num_rows: Rows of the table.
        num_slots: Of the cache.
        window: Minibatches that each rank knows ahead.

    Attributes:
        window: Batches of both that may be pushed before `hits` is asked for the oldest.
    """

    def __init__(self, num_rows: int, num_slots: int, window: int) -> None:
        self.num_rows, self.num_slots, self.window = num_rows, num_slots, 2 * window - 1
        self._shape = CacheShape(num_rows, num_slots, 2, window)
        self._ranks = _shared(num_rows, Caches(0, num_slots, window), 2)
        self._num_pushed = self._num_planned = 0

    def state_bytes(self) -> dict[str, float]:
        """Bytes a table row and a slot, besides the slot itself."""
        shape, num_bytes = self._shape, CacheMemory.num_bytes(self._shape, KIND)
        rows = CacheMemory.num_bytes(replace(shape, num_rows=2 * self.num_rows), KIND)
        slots = CacheMemory.num_bytes(replace(shape, num_slots=2 * self.num_slots), KIND)
        return {
            "row": (rows - num_bytes) / self.num_rows,
            "slot": (slots - num_bytes) / self.num_slots - KIND.num_bytes,
            "window_id": 0.0,
        }

    def push(self, ids: Ids) -> None:
        """Make one more batch known."""
        self._ranks[self._num_pushed % 2].push(ids)
        self._num_pushed += 1

    def settle(self) -> None:
        """Nothing to do: plans say where rows lie and what stays at once."""

    def hits(self) -> npt.NDArray[np.int32]:
        """Plan the oldest batch; ``(ids,)``: the slot of each row, or -1."""
        rank = self._ranks[self._num_planned % 2]
        self._num_planned += 1
        with rank.hold():
            return rank.plan()[1].slots


def _shared(num_rows: int, caches: Caches, num_ranks: int) -> list[HostCache]:
    """The same cache in the hands of each rank."""
    shape = CacheShape(num_rows, caches.shared, num_ranks, caches.window)
    memory = CacheMemory(shape, KIND, _zeros(CacheMemory.num_bytes(shape, KIND)))
    mutex = _zeros(HostLock.NUM_BYTES)
    HostLock.lay(mutex)
    levels = (
        CountedLevels(num_rows, caches.shared, memory.counts, memory.totals)
        if caches.score is None
        else ScoreLevels(caches.score, caches.shared)
    )
    ranks = []
    for rank in range(num_ranks):
        lock = HostLock(mutex, rank, "the replayed cache", str)
        uses = UsesOfRanks(memory.words, memory.progress)
        place = (range(num_ranks), 0)
        ranks.append(HostCache(memory, lock, uses, levels, rank, place, str, PATIENCE_S))
    for cache in ranks:
        cache.begin(lambda: False, _unwatched)
    return ranks


def _zeros(num_bytes: int) -> npt.NDArray[np.uint8]:
    block = private_block(num_bytes)
    block[:] = 0
    return block


def _unwatched(rank: int) -> Callable[[], None]:
    raise AssertionError(f"nothing moves, so nobody waits for rank {rank}")
