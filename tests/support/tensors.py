"""Tensors of every dtype, with bits that are easily lost, and how to compare them bit for bit."""

from __future__ import annotations

import torch

from featsync.testing.rows import bits, random_bits

INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTEGERS, *COMPLEX)
_SAME_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def awkward_rows(dtype: torch.dtype, shape: tuple[int, ...] = (20, 3)) -> torch.Tensor:
    """Rows of any bits; floats among them -0.0, infinities, quiet and signalling NaNs."""
    rows = random_bits(dtype, shape, seed=7)
    if dtype in INTEGERS:
        return rows
    parts = (torch.view_as_real(rows) if dtype.is_complex else rows).view(-1)
    as_bits = parts.view(_SAME_SIZE[parts.element_size()])
    infinity = torch.tensor(float("inf"), dtype=parts.dtype).view(as_bits.dtype)
    parts[0] = -0.0
    as_bits[1] = -1  # a NaN with its sign and its whole payload
    as_bits[2] = infinity + 1  # a signalling NaN
    as_bits[3] = infinity
    return rows


def same_bits(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every bit, wherever they lie."""
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return False
    return torch.equal(bits(found.cpu()), bits(wanted.cpu()))
