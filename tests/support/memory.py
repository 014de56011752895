"""Memory that pools are given, counted."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from featsync.pool import Pool, private_block


class CountedMemory:
    """Makes blocks.

    Attributes:
        sizes: Bytes of each block that it made.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, num_bytes: int) -> NDArray[np.uint8]:
        self.sizes.append(num_bytes)
        return private_block(num_bytes)


def counted_pool(**options: Any) -> tuple[Pool, CountedMemory]:
    """A pool, and the memory that it asks."""
    memory = CountedMemory()
    return Pool(allocate=memory, **options), memory
