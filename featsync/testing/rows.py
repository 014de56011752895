"""Rows of random bits, and the bits of rows: for comparisons that see NaN payloads and -0.0."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["bits", "random_bits"]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Make a contiguous tensor of random bits.

    Args:
        dtype: Any dtype with whole bytes; ``torch.bool`` gets zeros and ones.
        shape: Of the tensor.
        seed: The same one gives the same bits.
    """
    item_bytes = torch.empty(0, dtype=dtype).element_size()
    most = 1 if dtype == torch.bool else 255
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, most + 1, (*shape, item_bytes), dtype=np.uint8)
    if raw.size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(raw).view(dtype).view(shape)


def bits(rows: torch.Tensor) -> torch.Tensor:
    """Give the bytes of a tensor, in the order of its elements."""
    return rows.contiguous().view(-1).view(torch.uint8)
