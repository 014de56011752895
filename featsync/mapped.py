"""Tables in files: which file backs a tensor, and maps of .npy files without loading them.

The system knows what lies at an address (``/proc/self/maps``); tensors and arrays do not: they
lose the name of their file at the first view. Only shared mappings count. A private one (NumPy's
``mmap_mode="c"``) may hold rows that the file does not have.
"""

from __future__ import annotations

import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from featsync.errors import ConfigError, PeerError

__all__ = ["MappedFile", "extent_of", "file_at", "file_of", "map_tensor", "open_npy"]

_DELETED = " (deleted)"


@dataclass(frozen=True)
class MappedFile:
    """The part of a file that backs some memory of this process.

    Attributes:
        path: Of the file, as it was when it was mapped.
        offset: Of the memory's first byte, in bytes from the file's start.
        identity: Device and inode as the system lists them for mappings; equal for every mapping
            of the file on this machine, by whatever process.
        is_writable: Whether writing to the memory writes the file.
        is_deleted: Whether the file has no name any more; `path` then leads nowhere.
    """

    path: str
    offset: int
    identity: tuple[str, int]
    is_writable: bool
    is_deleted: bool

    def open(self) -> int:
        """Open the file and return a descriptor.

        Raises:
            PeerError: It cannot be opened as it was, or another file has its name now.
        """
        try:
            fd = os.open(self.path, (os.O_RDWR if self.is_writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise PeerError(
                f"the table mapped from {self.path} cannot be mapped here: {error.strerror}. All "
                "processes that share it need the file under this path.",
                self.path,
            ) from error
        if _identity(fd) != self.identity:
            os.close(fd)
            raise PeerError(
                f"{self.path} is no longer the file that the table was mapped from: it was "
                "replaced while it was in use. Load the table again.",
                self.path,
            )
        return fd


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return address and length in bytes of the memory that a strided CPU tensor reaches into.

    Example:
        >>> extent_of(torch.zeros(4, 3)[:, :2])[1]
        44
    """
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def file_of(tensor: torch.Tensor) -> MappedFile | None:
    """Tell which file backs a CPU tensor; ``None`` for memory that is no file's.

    Memory without a name that processes share (`Segment`) is reported as a deleted file. Reads a
    table of the system that grows with the process: about a millisecond, so ask once a tensor.
    """
    address, num_bytes = extent_of(tensor)
    return file_at(address, num_bytes) if num_bytes else None


def file_at(address: int, num_bytes: int) -> MappedFile | None:
    """Tell which file backs ``num_bytes`` from ``address`` on; ``None`` if no single one does."""
    found: MappedFile | None = None
    reached = address
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:  # noqa: PTH123
        for line in maps:
            start, end = (int(number, 16) for number in line.split(" ", 1)[0].split("-"))
            if end <= reached:
                continue
            # One mapping can be listed in several pieces, which then follow each other.
            piece = _piece(line, reached - start) if start <= reached else None
            if piece is None or (
                found is not None and not _continues(found, address, piece, reached)
            ):
                return None
            found = found or piece
            reached = end
            if reached >= address + num_bytes:
                return found
    return None


def map_tensor(
    file: MappedFile, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Map part of a file as another process did; nothing is read yet.

    Args:
        file: What `file_of` said there; writable if it was so.
        shape: Of the tensor.
        strides: In elements.
        dtype: Of the elements.

    Raises:
        PeerError: The file cannot be opened, or is another one by now.
    """
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    num_bytes = (last + 1) * torch.empty(0, dtype=dtype).element_size()
    skipped = file.offset % mmap.ALLOCATIONGRANULARITY
    fd = file.open()
    try:
        access = mmap.ACCESS_WRITE if file.is_writable else mmap.ACCESS_READ
        memory = mmap.mmap(fd, skipped + num_bytes, access=access, offset=file.offset - skipped)
    except ValueError as error:
        raise PeerError(
            f"{file.path} is shorter than the table that was mapped from it. Load it again.",
            file.path,
        ) from error
    finally:
        os.close(fd)
    array = np.frombuffer(memory, np.uint8, num_bytes, skipped)
    return quiet_tensor(array).view(dtype).as_strided(shape, strides)


def open_npy(path: str | os.PathLike[str]) -> torch.Tensor:
    """Map a .npy file read-only, without loading it; C and Fortran order keep their strides.

    Writing to the tensor ends the process: the file is not to be changed.

    Raises:
        ConfigError: There is no such file, it is no .npy file, or torch has no such dtype.
    """
    try:
        array = np.load(Path(path), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"{path} cannot be mapped as a .npy file: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ConfigError(f"{path} is an archive of arrays; give a .npy file of one array")
    try:
        return quiet_tensor(array)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} holds {array.dtype}, which torch cannot map: {error}") from error


def quiet_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """View an array as a tensor without torch's warning that it is not writable."""
    return torch.from_numpy(np.asarray(_Writable(array)))


class _Writable:
    """Presents an array as writable; keeps it alive as long as what is made of it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def _piece(line: str, offset: int) -> MappedFile | None:
    """Read one line of the table: ``start-end rwxs offset device inode  path``."""
    fields = line.rstrip("\n").split(None, 5)
    if len(fields) < 6 or fields[1][3] != "s" or int(fields[4]) == 0:
        return None
    path = re.sub(r"\\012", "\n", fields[5])
    return MappedFile(
        path=path.removesuffix(_DELETED),
        offset=int(fields[2], 16) + offset,
        identity=(fields[3], int(fields[4])),
        is_writable="w" in fields[1],
        is_deleted=path.endswith(_DELETED),
    )


def _continues(first: MappedFile, address: int, piece: MappedFile, reached: int) -> bool:
    return piece.identity == first.identity and piece.offset - first.offset == reached - address


def _identity(fd: int) -> tuple[str, int] | None:
    """Return a file's identity as the system lists it for mappings, by mapping a page of it."""
    if os.fstat(fd).st_size == 0:
        return None
    memory = mmap.mmap(fd, 1, access=mmap.ACCESS_READ)
    address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    found = file_at(address, 1)
    return None if found is None else found.identity
