"""A word of shared memory that threads of several processes sleep on: Linux ``futex(2)``.

::

    sleeper   look at the word ─▶ done? ── no ─▶ sleep, if the word is still what was seen ─▶ again
    waker     do what is waited for ─▶ change the word ─▶ wake all sleepers

The kernel compares and puts to sleep in one step, so no wake-up falls between the two. Sleeping
holds no GIL and needs no descriptor, and waking does not let go of the GIL: with other threads
busy, getting it back could take longer than everything else here.

Order of memory: words and counters are aligned and written by one plain store of numpy. On x86-64
stores become visible in the order in which the program made them and loads are made in order, so
who sees a word changed also sees what was written before it. (Stores that go round the cache are
the exception; who uses them fences them, as ``memcpy`` does.) Other processors promise less, and
Python has no means to ask them for it: they are refused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from featsync.errors import ConfigError

__all__ = ["LINE_BYTES", "SLICE_S", "FutexWord", "aligned"]

LINE_BYTES = 64  # what cores hand to each other: who writes in one line disturbs nobody in another
SLICE_S = 0.5  # longest sleep at a time, after which the waiter looks around

_MACHINE = "x86_64"
_SYS_FUTEX = 202
_FUTEX_WAIT = 0  # not the private kind: processes share the memory
_FUTEX_WAKE = 1
_ALL = 2**31 - 1


_Timespec = ctypes.c_int64 * 2  # seconds, nanoseconds

_ARGUMENTS = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
_sleeping = ctypes.CDLL(None, use_errno=True).syscall  # without the GIL
_sleeping.argtypes, _sleeping.restype = _ARGUMENTS, ctypes.c_long
_waking = ctypes.PyDLL(None, use_errno=True).syscall  # with it
_waking.argtypes, _waking.restype = _ARGUMENTS, ctypes.c_long


def aligned(memory: NDArray[np.uint8], num_bytes: int, purpose: str) -> NDArray[np.uint8]:
    """Check memory that is to hold words, and cut it to size.

    Args:
        memory: ``(at least num_bytes,)``, from the start of a line; of a segment, for example.
        num_bytes: How much is needed.
        purpose: What for, in words, for the error.

    Raises:
        ConfigError: It is too small or begins inside a line, or the processor is refused.
    """
    if platform.machine() != _MACHINE:
        raise ConfigError(
            f"{purpose}: signals in shared memory rely on the order of stores of {_MACHINE}, and "
            f"this machine is {platform.machine()}. Use what sends messages instead "
            "(transport='p2p')."
        )
    offset = memory.ctypes.data % LINE_BYTES
    if len(memory) < num_bytes or offset:
        raise ConfigError(
            f"{purpose}: {len(memory)} bytes that begin {offset} bytes into a line of "
            f"{LINE_BYTES}; it needs {num_bytes} from the start of one"
        )
    return memory[:num_bytes]


class FutexWord:
    """One 32-bit word to sleep on. Keeps its memory alive; any thread may use it at any time."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        """Take the first four bytes of some memory, which must be a multiple of 4 itself."""
        self._word = memory[:4].view(np.uint32)
        self._address = memory.ctypes.data

    @property
    def value(self) -> int:
        """What it is now."""
        return int(self._word[0])

    def wake(self) -> None:
        """Wake all that sleep on it, in all processes; 1.5 µs where nobody does."""
        if _waking(_SYS_FUTEX, self._address, _FUTEX_WAKE, _ALL, None) < 0:
            raise _error("FUTEX_WAKE")

    def wait_until(
        self, is_done: Callable[[], bool], timeout_s: float, check: Callable[[], None] | None
    ) -> bool:
        """Sleep until something is done; asked at first and whenever the word has changed.

        Args:
            is_done: Whether it is, without waiting.
            timeout_s: Limit in seconds; 0 asks once.
            check: Called every half second while it is not done. What it raises ends the wait.

        Returns:
            Whether it is done; if not, the limit is over.
        """
        deadline = time.monotonic() + timeout_s
        next_check = time.monotonic() + SLICE_S
        while True:
            seen = self.value  # before asking, so that a change in between keeps us awake
            if is_done():
                return True
            now = time.monotonic()
            if now >= deadline:
                return False
            if now >= next_check:
                next_check = now + SLICE_S
                if check is not None:
                    check()
            self._sleep(seen, min(deadline, next_check) - now)

    def _sleep(self, seen: int, seconds: float) -> None:
        nanoseconds = max(0, int(seconds * 1e9))
        limit = _Timespec(*divmod(nanoseconds, 1_000_000_000))
        if _sleeping(_SYS_FUTEX, self._address, _FUTEX_WAIT, seen, ctypes.byref(limit)) < 0:
            error = _error("FUTEX_WAIT")
            # It changed meanwhile, the slice is over, or a signal came: Python handles it next.
            if error.errno not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
                raise error


def _error(operation: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{operation}: {os.strerror(code)}")
