"""Drives a Session as the two stages do, without DGL."""

from __future__ import annotations

from collections import deque

import torch

from featsync.counts import FeatureStats, Stats
from featsync.device import CpuDevice
from featsync.flights import Mover
from featsync.host_cache.cache import HostCache
from featsync.host_cache.layout import CacheMemory, CacheShape
from featsync.host_cache.uses import UsesOfRanks
from featsync.host_lock import HostLock
from featsync.plan import Want
from featsync.residency import CacheSettings, Residency
from featsync.retention import RETENTION
from featsync.retention.levels import CountedLevels
from featsync.row_kind import RowKind
from featsync.segment import Segment
from featsync.session import Session
from featsync.table import TensorTable
from featsync.workers import WORKERS
from support.tensors import same_bits

TIMEOUT_S = 20.0
IN_THIS_PROCESS = ["inline", "thread"]  # workers that reach private memory
CACHING = [name for name in sorted(RETENTION) if name != "none"]


def want(*ids, dtype=torch.int64):
    """What one minibatch wants of one feature."""
    return Want((torch.tensor(ids, dtype=dtype),))


def table(key, tensor):
    return TensorTable(key, lambda: tensor)


def residency(key, tensor, num_slots, policy="window", window=2, score=None):
    """A cache whose slots hold nothing that could be taken for a row by chance."""
    slots = torch.full((num_slots, *tensor.shape[1:]), 119).to(tensor.dtype)
    settings = CacheSettings(num_slots, policy, window)
    return Residency(key, settings, len(tensor), slots, score)


def host_cache(tensor, num_slots, window=2):
    """A cache that a machine's ranks share, as its only rank has it; and its memory."""
    kind = RowKind(tuple(tensor.shape[1:]), tensor.dtype)
    shape = CacheShape(len(tensor), num_slots, 1, window)
    block = Segment.create(HostLock.NUM_BYTES + CacheMemory.num_bytes(shape, kind)).array
    HostLock.lay(block)
    lock = HostLock(block, 0, "the cache", str)
    memory = CacheMemory(shape, kind, block[HostLock.NUM_BYTES :])
    uses = UsesOfRanks(memory.words, memory.progress)
    levels = CountedLevels(len(tensor), num_slots, memory.counts, memory.totals)
    return HostCache(memory, lock, uses, levels, 0, ((0,), 0), str, TIMEOUT_S), memory


def mover(keys, worker="inline", device=None):
    device = device or CpuDevice()
    stats = Stats({key: FeatureStats() for key in keys})
    return Mover(device, WORKERS[worker](device, TIMEOUT_S), stats)


def in_shared_memory(tensor):
    """A copy that every kind of worker can read, and the segment that it lies in."""
    segment = Segment.create(tensor.numel() * tensor.element_size())
    copy = torch.from_numpy(segment.array).view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor), segment


def plans(window, batches, lookahead):
    """Push and plan as the Planner does; yield each plan with what its minibatch wants."""
    source, known = iter(batches), deque()
    while True:
        while len(known) < lookahead and (wants := next(source, None)) is not None:
            window.push(wants)
            known.append(wants)
        if not known:
            return
        wants = known.popleft()
        yield window.plan(), wants


def deliveries(session, batches, lookahead):
    """Begin and finish as the Syncer does; yield each minibatch's wants and rows."""
    last = None
    try:
        for plan, wants in plans(session.window, batches, lookahead):
            flight = session.begin(plan, wants, last)
            ready, last = last, flight
            if ready is not None:
                yield ready.wants, session.finish(ready)
        if last is not None:
            yield last.wants, session.finish(last)
    finally:
        session.close()


def wrong_rows(delivered, wants, tables):
    """Names of the features whose rows are not the table's own."""
    return [
        str(key)
        for key, want in wants.items()
        if len(delivered[key]) != len(want.ids)
        or not all(
            same_bits(rows, tables[key][ids.long()])
            for rows, ids in zip(delivered[key], want.ids, strict=True)
        )
    ]


def open_session(tables, caches, mover):
    return Session({key: table(key, tensor) for key, tensor in tables.items()}, caches, mover)
