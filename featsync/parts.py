"""Brings the parts of a partitioned table together; collective.

The ranks of a machine lay their parts into one segment, one after the other in order of ranks, or
leave them in the files that they are mapped from, which the others map too. Rounds that all ranks
leave in the same way::

    describe   row kind, rows, partition   ranks that disagree: an error on all of them
    make room  the segment of each machine no room on one machine: an error on all ranks
    fill       own rows copied in          only then may anybody read
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from featsync.errors import ConfigError
from featsync.exchange.engine import Engine
from featsync.mapped import file_of
from featsync.offers import (
    Offer,
    SharedTensor,
    agree,
    attach,
    attempt,
    offer_of,
    room_for,
)
from featsync.partition import Partition, as_partition
from featsync.partitioned_table import Parts
from featsync.row_kind import RowKind
from featsync.world import World

__all__ = ["bring_together"]

_WHERE = "featsync.PartitionedFeature"

# Parts by rank; all of them in one, where they are; and what went wrong.
_Shared = tuple[dict[int, torch.Tensor], SharedTensor | None, Exception | None]


def bring_together(
    local_rows: torch.Tensor,
    partition: object,
    engine: Engine | None,
    timeout: float,
    name: str | None = None,
) -> Parts:
    """Make one table of what each rank brings.

    Args:
        local_rows: ``(n, *row_shape)``, the rows that this rank holds, by ascending id. Rows in
            private memory are copied where other ranks of this machine read them.
        partition: Bounds, or an owner per row; see `as_partition`.
        engine: Of the group; ``None`` for a single rank.
        timeout: Seconds to wait for the other ranks.
        name: Of the table, by which ranks see whether they build the same one.

    Raises:
        ConfigError: The parts do not make a table: all ranks are told.
        CapacityError: The machine's shared memory is too small.
        PeerError: Another rank could not do its part.
    """
    if engine is None:
        table, problem = _understood(local_rows, partition, 1)
        if table is None:
            raise problem or ConfigError(f"{_WHERE}: no partition")
        _check_parts(World(0, (0,), None, timeout), [_described(local_rows, table, name)])
        return Parts(table, _kind(local_rows), 0, {0: local_rows}, whole=local_rows)
    world, number = engine.world, engine.served.new_number()
    table, problem = _understood(local_rows, partition, world.size)
    described = None if table is None else _described(local_rows, table, name)
    all_described = agree(world, f"describe parts for {_WHERE}", described, problem, timeout)
    _check_parts(world, all_described)
    if table is None:
        raise ConfigError(f"{_WHERE}: no partition")
    readable, whole, problem = _shared(local_rows, table, world, timeout)
    if problem is None:
        engine.served.add(number, readable[world.rank])
    try:
        agree(world, "fill parts in", None, problem, timeout)
    except Exception:
        # As after a table's life: who was late may think that there is one, and still ask.
        engine.drop(number)
        raise
    parts = Parts(
        table,
        _kind(local_rows),
        world.rank,
        readable,
        None if whole is None else whole.tensor,
        None if whole is None else whole.segment,
        engine,
        number,
    )
    # The others may want rows of this part for longer than this rank wants theirs.
    weakref.finalize(parts, engine.drop, number).atexit = False
    return parts


def _understood(
    local_rows: object, partition: object, num_ranks: int
) -> tuple[Partition | None, Exception | None]:
    """The partition, or why there is none: that is for all ranks to hear."""
    problem = _unsuitable(local_rows)
    if problem is not None:
        return None, problem
    try:
        return as_partition(partition, num_ranks), None
    except ConfigError as error:
        return None, error


def _unsuitable(local_rows: object) -> ConfigError | None:
    if not isinstance(local_rows, torch.Tensor) or local_rows.ndim == 0:
        return ConfigError(
            f"{_WHERE}: local_rows is {type(local_rows).__name__}; give a tensor (rows, "
            "*row_shape), with no rows where this rank holds none"
        )
    if local_rows.device.type != "cpu" or local_rows.layout != torch.strided:
        return ConfigError(
            f"{_WHERE}: local_rows is {local_rows.layout} on {local_rows.device}; parts are dense "
            "tensors on the CPU"
        )
    return None


def _kind(rows: torch.Tensor) -> RowKind:
    return RowKind(tuple(rows.shape[1:]), rows.dtype)


def _described(rows: torch.Tensor, partition: Partition, name: str | None) -> tuple[Any, ...]:
    return name, _kind(rows), len(rows), partition.sizes, partition.digest


def _check_parts(world: World, described: list[Any]) -> None:
    """Refuse, with the same words on all ranks, what does not make one table."""
    _check_names(world, [name for name, *_ in described])
    kinds = {rank: kind for rank, (_, kind, *_) in enumerate(described)}
    if len(set(kinds.values())) > 1:
        found = "; ".join(
            f"{world.name(rank)}: {kind.shape} {kind.dtype}" for rank, kind in kinds.items()
        )
        raise ConfigError(f"{_WHERE}: ranks disagree about what a row is ({found})")
    digests = [digest for *_, digest in described]
    if any(digest != digests[0] for digest in digests):
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        raise ConfigError(
            f"{_WHERE}: {world.names(odd)} gave another partition than {world.name(0)}; give the "
            "same on all ranks"
        )
    sizes = described[0][3]
    wrong = [
        f"{world.name(rank)} brings {num_rows} where the partition gives it {sizes[rank]}"
        for rank, (_, _, num_rows, *_) in enumerate(described)
        if num_rows != sizes[rank]
    ]
    if wrong:
        raise ConfigError(
            f"{_WHERE}: parts leave rows out or overlap: {'; '.join(wrong)}. local_rows are the "
            "rows that a rank owns, by ascending id"
        )


def _check_names(world: World, names: list[str | None]) -> None:
    if len(set(names)) > 1:
        found = ", ".join(
            f"{world.names([rank for rank, other in enumerate(names) if other == name])} "
            f"{'one without a name' if name is None else repr(name)}"
            for name in dict.fromkeys(names)
        )
        raise ConfigError(
            f"{_WHERE}: ranks build different features at the same time ({found}). Build them in "
            "the same order on all ranks: a set, for example, has an order of its own on each"
        )


def _shared(rows: torch.Tensor, partition: Partition, world: World, timeout: float) -> _Shared:
    """Let the ranks of a machine read each other's parts; the last problem is not told yet."""
    ranks = world.ranks_of_host
    if len(ranks) == 1:
        agree(world, "tell which parts are in files", False, None, timeout)
        agree(world, "make room for parts", None, None, timeout)
        return {world.rank: rows}, None, None
    in_files = agree(world, "tell which parts are in files", _is_in_file(rows), None, timeout)
    if all(in_files[rank] or partition.sizes[rank] == 0 for rank in ranks):
        return _mapped(rows, world, timeout)
    return _copied(rows, partition, world, timeout)


def _is_in_file(rows: torch.Tensor) -> bool:
    """Whether a file holds the rows as they are, for other ranks to map."""
    if rows.numel() == 0 or rows.is_conj() or rows.is_neg():
        return False
    file = file_of(rows)
    return file is not None and not file.is_deleted


def _mapped(rows: torch.Tensor, world: World, timeout: float) -> _Shared:
    """Map the files that the others have mapped; a part without rows is nowhere."""
    offer = offer_of(SharedTensor(rows, None)) if len(rows) else None
    offers = agree(world, "make room for parts", offer, None, timeout)

    def part_of(rank: int) -> torch.Tensor:
        theirs = offers[rank]
        if rank == world.rank:
            return rows
        return rows[:0] if theirs is None else attach(theirs).tensor

    nothing: dict[int, torch.Tensor] = {}
    readable, problem = attempt(
        lambda: {rank: part_of(rank) for rank in world.ranks_of_host}, nothing
    )
    return readable, None, problem


def _copied(rows: torch.Tensor, partition: Partition, world: World, timeout: float) -> _Shared:
    """Lay the parts of this machine into one segment."""
    ranks = world.ranks_of_host
    shape = (sum(partition.sizes[rank] for rank in ranks), *rows.shape[1:])
    offer: Offer | None = None
    joint = SharedTensor(rows, None)
    problem: Exception | None = None
    if world.is_first_of_host:
        joint, problem = attempt(lambda: room_for(shape, rows.dtype), joint)
        offer = None if problem is not None else offer_of(joint)
    offers = agree(world, "make room for parts", offer, problem, timeout)
    theirs = offers[ranks[0]]
    if not world.is_first_of_host and theirs is not None:
        joint, problem = attempt(lambda: attach(theirs), joint)
    readable: dict[int, torch.Tensor] = {}
    if problem is None:
        start = 0
        for rank in ranks:
            readable[rank] = joint.tensor[start : start + partition.sizes[rank]]
            start += partition.sizes[rank]
        readable[world.rank].copy_(rows.detach())
    return readable, joint if len(ranks) == world.size else None, problem
