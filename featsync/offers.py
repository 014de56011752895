"""How the ranks of a machine come to see each other's tables: described, offered, attached.

Steps of a collective, each of which all ranks leave in the same way (`agree`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from featsync.errors import FeatsyncError, PeerError
from featsync.mapped import MappedFile, file_of, map_tensor
from featsync.pool import bytes_of
from featsync.segment import Segment, SegmentHandle
from featsync.world import World

__all__ = [
    "Description",
    "Offer",
    "SharedTensor",
    "agree",
    "attach",
    "attempt",
    "description_of",
    "offer_of",
    "reserve",
    "room_for",
    "view_of",
]

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class SharedTensor:
    """A table that all ranks of a machine see.

    Attributes:
        tensor: ``(num_rows, *row_shape)``; contiguous, unless it is mapped from a file, where it
            keeps its strides.
        segment: The shared memory that holds it; ``None`` if it is mapped from a file.
    """

    tensor: torch.Tensor
    segment: Segment | None


class Description(NamedTuple):
    """What ranks have to agree on.

    Attributes:
        shape: Of a table.
        dtype: Of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


class Offer(NamedTuple):
    """Where the other ranks of a machine find a table: exactly one of the first two is set."""

    handle: SegmentHandle | None
    file: MappedFile | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def agree(
    world: World, purpose: str, value: _T, problem: Exception | None, timeout: float | None
) -> list[_T]:
    """Exchange values; where a rank has a problem, it raises that and the others say so."""
    text = None if problem is None else str(problem) or type(problem).__name__
    answers = world.exchange(purpose, (value, text), timeout)
    if problem is not None:
        raise problem
    for rank, (_, said) in enumerate(answers):
        if said is not None:
            name = world.name(rank)
            raise PeerError(f"{name} could not {purpose}: {said}", name)
    return [value for value, _ in answers]


def attempt(action: Callable[[], _T], otherwise: _T) -> tuple[_T, Exception | None]:
    """Give what an action gives and no problem, or something else and the problem."""
    try:
        return action(), None
    except (FeatsyncError, OSError) as error:
        return otherwise, error  # raised in the next round, when the others can hear of it


def description_of(tensor: torch.Tensor) -> Description:
    """Describe a table."""
    return Description(tuple(tensor.shape), tensor.dtype)


def reserve(tensor: torch.Tensor) -> SharedTensor:
    """Make room for a table, not yet filled; a table in a file needs none."""
    if not (tensor.is_conj() or tensor.is_neg()):
        file = file_of(tensor)
        if file is not None and not file.is_deleted:
            return SharedTensor(tensor, None)
    return room_for(tuple(tensor.shape), tensor.dtype)


def room_for(shape: tuple[int, ...], dtype: torch.dtype) -> SharedTensor:
    """Make room in shared memory, not yet filled.

    Raises:
        CapacityError: There is none.
    """
    segment = Segment.create(bytes_of(shape, dtype))
    return SharedTensor(view_of(segment, shape, dtype), segment)


def view_of(segment: Segment, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of a segment's memory, which lives as long as it is viewed."""
    return torch.from_numpy(segment.array).view(dtype).view(shape)


def offer_of(part: SharedTensor) -> Offer:
    """Say where the other ranks of this machine find a table."""
    tensor, segment = part.tensor, part.segment
    handle = None if segment is None else segment.handle
    file = file_of(tensor) if segment is None else None
    return Offer(handle, file, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def attach(offer: Offer) -> SharedTensor:
    """See a table that another rank of this machine offers.

    Raises:
        PeerError: It is not there any more.
    """
    if offer.file is not None:
        return SharedTensor(map_tensor(offer.file, offer.shape, offer.strides, offer.dtype), None)
    if offer.handle is None:
        raise PeerError("a table was offered that lies nowhere: please report it", "first rank")
    segment = Segment.open(offer.handle)
    return SharedTensor(view_of(segment, offer.shape, offer.dtype), segment)
