"""Tell the C library to keep freed memory: "stock with a tuned allocator" in comparisons.

Large tensors are normally mapped anew for each allocation and handed back when freed, so every
minibatch touches its memory for the first time. With these settings it is kept and used again.
"""

from __future__ import annotations

import ctypes
from typing import Final

from featsync.errors import ConfigError

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_MAX: Final = -4

# The same two settings for a process that is about to start.
KEEP_ENVIRONMENT: Final = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**40),
}


def keep_memory() -> None:
    """Apply `KEEP_ENVIRONMENT` to this process, from now on and for good.

    Raises:
        ConfigError: The C library is not glibc, or refuses.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # -1: never trim. Both calls return 1 on success.
    if mallopt is None or not (mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1)):
        raise ConfigError(
            "allocator = 'keep' needs glibc's mallopt, which is not there; leave it out"
        )
