"""What one row of a table is."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

__all__ = ["RowKind"]


class RowKind(NamedTuple):
    """Shape and dtype of a row.

    Attributes:
        shape: Of the row.
        dtype: Of its elements.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of a row."""
        return prod(self.shape) * torch.empty(0, dtype=self.dtype).element_size()
