"""Shared memory without a name: nothing can be left behind, whoever is killed when.

A segment is a file in /dev/shm that never had a directory entry. Whoever holds a descriptor or a
mapping of it keeps it alive, and the kernel frees it with the last of them::

    creator   O_TMPFILE ─ posix_fallocate ─ mmap ─▶ array ◀─ any view, any tensor of it
                 │ fd                                 (fd and memory live as long as one of these)
                 ├─▶ /proc/<pid>/fd/<fd>    another process of this machine: `Segment.open(handle)`
                 └─▶ SCM_RIGHTS             a helper that was sent the descriptor: `Segment.from_fd`

All pages are reserved before the first byte is written, so that missing memory is an error that
says so and never a SIGBUS.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from featsync.errors import CapacityError, PeerError

__all__ = ["Bytes", "Place", "Segment", "SegmentHandle", "SegmentRegistry"]

Bytes = npt.NDArray[np.uint8]

_FOLDER = "/dev/shm"
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)


@dataclass(frozen=True)
class SegmentHandle:
    """Where another process of this machine finds a segment, as long as its holder keeps it.

    Attributes:
        pid: Process that holds it.
        fd: Descriptor in that process.
        num_bytes: Size.
        identity: Device and inode; tells it from whatever the descriptor may be by then.
    """

    pid: int
    fd: int
    num_bytes: int
    identity: tuple[int, int]


class Segment:
    """Memory that processes of one machine share.

    Make one with `create`, `open` or `from_fd`. The memory and the descriptor live until the
    segment and every array or tensor that views it are gone.
    """

    def __init__(self, fd: int, num_bytes: int, writable: bool) -> None:
        """Map a descriptor and own it from here on; use `from_fd`, which checks it first."""
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        memory = mmap.mmap(fd, max(num_bytes, 1), access=access)
        self._array = np.frombuffer(memory, np.uint8, num_bytes)
        self._fd = fd
        # Bound to the array, not to this object: whoever views the memory may still hand it on.
        weakref.finalize(self._array, os.close, fd).atexit = False

    @classmethod
    def create(cls, num_bytes: int) -> Segment:
        """Reserve new shared memory, filled with zeros.

        Raises:
            CapacityError: It is not there; nothing was written and nothing is left behind.
        """
        fd = _new_file(num_bytes)
        try:
            os.posix_fallocate(fd, 0, max(num_bytes, 1))
            return cls(fd, num_bytes, writable=True)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise _no_room(num_bytes) from error
            raise

    @classmethod
    def open(cls, handle: SegmentHandle, writable: bool = True) -> Segment:
        """Attach to a segment that another process of this machine holds.

        Raises:
            PeerError: That process is gone, dropped the segment, or may not be looked into.
        """
        path = f"/proc/{handle.pid}/fd/{handle.fd}"
        peer = f"process {handle.pid}"
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise PeerError(
                f"cannot attach {handle.num_bytes:,} bytes of shared memory of {peer} through "
                f"{path}: {error.strerror}. The process must be alive on this machine, hold the "
                "segment still, and belong to the same user.",
                peer,
            ) from error
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != handle.identity or found.st_size < handle.num_bytes:
            os.close(fd)
            raise PeerError(
                f"{path} is no longer the shared memory of {handle.num_bytes:,} bytes that it was: "
                f"{peer} dropped the segment, or another process has its number now. Keep the "
                "segment until everybody has attached.",
                peer,
            )
        return cls.from_fd(fd, handle.num_bytes, writable)

    @classmethod
    def from_fd(cls, fd: int, num_bytes: int, writable: bool) -> Segment:
        """Map a descriptor that was received; it belongs to the segment from here on.

        Raises:
            CapacityError: The file behind it is smaller than ``num_bytes``.
        """
        try:
            size = os.fstat(fd).st_size
            if size >= num_bytes:
                return cls(fd, num_bytes, writable)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        raise CapacityError(
            f"a segment of {num_bytes:,} bytes was announced, but its file has {size:,}: reading "
            "on would end the process with SIGBUS. Announce what was reserved."
        )

    @property
    def array(self) -> Bytes:
        """``(num_bytes,)``, starts on a page; not writable if it was attached so."""
        return self._array

    @property
    def num_bytes(self) -> int:
        """Size."""
        return len(self._array)

    @property
    def fd(self) -> int:
        """The descriptor, still owned by this segment: duplicate or send it, never close it."""
        return self._fd

    @property
    def handle(self) -> SegmentHandle:
        """What another process of this machine needs to attach, while this one holds on."""
        found = os.fstat(self._fd)
        identity = (found.st_dev, found.st_ino)
        return SegmentHandle(os.getpid(), self._fd, self.num_bytes, identity)

    def __repr__(self) -> str:
        return f"Segment({self.num_bytes:,} bytes, fd {self._fd})"


class Place(NamedTuple):
    """Where in which segment some memory lies.

    Attributes:
        number: Number of the segment, never used twice by one registry.
        fd: Its descriptor, open as long as the memory is referenced.
        num_bytes: Size of the segment.
        offset: Of the memory, in bytes from the segment's start.
    """

    number: int
    fd: int
    num_bytes: int
    offset: int


class _Entry(NamedTuple):
    number: int
    fd: int
    start: int
    num_bytes: int
    array: weakref.ref[Bytes]


class SegmentRegistry:
    """Knows by address which shared memory of this process lies in which segment.

    It keeps nothing alive: a segment is forgotten when its last view is gone. Safe to use from
    several threads; the finalizers take no lock.
    """

    def __init__(self) -> None:
        self._entries: tuple[_Entry, ...] = ()
        self._next_number = 0
        self._gone: deque[int] = deque()
        self._writing = threading.RLock()  # reentrant: the collector may run user code inside

    def allocate(self, num_bytes: int) -> Bytes:
        """Reserve shared memory, ``(num_bytes,)``, that lives as long as it is viewed.

        Raises:
            CapacityError: It is not there.
        """
        segment = Segment.create(num_bytes)
        self.add(segment)
        return segment.array

    def add(self, segment: Segment) -> int:
        """Make a segment known that came from elsewhere, for example a shared table.

        Returns:
            The number by which `find` and `numbers` report it.
        """
        array = segment.array
        start = array.__array_interface__["data"][0]
        with self._writing:
            for entry in self._entries:
                if entry.array() is array:
                    return entry.number
            number = self._next_number
            self._next_number += 1
            # The reference dies before the memory is unmapped, so that an address that the system
            # gives out again is never taken for the old segment.
            gone = self._gone
            reference = weakref.ref(array, lambda _: gone.append(number))
            entry = _Entry(number, segment.fd, start, len(array), reference)
            self._entries = (*self._living(), entry)
        return number

    def find(self, address: int, num_bytes: int) -> Place | None:
        """Look up which segment holds ``num_bytes`` at ``address``; ``None`` if none does."""
        for number, fd, start, size, array in self._entries:
            if start <= address and address + num_bytes <= start + size and array() is not None:
                return Place(number, fd, size, address - start)
        return None

    def numbers(self) -> frozenset[int]:
        """Numbers of all segments that somebody still views."""
        if self._gone:
            with self._writing:
                self._entries = self._living()
        return frozenset(entry.number for entry in self._entries)

    def _living(self) -> tuple[_Entry, ...]:
        gone = set()
        while self._gone:
            gone.add(self._gone.popleft())
        return tuple(entry for entry in self._entries if entry.number not in gone)


def _new_file(num_bytes: int) -> int:
    try:
        return os.open(
            _FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, stat.S_IRUSR | stat.S_IWUSR
        )
    except OSError as error:
        raise CapacityError(
            f"shared memory of {num_bytes:,} bytes needs {_FOLDER}, and that cannot be used here: "
            f"{error.strerror}. Mount a tmpfs there that this user may write (in a container: give "
            "it shared memory, for example --shm-size=8g or --ipc=host)."
        ) from error


def _no_room(num_bytes: int) -> CapacityError:
    try:
        room = os.statvfs(_FOLDER)
        free = (
            f"{room.f_bavail * room.f_frsize:,} bytes are free of {room.f_blocks * room.f_frsize:,}"
        )
    except OSError as error:
        free = f"its room is not known ({error.strerror})"
    return CapacityError(
        f"shared memory of {num_bytes:,} bytes is not to be had: {_FOLDER} is too full, {free}. "
        f"Share less, end other users of it, or make it larger (mount -o remount,size=… {_FOLDER}; "
        "in a container --shm-size). Nothing was written."
    )
