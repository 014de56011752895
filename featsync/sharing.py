"""One copy of each table on every machine, for all ranks there.

The first rank of a machine copies its tables into segments, or leaves them in the files that they
are mapped from; the others attach. In rounds that all ranks leave in the same way::

    describe   keys, shapes, dtypes         ranks that disagree: an error on all of them
    make room  handles, or what went wrong  no room on one machine: an error on all ranks
    fill       a sign after each portion
    attach     done, or what went wrong     only then may a first rank let go of anything
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from featsync.errors import ConfigError
from featsync.offers import (
    Description,
    SharedTensor,
    agree,
    attach,
    attempt,
    description_of,
    offer_of,
    reserve,
)
from featsync.world import World

if TYPE_CHECKING:
    from featsync.plan import FeatureKey

__all__ = ["SharedTensor", "share_tensors"]


_Tables = Mapping["FeatureKey", torch.Tensor]
_Descriptions = Mapping["FeatureKey", Description]
_Shared = dict["FeatureKey", SharedTensor]

_PORTION_BYTES = 1 << 30  # copied between two meetings of the ranks, in a second or so
_MAX_NAMED = 8  # differing features that an error lists


def share_tensors(
    tensors: _Tables | Exception | None, world: World, timeout: float | None = None
) -> _Shared:
    """Give all ranks of a machine the same tables, held there once; collective.

    A table in private memory is copied, straight into shared memory; what is mapped from a file
    stays there, and the other ranks map it too. Memory is given back when the last process lets go
    of it, however it ends.

    Args:
        tensors: The tables, on the CPU. Only the first rank of each machine needs them, the others
            may give ``None``; what they give is only compared. An exception says why this rank has
            none: it is raised here, and the other ranks are told.
        world: The ranks that take part.
        timeout: Seconds to wait for the other ranks; ``None`` means what the world was given.

    Raises:
        ConfigError: Ranks disagree about keys, shapes or dtypes, or a first rank gave none. All
            ranks raise it.
        CapacityError: The machine's shared memory is too small, on the rank that would fill it.
        PeerError: Another rank could not do its part; the message says which, and what it said.
        PeerTimeoutError: Some ranks did not come in time.
    """
    problem = tensors if isinstance(tensors, Exception) else _unsuitable(tensors)
    given = None if isinstance(tensors, Exception) or problem is not None else tensors
    described = None if given is None else {key: description_of(t) for key, t in given.items()}
    all_described = agree(world, "describe the tables to share", described, problem, timeout)
    tables = _checked(world, all_described)

    sources = given if given is not None and world.is_first_of_host else {}
    nothing: _Shared = {}
    shared, problem = attempt(lambda: {key: reserve(sources[key]) for key in sources}, nothing)
    offers = {key: offer_of(part) for key, part in shared.items()}
    all_offers = agree(world, "make room for shared tables", offers, problem, timeout)

    if not world.is_first_of_host:
        offers = all_offers[world.ranks_of_host[0]]
        shared, problem = attempt(lambda: {key: attach(offers[key]) for key in offers}, nothing)
    _fill(world, tables, sources, shared, timeout)
    agree(world, "attach to shared tables", None, problem, timeout)
    return shared


def _unsuitable(tensors: _Tables | None) -> ConfigError | None:
    for key, tensor in (tensors or {}).items():
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
            return ConfigError(
                f"featsync.share: the table of feature {key} is {tensor.layout} on "
                f"{tensor.device}; a table to share is a dense tensor on the CPU. Convert it, or "
                "leave it out."
            )
    return None


def _checked(world: World, described: Sequence[_Descriptions | None]) -> _Descriptions:
    """Return what all agree on, or raise the same error on all ranks."""
    lacking = [rank for rank in world.first_ranks if described[rank] is None]
    if lacking:
        raise ConfigError(
            f"featsync.share: {world.names(lacking)} gave no tables, but is the first rank of its "
            "machine. The first rank of each machine has to bring them "
            f"({world.names(world.first_ranks)}); the others may give None."
        )
    reference = described[0] or {}
    present = {rank: tables for rank, tables in enumerate(described) if tables is not None}
    keys = dict.fromkeys(key for tables in present.values() for key in tables)
    differing = [
        f"{key}: " + _who_has_what(world, {r: tables.get(key) for r, tables in present.items()})
        for key in keys
        if any(tables.get(key) != reference.get(key) for tables in present.values())
    ]
    if differing:
        more = len(differing) - _MAX_NAMED
        raise ConfigError(
            "featsync.share: ranks disagree about the tables to share. "
            + "; ".join(differing[:_MAX_NAMED])
            + (f"; and {more} more" if more > 0 else "")
            + ". Give the same features with the same shape and dtype on all ranks."
        )
    return reference


def _who_has_what(world: World, found: Mapping[int, Description | None]) -> str:
    kinds = dict.fromkeys(found.values())
    return ", ".join(
        f"{kind if kind is not None else 'nothing'} on "
        f"{world.names([rank for rank, other in found.items() if other == kind])}"
        for kind in kinds
    )


def _fill(
    world: World, tables: _Descriptions, sources: _Tables, shared: _Shared, timeout: float | None
) -> None:
    """Copy tables in. All ranks meet after each portion: a slow copy is no silent peer."""
    copied_bytes = 0
    for key, (shape, dtype) in tables.items():
        source, part = sources.get(key), shared.get(key)
        row_bytes = max(1, prod(shape[1:]) * torch.empty(0, dtype=dtype).element_size())
        num_rows = shape[0] if shape else 1
        step = max(1, _PORTION_BYTES // row_bytes)
        for start in range(0, num_rows, step):
            if source is not None and part is not None and part.segment is not None:
                rows = slice(start, start + step) if shape else ...
                part.tensor[rows].copy_(source.detach()[rows])
            copied_bytes += min(step, num_rows - start) * row_bytes
            if copied_bytes >= _PORTION_BYTES:
                world.exchange("fill shared tables", None, timeout)
                copied_bytes = 0
