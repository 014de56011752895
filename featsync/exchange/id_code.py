"""Row numbers on the wire; sorted ones are mostly a small step from the one before.

::

    code 0   raw     num_ids x uint32 (uint64 where a number needs it)
    code 1   steps   num_ids x uint8 steps; where a step is 255, the true one (uint32) follows at
                     the end, in order

The shorter form is sent: at most 4 bytes an id for tables under 2^32 rows, about 1 where more than
one row in 255 is wanted. Sorting also lets the owner read its rows in order of their addresses.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from featsync.errors import PlanError

__all__ = ["decode", "encode"]

_ESCAPE = 255
_RAW32, _STEPS, _RAW64 = 0, 1, 2

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.int64]


def encode(numbers: Numbers) -> tuple[int, Bytes]:
    """Encode row numbers.

    Args:
        numbers: ``(n,)``, 0 or more; only such as never fall become shorter.

    Returns:
        The code, and the bytes.

    Example:
        >>> encode(np.array([7, 8, 8, 20]))
        (1, array([ 7,  1,  0, 12], dtype=uint8))
    """
    if len(numbers) == 0:
        return _RAW32, np.empty(0, np.uint8)
    if numbers.max() > np.iinfo(np.uint32).max:
        return _RAW64, numbers.astype("<u8").view(np.uint8)
    steps = np.diff(numbers, prepend=0)
    if steps.min() < 0:
        return _RAW32, numbers.astype("<u4").view(np.uint8)
    is_long = steps >= _ESCAPE
    num_long = int(np.count_nonzero(is_long))
    if len(numbers) + 4 * num_long >= 4 * len(numbers):
        return _RAW32, numbers.astype("<u4").view(np.uint8)
    short = np.where(is_long, _ESCAPE, steps).astype(np.uint8)
    return _STEPS, np.concatenate([short, steps[is_long].astype("<u4").view(np.uint8)])


def decode(code: int, data: Bytes, num_ids: int) -> Numbers:
    """Undo `encode`.

    Raises:
        PlanError: The bytes are not what a peer of this version sends.
    """
    if code == _RAW32 and len(data) == 4 * num_ids:
        return data.view("<u4").astype(np.int64)
    if code == _RAW64 and len(data) == 8 * num_ids:
        return data.view("<u8").astype(np.int64)
    if code == _STEPS and len(data) >= num_ids:
        steps = data[:num_ids].astype(np.int64)
        is_long = steps == _ESCAPE
        longer = data[num_ids:]
        if len(longer) == 4 * int(np.count_nonzero(is_long)):
            # The long steps begin wherever the short ones end: no address to read words from.
            steps[is_long] = np.frombuffer(longer.tobytes(), "<u4")
            return np.cumsum(steps)
    raise PlanError(f"{num_ids} ids came as {len(data)} bytes in code {code}: please report it")
