"""What ranks and machines write to each other about one feature's rows.

A letter says in words what to ``do``; its numbers are rows (values), then row numbers. Letters of a
rank to a machine are carried out in the order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.exchange.frames import Frame
from featsync.exchange.id_code import decode, encode
from featsync.row_kind import RowKind

__all__ = ["KIND", "Letter", "Wire", "letter", "rows_of", "values_of"]

KIND = "dynamic"
_ALIGNMENT = 16  # bytes, where a frame's numbers begin, too: the largest element there is

Rows = NDArray[np.int64]
Letter = tuple[dict[str, Any], Sequence[NDArray[np.uint8]]]


class Wire(Protocol):
    """Takes letters to one other rank, in order."""

    def send(self, letter: Letter) -> None:
        """Send now; not for finalizers."""

    def post(self, letter: Letter) -> None:
        """Send soon; takes no lock."""


def letter(
    do: str, rows: Rows | None = None, values: Sequence[torch.Tensor] = (), **words: Any
) -> Letter:
    """Write a letter.

    Args:
        do: What it is about.
        rows: ``(n,)``, row numbers, 0 or more.
        values: ``(m, *row_shape)`` each, on the CPU.
        words: Whatever else it says, as JSON has it.
    """
    numbers = []
    for part in values:
        data = part.contiguous().flatten().view(torch.uint8).numpy()
        words.setdefault("values", []).append([len(part), len(data)])
        numbers += [data, np.empty(-len(data) % _ALIGNMENT, np.uint8)]
    if rows is not None:
        code, data = encode(rows)
        words["rows"] = [len(rows), code, len(data)]
        numbers.append(data)
    return {"kind": KIND, "do": do, **words}, numbers


def rows_of(frame: Frame) -> Rows | None:
    """The row numbers of a letter, ``(n,)``."""
    if "rows" not in frame.words:
        return None
    num_rows, code, num_bytes = frame.words["rows"]
    return decode(code, frame.numbers[len(frame.numbers) - num_bytes :], num_rows)


def values_of(frame: Frame, kinds: Sequence[RowKind]) -> list[torch.Tensor]:
    """The rows of a letter, ``(m, *row_shape)`` of each kind; views of its memory."""
    start = 0
    found = []
    for (num_rows, num_bytes), kind in zip(frame.words["values"], kinds, strict=True):
        if num_bytes:
            data = torch.from_numpy(frame.numbers[start : start + num_bytes])
            found.append(data.view(kind.dtype).view(num_rows, *kind.shape))
        else:
            found.append(torch.empty((num_rows, *kind.shape), dtype=kind.dtype))
        start += num_bytes + -num_bytes % _ALIGNMENT
    return found
