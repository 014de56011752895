"""Warm memory: delivered tensors come from a pool and return to it by themselves.

Fresh memory costs more than the rows that are copied into it (each page is faulted in and zeroed
by the kernel), so in steady state nothing is allocated. Who owns a block when::

    pool ──take()──▶ the caller and all who hold the tensor or a view ──last one gone──▶ pool

The way back needs no call: each tensor wraps a new NumPy view of its block, and a
`weakref.finalize` on that view hands the block back once no tensor, array, storage or autograd
node refers to it. A finalizer runs inside any allocation of any thread, so it only appends to a
deque, which is atomic and takes no lock.

Delivered tensors cannot be resized: ``resize_`` fails on them. ``set_`` makes a tensor one
of other memory, and does not touch the block.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
_HEADROOM = 8  # a new block is one eighth larger than asked, for the next, slightly larger batch

# NumPy has no bfloat16 and older releases no way to alias one: such rows are made as integers of
# the same size and then viewed.
_BY_ITEM_SIZE = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


def private_block(num_bytes: int) -> NDArray[np.uint8]:
    """Allocate ``(num_bytes,)`` uint8 of this process's memory, aligned to a cache line."""
    raw = np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes]


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a contiguous tensor."""
    return prod(shape) * torch.empty(0, dtype=dtype).element_size()


def tensor_in(block: NDArray[np.uint8], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of a block's memory; it, its views and arrays made of it keep ``block`` alive.

    Args:
        block: ``(num_bytes,)`` with as many bytes as the tensor has, at least one.
        shape: Of the tensor.
        dtype: Any dtype that torch has.
    """
    return torch.from_numpy(_integers(block, dtype)).view(dtype).view(shape)


def _integers(block: NDArray[np.uint8], dtype: torch.dtype) -> NDArray[Any]:
    """View bytes as items of the size of ``dtype``."""
    return block.view(_BY_ITEM_SIZE[torch.empty(0, dtype=dtype).element_size()])


class Pool:
    """Blocks of one kind of memory, for tensors of varying length.

    Args:
        spare: Free blocks that are kept at most; more are given back to the system.
        allocate: Makes a block of so many bytes, for example in shared memory.
    """

    def __init__(
        self, spare: int = 3, allocate: Callable[[int], NDArray[np.uint8]] = private_block
    ) -> None:
        self._spare = spare
        self._allocate = allocate
        self._free: deque[NDArray[np.uint8]] = deque()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Give an uninitialised CPU tensor whose memory nobody else uses.

        It stays the caller's as long as anything refers to it or to a view of it.

        Args:
            shape: Wanted shape; its memory is contiguous.
            dtype: Any dtype that torch has.
        """
        num_bytes = bytes_of(shape, dtype)
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        block = self._block(num_bytes)
        view = _integers(block[:num_bytes], dtype)
        # On the very array that the tensor is made of: NumPy's views of views refer to the block,
        # not to the view between.
        weakref.finalize(view, self._free.append, block).atexit = False
        return torch.from_numpy(view).view(dtype).view(shape)

    @property
    def free_blocks(self) -> int:
        """How many blocks wait to be taken."""
        return len(self._free)

    def _block(self, num_bytes: int) -> NDArray[np.uint8]:
        """Take the smallest free block that is large enough, else make one."""
        # Finalizers only ever append, and only the pool's user pops: what is seen here stays.
        candidates = sorted((self._free.popleft() for _ in range(len(self._free))), key=len)
        chosen = next((i for i, block in enumerate(candidates) if len(block) >= num_bytes), None)
        block = None if chosen is None else candidates.pop(chosen)
        if block is None and candidates:
            del candidates[0]  # too small for what is asked now: a larger one takes its place
        self._free.extend(candidates[max(0, len(candidates) - self._spare) :])
        if block is None:
            block = self._allocate(num_bytes + num_bytes // _HEADROOM)
        return block
