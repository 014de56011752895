"""Worker ``process``: a helper program copies the rows, on a core and an interpreter of its own.

It sees shared memory only, so it serves tables that were shared (`featsync.share`) or mapped from
files, and delivers into shared blocks that the trainer uses without a copy::

    trainer                               mover (`featsync.mover`)
    table    ── descriptor, once ───────▶ mapped, read
    block    ── descriptor, once ───────▶ mapped, written     ◀─ delivered tensors are views of it
    ids      ── copied to a small block ▶ read
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from featsync.device import Device
from featsync.errors import ConfigError
from featsync.mapped import MappedFile, extent_of, file_of
from featsync.move import Call, Gather, Move
from featsync.mover import Layout
from featsync.pool import Pool
from featsync.segment import Bytes, SegmentRegistry
from featsync.table import Table, TensorTable
from featsync.workers.contract import Worker
from featsync.workers.mover_link import Job, MoverLink, ProcessTicket

_STAGING_BLOCKS = 8  # ids of that many moves are on their way at once without new memory


class _Held(NamedTuple):
    """A table outside the worker's own blocks; holding it keeps its address from being reused."""

    tensor: torch.Tensor
    number: int
    offset: int


class ProcessWorker(Worker):
    """Has a helper process carry out moves between shared memory, mapped files and its blocks.

    Tables that it has served stay referenced until it is closed.

    Args:
        device: Where rows are delivered; the CPU.
        timeout: Seconds without a sign of life of the process.

    Raises:
        ConfigError: The device is not the CPU.
    """

    runs_calls = False

    def __init__(self, device: Device, timeout: float) -> None:
        if device.torch_device.type != "cpu":
            raise ConfigError(
                f'sync_feature.worker = "process" delivers on the CPU, not on '
                f'{device.torch_device}. Use worker="thread", or leave device out.'
            )
        self._registry = SegmentRegistry()
        self._staging = Pool(_STAGING_BLOCKS, self._registry.allocate)
        self._sent: set[int] = set()
        self._held: dict[tuple[int, int], _Held] = {}
        self._numbers_of_files: dict[tuple[str, int], int] = {}
        self._link = MoverLink(timeout)

    @property
    def pid(self) -> int:
        """Number of the helper process."""
        return self._link.pid

    def allocate(self, num_bytes: int) -> Bytes:
        """Make a block, ``(num_bytes,)`` uint8, of shared memory that the helper can fill.

        It lives as long as something views it. Once it is dropped the helper lets go of it too,
        at the next `submit`.

        Raises:
            CapacityError: There is no room in /dev/shm.
        """
        return self._registry.allocate(num_bytes)

    def admit(self, table: Table) -> None:
        """Accept a table that lies in shared memory or in a file; see `Worker.admit`."""
        if not isinstance(table, TensorTable):
            raise _foreign(str(table.key))
        if table.segment is not None:
            self._registry.add(table.segment)
        self._layout(str(table.key), table.tensor, "its table lies")

    def submit(self, moves: Sequence[Move], is_watched: bool = False) -> ProcessTicket:
        """Send the moves to the helper; see `Worker.submit`."""
        self._unmap_dropped()
        held: list[torch.Tensor] = []
        jobs = [self._job(move, held) for move in moves]
        return self._link.gather(jobs, held)

    def close(self) -> None:
        """End the helper; see `Worker.close`."""
        self._link.close()
        self._held.clear()

    def _unmap_dropped(self) -> None:
        if dropped := self._sent - self._registry.numbers():
            self._link.unmap(sorted(dropped))
            self._sent -= dropped

    def _job(self, move: Move, held: list[torch.Tensor]) -> Job:
        if isinstance(move, Call):
            raise _foreign(move.what)
        _check(move)
        rows = self._shared(move.rows)
        positions = None if move.positions is None else self._shared(move.positions)
        held += [move.source, move.target, rows]
        held += [] if positions is None else [positions]
        return (
            move.what,
            self._layout(move.what, move.source, "its table lies"),
            self._layout(move.what, rows, "its ids lie"),
            self._layout(move.what, move.target, "its rows are to be delivered"),
            None if positions is None else self._layout(move.what, positions, "positions lie"),
        )

    def _shared(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return row numbers in shared memory: as they are, or copied."""
        if numbers.numel() == 0 or self._registry.find(*extent_of(numbers)) is not None:
            return numbers
        staged = self._staging.take(tuple(numbers.shape), numbers.dtype)
        return staged.copy_(numbers)

    def _layout(self, what: str, tensor: torch.Tensor, which: str) -> Layout:
        """Describe a tensor to the helper, who is sent the memory that it lies in if it is new."""
        address, num_bytes = extent_of(tensor)
        number, offset = None, 0
        if num_bytes:
            number, offset = self._place(what, tensor, (address, num_bytes), which)
        item_bytes = tensor.element_size()
        strides = tuple(stride * item_bytes for stride in tensor.stride())
        return Layout(number, offset, tuple(tensor.shape), strides, item_bytes)

    def _place(
        self, what: str, tensor: torch.Tensor, extent: tuple[int, int], which: str
    ) -> tuple[int, int]:
        place = self._registry.find(*extent)
        if place is not None:
            if place.number not in self._sent:
                self._link.map(place.number, place.fd, place.num_bytes)
                self._sent.add(place.number)
            return place.number, place.offset
        address, num_bytes = extent
        for (start, size), held in self._held.items():
            if start <= address and address + num_bytes <= start + size:
                return held.number, held.offset + address - start
        file = file_of(tensor) if tensor.device.type == "cpu" else None
        number = None if file is None else self._number_of_file(file)
        if file is None or number is None:
            raise _private(what, tensor, which)
        self._held[extent] = _Held(tensor, number, file.offset)
        return number, file.offset

    def _number_of_file(self, file: MappedFile) -> int | None:
        """Send a file, or shared memory of somebody else; ``None`` if there is no way to it."""
        number = self._numbers_of_files.get(file.identity)
        if number is not None:
            return number
        fd = _descriptor_of(file.identity) if file.is_deleted else file.open()
        if fd is None:
            return None
        number = -1 - len(self._numbers_of_files)  # the registry's numbers are not negative
        try:
            self._link.map(number, fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        self._numbers_of_files[file.identity] = number
        return number


def _descriptor_of(identity: tuple[str, int]) -> int | None:
    """Duplicate the descriptor by which this process holds memory without a name."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found = entry.stat()
            device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
            if (device, found.st_ino) == identity:
                return os.dup(int(entry.name))
        except OSError:
            continue  # closed by now, among them the one that lists them
    return None


def _check(move: Gather) -> None:
    """Refuse rows whose bytes are not what is to be delivered."""
    source, target = move.source, move.target
    if source.dtype != target.dtype:
        found = f"its table holds {source.dtype}, to be delivered as {target.dtype}"
    elif source.is_conj() or source.is_neg():
        found = "its table is conjugated or negated lazily (call resolve_conj or resolve_neg)"
    else:
        return
    raise ConfigError(
        f'feature {move.what}: {found}, but sync_feature.worker = "process" moves rows as bytes. '
        'Store it as it is delivered, or use worker="thread".'
    )


def _foreign(what: str) -> ConfigError:
    return ConfigError(
        f'feature {what}: sync_feature.worker = "process" cannot serve it, since only its own '
        'read() can give its rows, and that lives in this process. Use worker="thread".'
    )


def _private(what: str, tensor: torch.Tensor, which: str) -> ConfigError:
    return ConfigError(
        f'feature {what}: sync_feature.worker = "process" cannot serve it, since {which} in memory '
        f"of this process alone ({tensor.device}, {tuple(tensor.shape)} {tensor.dtype}). Put its "
        "table into shared memory with store = featsync.share(store), map it from a file, or use "
        'worker="thread".'
    )
