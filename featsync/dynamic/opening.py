"""Brings a table whose rows change into memory that the ranks of a machine share; collective."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.dynamic.board import Board
from featsync.dynamic.clock import FeatureClock
from featsync.dynamic.merge import MERGES, Merge
from featsync.dynamic.waits import Neighbours
from featsync.errors import ConfigError, unknown_name
from featsync.exchange.engine import Engine
from featsync.exchange.rooms import room_prefix
from featsync.futex import LINE_BYTES
from featsync.host_lock import HostLock
from featsync.offers import agree, attempt
from featsync.partition import Partition, as_partition
from featsync.row_kind import RowKind
from featsync.segment import Segment

__all__ = ["clock_in", "open_clock", "shared_rows", "size_of"]

_WHERE = "featsync.DynamicFeature"


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
        ``(num_rows, *kind.shape)``.

    Raises:
        ConfigError: Another rank asked for it on other terms.
        CapacityError: There is no memory for it.
    """
    num_bytes = clock.num_rows * kind.num_bytes
    memory = clock.room(name, num_bytes, terms)
    return _rows_in(memory, clock.num_rows, kind)


def _alone(rows: torch.Tensor, merge: Merge, timeout: float) -> FeatureClock:
    kind = RowKind(tuple(rows.shape[1:]), rows.dtype)
    segment = Segment.create(size_of(len(rows), kind, 1))
    HostLock.lay(segment.array[: HostLock.NUM_BYTES])
    others = Neighbours(0, _only_rank, _nobody, timeout)
    clock = clock_in(segment, len(rows), kind, 1, merge, others, _private_room)
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
    if problem is None and len(world.ranks_of_host) < world.size:
        problem = ConfigError(
            f"{_WHERE}: the ranks are on {len(world.first_ranks)} machines; rows that change are "
            "shared by the ranks of one machine only. Give it a process_group of one machine."
        )
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

    def room(name: str, num_bytes: int, terms: object) -> NDArray[np.uint8]:
        given = engine.room(f"{room_prefix(number)}{name}", 0, num_bytes, [num_bytes, terms])
        return Segment.open(given.handle).array[HostLock.NUM_BYTES :]

    others = Neighbours(
        world.rank,
        world.name,
        lambda rank: _nothing if rank == world.rank else engine.vigil(rank).look,
        engine.timeout,
    )
    clock, problem = attempt(
        lambda: _attached(engine, number, num_rows, kind, MERGES[merge], others, room), None
    )
    if problem is None and clock is not None:
        if parts is not None:
            clock.table[torch.from_numpy(parts.rows_of(world.rank))] = rows
        elif world.rank == 0:
            clock.table.copy_(rows)
    try:
        agree(world, "fill rows in", None, problem, timeout)
    except Exception:
        engine.drop(number)
        raise
    if clock is None:
        raise ConfigError(f"{_WHERE}: no table")
    weakref.finalize(clock, engine.drop, number).atexit = False
    return clock


def _attached(
    engine: Engine,
    number: int,
    num_rows: int,
    kind: RowKind,
    merge: Merge,
    others: Neighbours,
    room: Any,
) -> FeatureClock:
    num_ranks = engine.world.size
    num_bytes = size_of(num_rows, kind, num_ranks) - HostLock.NUM_BYTES
    given = engine.room(f"{room_prefix(number)}table", 0, num_bytes, num_bytes)
    segment = Segment.open(given.handle)
    return clock_in(segment, num_rows, kind, num_ranks, merge, others, room)


def clock_in(
    segment: Segment,
    num_rows: int,
    kind: RowKind,
    num_ranks: int,
    merge: Merge,
    others: Neighbours,
    room: Any,
) -> FeatureClock:
    """See a table in memory of `size_of`, with a lock laid at its beginning.

    Args:
        segment: The memory.
        num_rows: Of the table.
        kind: What a row is.
        num_ranks: That share it.
        merge: What becomes of rows that several write.
        others: Who they are.
        room: Gives further memory that they share; see `FeatureClock`.
    """
    lock = HostLock(
        segment.array[: HostLock.NUM_BYTES], others.rank, "a dynamic feature", others.name_of
    )
    memory = segment.array[HostLock.NUM_BYTES :]
    board = Board(memory, num_ranks)
    memory = memory[_padded(Board.num_bytes(num_ranks)) :]
    wanted, rows = memory[:num_rows], memory[_padded(num_rows) :]
    table = _rows_in(rows, num_rows, kind)
    return FeatureClock(table, wanted, segment, board, lock, merge, others, room)


def size_of(num_rows: int, kind: RowKind, num_ranks: int) -> int:
    """Bytes of a table with its board and lock."""
    board = _padded(Board.num_bytes(num_ranks))
    return HostLock.NUM_BYTES + board + _padded(num_rows) + num_rows * kind.num_bytes


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


def _rows_in(memory: NDArray[np.uint8], num_rows: int, kind: RowKind) -> torch.Tensor:
    num_bytes = num_rows * kind.num_bytes
    if num_bytes == 0:
        return torch.zeros((num_rows, *kind.shape), dtype=kind.dtype)
    return torch.from_numpy(memory[:num_bytes]).view(kind.dtype).view(num_rows, *kind.shape)


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


def _nobody(rank: int) -> Any:
    return _nothing


def _nothing() -> None:
    """A rank does not wait for itself."""
