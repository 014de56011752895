"""Rows read and put as items of so many bytes, which spares the look at what they are made of.

ns a row of a million on one core, into warm memory; nobody holds the GIL meanwhile:

============  ==============  ============  ===============  ===========
bytes a row   index_select    numpy.take    index_copy_      numpy.put
============  ==============  ============  ===============  ===========
4             13              1
32            29 to 47        10            34               5
128           35 to 90        20 to 60      77               20
512           110             110           370              120
============  ==============  ============  ===============  ===========
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["put_rows", "take_rows"]

_NARROW = 256  # bytes; torch may use several threads for more


def take_rows(source: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Do ``out[:] = source[rows]`` on the CPU.

    Args:
        source: ``(num_source_rows, *row_shape)``, any strides.
        rows: ``(n,)`` int32 or int64.
        out: ``(n, *row_shape)``, same dtype as ``source``.

    Raises:
        IndexError: A row lies outside ``source``.
    """
    is_plain = _is_plain(source) and _is_plain(out) and source.dtype == out.dtype
    if not (is_plain and len(rows) and 0 < _row_bytes(out) <= _NARROW):
        torch.index_select(source, 0, rows, out=out)
        return
    numbers = rows.numpy()
    if numbers.min() < 0 or numbers.max() >= len(source):
        raise IndexError(f"rows {numbers.min()} to {numbers.max()} of {len(source)}")
    np.take(_items(source), numbers, out=_items(out), mode="clip")


def put_rows(target: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> None:
    """Do ``target[positions] = rows``.

    Args:
        target: ``(num_rows, *row_shape)``, on any device.
        positions: ``(n,)`` int64, distinct.
        rows: ``(n, *row_shape)``, same dtype as ``target``, on any device.

    Raises:
        IndexError: A position lies outside ``target``.
    """
    if not (_is_plain(target) and _is_plain(rows)):
        device = target.device
        target.index_copy_(0, positions.to(device), rows.to(device))
    elif rows.numel():
        np.put(_items(target), positions.numpy(), _items(rows))


def _is_plain(rows: torch.Tensor) -> bool:
    """Whether the rows lie in memory one after the other, as they are."""
    is_lazy = rows.is_conj() or rows.is_neg()
    return rows.device.type == "cpu" and rows.is_contiguous() and not is_lazy


def _row_bytes(rows: torch.Tensor) -> int:
    return rows[0].numel() * rows.element_size()


def _items(rows: torch.Tensor) -> NDArray[Any]:
    """View ``(n, *row_shape)`` as ``(n,)`` items."""
    # Not `reshape`, which leaves a stride that does not matter, of a single row, as it is.
    width = rows[0].numel()
    as_bytes = rows.detach().as_strided((len(rows), width), (width, 1)).view(torch.uint8).numpy()
    items: NDArray[Any] = as_bytes.view(np.dtype((np.void, as_bytes.shape[1])))
    return items[:, 0]
