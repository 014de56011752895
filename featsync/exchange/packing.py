"""Rows of several features in one buffer, laid out alike by whoever sends and whoever receives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from featsync.row_kind import RowKind

__all__ = ["packed_bytes", "rows_within", "unpack"]

_ALIGNMENT = 16  # bytes: the largest element there is


def packed_bytes(counts: Sequence[int], kinds: Sequence[RowKind]) -> int:
    """Bytes that so many rows of each kind take."""
    return sum(_aligned(n * kind.num_bytes) for n, kind in zip(counts, kinds, strict=True))


def unpack(
    buffer: torch.Tensor, counts: Sequence[int], kinds: Sequence[RowKind]
) -> Iterator[torch.Tensor]:
    """Yield for each kind its ``(count, *row_shape)`` rows, views of ``buffer``.

    Args:
        buffer: ``(num_bytes,)`` uint8, aligned to 16 bytes.
        counts: Rows of each kind.
        kinds: The kinds, in order.
    """
    start = 0
    for count, kind in zip(counts, kinds, strict=True):
        num_bytes = count * kind.num_bytes
        shape = (count, *kind.shape)
        if num_bytes:
            yield buffer[start : start + num_bytes].view(kind.dtype).view(shape)
        else:
            yield torch.empty(shape, dtype=kind.dtype)
        start += _aligned(num_bytes)


def rows_within(num_bytes: int, counts: Sequence[int], kinds: Sequence[RowKind]) -> list[int]:
    """How many rows of each kind the first bytes of a buffer hold whole."""
    start = 0
    found = []
    for count, kind in zip(counts, kinds, strict=True):
        there = max(0, num_bytes - start) // kind.num_bytes if kind.num_bytes else count
        found.append(min(count, there))
        start += _aligned(count * kind.num_bytes)
    return found


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
