"""Integer arrays in one small file: delta-coded, split into byte planes, compressed by xz.

Layout of the file, before compression, is that of ``numpy.savez``: one entry an array, named as
the array. An array of ``n`` unsigned integers is kept as ``(k, n)`` bytes, plane by plane from the
lowest byte up, ``k`` as small as its largest value allows. The high planes are nearly constant,
which is what makes them compress well. Nothing in the file is ever executed: pickles are refused.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


def save(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write non-negative integer arrays, each ``(n,)``, as one compressed file."""
    planes: dict[str, Any] = {name: _to_planes(array) for name, array in arrays.items()}
    buffer = io.BytesIO()
    np.savez(buffer, **planes)
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def load(path: Path) -> dict[str, Integers]:
    """Read back what `save` wrote, as ``(n,)`` arrays of int64."""
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes())), allow_pickle=False) as planes:
        return {name: _from_planes(planes[name]) for name in planes.files}


def to_deltas(lengths: Integers, values: Integers) -> Integers:
    """Replace ascending values by the steps between them, list by list.

    Args:
        lengths: ``(lists,)``, how many values each list has.
        values: ``(lengths.sum(),)``, the lists one after another, each ascending from 0 or more.

    Returns:
        Of the same shape: the first value of every list, then the steps to the next ones.
    """
    deltas = np.diff(values, prepend=0)
    first = _first_positions(lengths)
    deltas[first] = values[first]
    return deltas


def from_deltas(lengths: Integers, deltas: Integers) -> Integers:
    """Undo `to_deltas`."""
    sums = np.cumsum(deltas)
    first = _first_positions(lengths)
    before = sums[first] - deltas[first]
    values: Integers = sums - np.repeat(before, lengths[lengths > 0])
    return values


def _first_positions(lengths: Integers) -> Integers:
    filled = lengths[lengths > 0]
    first: Integers = np.cumsum(filled) - filled
    return first


def _to_planes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    values = np.ascontiguousarray(array, dtype="<u8")
    largest = int(values.max(initial=0))
    planes = max(1, (largest.bit_length() + 7) // 8)
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, 8)[:, :planes].T)


def _from_planes(planes: npt.NDArray[np.uint8]) -> Integers:
    values = np.zeros(planes.shape[1], dtype=np.int64)
    for position, plane in enumerate(planes):
        values |= plane.astype(np.int64) << (8 * position)
    return values
