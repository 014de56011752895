"""Tensors of every dtype, filled with random bits, and how to compare them bit for bit."""

from __future__ import annotations

import numpy as np
import torch

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A contiguous tensor of random bits: NaN payloads and -0.0 included."""
    item_bytes = torch.empty(0, dtype=dtype).element_size()
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, item_bytes), dtype=np.uint8)
    raw = raw & 1 if dtype == torch.bool else raw
    if raw.size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(raw).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in order of its elements, for comparisons that see every bit."""
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor
