"""Brings rows that change into memory that the ranks of each machine share; collective."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.dynamic.away import AwayPart
from featsync.dynamic.clock import FeatureClock
from featsync.dynamic.guest import Guest
from featsync.dynamic.homes import Homes, by_host
from featsync.dynamic.merge import MERGES, Merge
from featsync.dynamic.part import PartSize, part_in, rows_in
from featsync.dynamic.rows import FeatureRows
from featsync.dynamic.talk import EngineWire, Talk, server_of
from featsync.dynamic.waits import Neighbours
from featsync.errors import ConfigError, unknown_name
from featsync.exchange.engine import Engine
from featsync.exchange.rooms import room_prefix
from featsync.host_lock import HostLock
from featsync.offers import agree, attempt
from featsync.partition import Partition, RangePartition, as_partition
from featsync.row_kind import RowKind
from featsync.segment import Segment
from featsync.world import World

__all__ = ["open_clock", "shared_rows"]

_WHERE = "featsync.DynamicFeature"
_CHUNK_BYTES = 1 << 24  # of rows that the first rank gives to other machines at a time


def open_clock(
    tensor: object, merge: str, partition: object, engine: Engine | None, timeout: float
) -> FeatureClock:
    """Make the table of a feature, and its clock.

    Args:
        tensor: ``(num_rows, *row_shape)``; with a partition the rows that this rank brings.
        merge: A name of `MERGES`.
        partition: Who brings which rows; ``None``: the first rank brings all.
        engine: Of the group; ``None`` for a single rank.
        timeout: Seconds to wait for the other ranks.

    Raises:
        ConfigError: It is no table, or ranks disagree. All ranks raise it.
        CapacityError: The machine's shared memory is too small.
        PeerError: Another rank could not do its part.
    """
    rows, problem = attempt(lambda: _checked(tensor, merge), None)
    parts: Partition | None = None
    if partition is not None and problem is None:
        num_ranks = 1 if engine is None else engine.world.size
        parts, problem = attempt(lambda: as_partition(partition, num_ranks), None)
    if engine is None:
        if problem is not None or rows is None:
            raise problem or ConfigError(f"{_WHERE}: no table")
        return _alone(rows, MERGES[merge], timeout)
    return _together(rows, parts, merge, engine, problem, timeout)


def shared_rows(clock: FeatureClock, name: str, kind: RowKind, terms: object) -> torch.Tensor:
    """Memory for something beside each row, zeros at first, that the same ranks share.

    Args:
        clock: Of the feature.
        name: The same on all ranks, and for one thing only.
        kind: What there is beside a row.
        terms: What ranks have to agree on, as JSON has it.

    Returns:
        ``(num_rows, *kind.shape)``, of the rows that this machine holds.

    Raises:
        ConfigError: Another rank asked for it on other terms.
        CapacityError: There is no memory for it.
    """
    num_rows = len(clock.table)
    memory = clock.room(name, num_rows * kind.num_bytes, terms)
    clock.rows.part.beside[name] = beside = rows_in(memory, num_rows, kind)
    return beside


def _alone(rows: torch.Tensor, merge: Merge, timeout: float) -> FeatureClock:
    size = PartSize(len(rows), RowKind(tuple(rows.shape[1:]), rows.dtype), 1, 1)
    segment = Segment.create(size.num_bytes)
    HostLock.lay(segment.array[: HostLock.NUM_BYTES])
    others = Neighbours(0, _only_rank, _nobody, timeout)
    part = part_in(segment, size, merge, others)
    clock = FeatureClock(FeatureRows(part, 0), others, _private_room)
    clock.table.copy_(rows)
    return clock


def _together(
    rows: torch.Tensor | None,
    parts: Partition | None,
    merge: str,
    engine: Engine,
    problem: Exception | None,
    timeout: float,
) -> FeatureClock:
    world, number = engine.world, engine.served.new_number()
    described = None
    if rows is not None and problem is None:
        digest = None if parts is None else parts.digest
        described = (tuple(rows.shape[1:]), rows.dtype, merge, digest, len(rows))
    found = agree(world, f"describe rows for {_WHERE}", described, problem, timeout)
    _check_same(world, found, parts)
    if rows is None:
        raise ConfigError(f"{_WHERE}: no table")
    kind = RowKind(tuple(rows.shape[1:]), rows.dtype)
    num_rows = len(rows) if parts is None else parts.num_rows
    even = [num_rows * rank // world.size for rank in range(world.size + 1)]
    spread = parts or RangePartition(even)
    clock, problem = attempt(lambda: _attached(engine, number, spread, kind, MERGES[merge]), None)
    try:
        agree(world, "attach rows", None, problem, timeout)
        _, problem = attempt(lambda: _fill(clock, world, rows, parts), None)
        agree(world, "fill rows in", None, problem, timeout)
    except Exception:
        engine.drop(number)
        raise
    if clock is None:
        raise ConfigError(f"{_WHERE}: no table")
    weakref.finalize(clock, engine.drop, number).atexit = False
    return clock


def _attached(
    engine: Engine, number: int, spread: Partition, kind: RowKind, merge: Merge
) -> FeatureClock:
    """See this machine's part, and get ready to hear from the others."""
    world = engine.world
    host_of_rank = world.host_of_rank
    own_host = host_of_rank[world.rank]
    partition = by_host(spread, host_of_rank)
    size = PartSize(partition.sizes[own_host], kind, world.size, len(world.ranks_of_host))
    num_bytes = size.num_bytes - HostLock.NUM_BYTES
    given = engine.room(f"{room_prefix(number)}table", 0, num_bytes, num_bytes)

    def room(name: str, num_bytes: int, terms: object) -> NDArray[np.uint8]:
        _check_terms(world, name, terms)
        given = engine.room(f"{room_prefix(number)}{name}", 0, num_bytes, [num_bytes, terms])
        return Segment.open(given.handle).array[HostLock.NUM_BYTES :]

    others = Neighbours(world.rank, world.name, partial(_watch, engine), engine.timeout)
    part = part_in(Segment.open(given.handle), size, merge, others)
    if len(world.first_ranks) == 1:
        return FeatureClock(FeatureRows(part, world.rank), others, room)
    away = {}
    for host in set(host_of_rank) - {own_host}:
        server = server_of(world.rank, host, host_of_rank)
        wire = EngineWire(engine, number, server)
        away[host] = AwayPart(wire, world.name(server), partial(_looks, engine, server), kind)
    guests = {
        rank: Guest(part, rank, world.name(rank), EngineWire(engine, number, rank).send)
        for rank, host in enumerate(host_of_rank)
        if host != own_host and server_of(rank, own_host, host_of_rank) == world.rank
    }
    by_server = {server_of(world.rank, host, host_of_rank): one for host, one in away.items()}
    engine.served.listeners[number] = Talk(guests, by_server)
    rows = FeatureRows(part, world.rank, Homes(partition, own_host, away))
    return FeatureClock(rows, others, room)


def _fill(
    clock: FeatureClock | None, world: World, rows: torch.Tensor, parts: Partition | None
) -> None:
    if clock is None:
        return  # what went wrong is known
    if parts is not None:
        own = parts.rows_of(world.rank)
        if (homes := clock.rows.homes) is not None:
            own = homes.partition.locate(own)[1]
        clock.table[torch.from_numpy(own)] = rows
    elif world.rank == 0 and clock.rows.homes is None:
        clock.table.copy_(rows)
    elif world.rank == 0:
        size = max(1, _CHUNK_BYTES // max(1, clock.kind.num_bytes))
        for start in range(0, len(rows), size):
            chunk = rows[start : start + size]
            clock.assign(torch.arange(start, start + len(chunk)), chunk)


def _looks(engine: Engine, rank: int) -> Callable[[], None]:
    """Begin to wait for a rank."""
    return engine.vigil(rank).look


def _watch(engine: Engine, rank: int) -> Callable[[], None]:
    """Begin to wait for a rank, and for whoever of this machine serves it."""
    world = engine.world
    own_host = world.host_of_rank[world.rank]
    ranks = {rank}
    if world.host_of_rank[rank] != own_host:
        ranks.add(server_of(rank, own_host, world.host_of_rank))
    looks = [_looks(engine, one) for one in ranks if one != world.rank]

    def look() -> None:
        for one in looks:
            one()

    return look


def _check_terms(world: World, name: str, terms: object) -> None:
    """Ranks of one machine agree by asking for memory; machines have to be asked."""
    if len(world.first_ranks) == 1:
        return
    found = agree(world, f"share {name}", terms, None, None)
    if any(other != terms for other in found):
        told = "; ".join(f"{world.name(rank)}: {other}" for rank, other in enumerate(found))
        raise ConfigError(
            f"ranks disagree about what they share as {name} ({told}). Give all the same settings."
        )


def _private_room(name: str, num_bytes: int, terms: object) -> NDArray[np.uint8]:
    return Segment.create(num_bytes).array


def _checked(tensor: object, merge: str) -> torch.Tensor:
    if merge not in MERGES:
        raise unknown_name(f"{_WHERE}.merge", merge, MERGES)
    if not isinstance(tensor, torch.Tensor) or tensor.ndim == 0:
        raise ConfigError(f"{_WHERE}: {type(tensor).__name__} given; give a tensor (rows, ...)")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ConfigError(f"{_WHERE}: the tensor is {tensor.layout}; rows are dense tensors")
    if MERGES[merge].needs_floats and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(
            f"{_WHERE}: merge={merge!r} adds and divides, which {tensor.dtype} rows cannot: use "
            "float or complex rows, or merge='last'"
        )
    return tensor.detach()


def _check_same(world: Any, found: list[Any], parts: Partition | None) -> None:
    kinds = {rank: entry[:4] for rank, entry in enumerate(found)}
    if any(kind != kinds[0] for kind in kinds.values()):
        told = "; ".join(
            f"{world.name(rank)}: rows {shape} {dtype}, merge={merge!r}"
            for rank, (shape, dtype, merge, _) in kinds.items()
        )
        raise ConfigError(f"{_WHERE}: ranks disagree ({told}), or give different partitions")
    sizes = [entry[4] for entry in found]
    wanted = [sizes[0]] * len(sizes) if parts is None else list(parts.sizes)
    if sizes != wanted:
        raise ConfigError(
            f"{_WHERE}: ranks bring {sizes} rows where {wanted} were expected. Build features in "
            "the same order and with the same rows on all ranks"
        )


def _only_rank(rank: int) -> str:
    return f"rank {rank}"


def _nobody(rank: int) -> Callable[[], None]:
    return lambda: None
