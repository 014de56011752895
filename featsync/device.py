"""Where rows are delivered: all that differs between CPU and CUDA sits here.

==============  =======================================  =====================================
                CPU                                      CUDA
==============  =======================================  =====================================
delivered rows  pooled blocks (`featsync.pool`)          torch's caching allocator
home rows       gathered straight into them              gathered into pinned staging, then one
                                                         asynchronous copy on a side stream
copies done     when `Device.execute` returns            the same: it waits for the side stream, on
                                                         the worker's thread
==============  =======================================  =====================================

The form with staging and streams is one class; what it asks of CUDA is four small calls
(`Streams`), which have a CPU twin, so that every line of it is tested without a GPU. What CUDA
itself does with them has not been run yet: no GPU was at hand.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.errors import ConfigError, FeatureError
from featsync.move import Call, Gather, Move
from featsync.pool import Pool, private_block
from featsync.row_items import put_rows, take_rows

_STAGING_BLOCKS = 32  # gathers of one minibatch, one or two a feature and layer


class Device(ABC):
    """Makes memory for delivered rows and fills it."""

    torch_device: torch.device

    @abstractmethod
    def empty(self, pool: Pool, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Give uninitialised memory for rows to deliver; on the CPU, out of ``pool``."""

    @abstractmethod
    def execute(self, moves: Sequence[Move]) -> None:
        """Carry out the moves in order; they are done on return.

        Raises:
            FeatureError: A row lies outside its table.
        """

    @abstractmethod
    def hand_over(self, delivered: Sequence[torch.Tensor]) -> None:
        """Make the consumer's current stream an owner of the tensors."""


class CpuDevice(Device):
    """Rows are delivered where the CPU reads them.

    Used by one thread at a time.
    """

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self._scratch = Pool()

    def empty(self, pool: Pool, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Take warm memory from the pool."""
        return pool.take(shape, dtype)

    def execute(self, moves: Sequence[Move]) -> None:
        """Carry out the moves; they are done on return."""
        for move in moves:
            if isinstance(move, Call):
                move.action()
            else:
                self._gather(move)

    def hand_over(self, delivered: Sequence[torch.Tensor]) -> None:
        """The CPU knows no streams."""

    def _gather(self, move: Gather) -> None:
        if move.positions is None:
            _select(move, out=move.target)
            return
        # Two steps, since torch gathers or scatters but does not do both; the scratch is warm.
        shape = (len(move.rows), *move.source.shape[1:])
        rows = self._scratch.take(shape, move.source.dtype)
        _select(move, out=rows)
        put_rows(move.target, move.positions, rows)


def _select(move: Gather, out: torch.Tensor) -> None:
    """Gather rows on the CPU; only when torch refuses, look for the id that is at fault."""
    try:
        take_rows(move.source, move.rows, out)
    except (IndexError, RuntimeError) as error:
        size = len(move.source)
        outside = move.rows[(move.rows < 0) | (move.rows >= size)]
        if len(outside) == 0:
            raise
        raise FeatureError(
            f"feature {move.what}: id {int(outside[0])} is outside its table of {size} rows "
            f"(allowed 0 to {size - 1}): table and graph do not match"
        ) from error


class Streams(ABC):
    """What `StagedDevice` asks of an accelerator's runtime."""

    @abstractmethod
    def side(self) -> AbstractContextManager[object]:
        """Run what is queued inside on a stream of featsync's own."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the CPU until the side stream is through."""

    @abstractmethod
    def used_here(self, tensor: torch.Tensor) -> None:
        """Say that the current stream uses ``tensor``, made on the side stream."""

    @abstractmethod
    def staging_block(self, num_bytes: int) -> NDArray[np.uint8]:
        """Host memory that the accelerator copies from without the CPU."""


class CpuStreams(Streams):
    """The twin for tests: everything is done at once, in order."""

    def side(self) -> AbstractContextManager[object]:
        """No stream."""
        return nullcontext()

    def synchronize(self) -> None:
        """Everything is done already."""

    def used_here(self, tensor: torch.Tensor) -> None:
        """The CPU's memory knows no streams."""

    def staging_block(self, num_bytes: int) -> NDArray[np.uint8]:
        """Plain memory."""
        return private_block(num_bytes)


class CudaStreams(Streams):
    """CUDA's runtime, through torch."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def side(self) -> AbstractContextManager[object]:
        """Queue on the side stream."""
        return torch.cuda.stream(self._stream)

    def synchronize(self) -> None:
        """Block until the side stream is through."""
        self._stream.synchronize()  # type: ignore[no-untyped-call]

    def used_here(self, tensor: torch.Tensor) -> None:
        """Keep the caching allocator from reusing the memory too early."""
        tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def staging_block(self, num_bytes: int) -> NDArray[np.uint8]:
        """Pinned memory."""
        pinned: NDArray[np.uint8] = torch.empty(
            num_bytes, dtype=torch.uint8, pin_memory=True
        ).numpy()
        return pinned


class StagedDevice(Device):
    """Rows are delivered on an accelerator, through staging memory and a side stream."""

    def __init__(self, torch_device: torch.device, streams: Streams) -> None:
        self.torch_device = torch_device
        self._streams = streams
        self._staging = Pool(_STAGING_BLOCKS, streams.staging_block)

    def empty(self, pool: Pool, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Ask the accelerator's own allocator, on the side stream."""
        with self._streams.side():
            return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def execute(self, moves: Sequence[Move]) -> None:
        """Gather home rows on the CPU, queue copies and gathers of device rows, wait for them."""
        with self._streams.side():
            # Copies read staging until they are done: it may return to its pool only then.
            staged = [self._queue(move) for move in moves]
            self._streams.synchronize()
            del staged

    def hand_over(self, delivered: Sequence[torch.Tensor]) -> None:
        """Keep the allocator from reusing their memory before the consumer's work is done."""
        for tensor in delivered:
            self._streams.used_here(tensor)

    def _queue(self, move: Move) -> torch.Tensor | None:
        if isinstance(move, Call):
            move.action()
            return None
        staged = None
        if move.source.device == move.target.device and move.source.device.type != "cpu":
            rows = move.source.index_select(0, move.rows.to(move.source.device))
        else:
            shape = (len(move.rows), *move.source.shape[1:])
            rows = staged = self._staging.take(shape, move.source.dtype)
            _select(move, out=rows)
        if move.positions is None:
            move.target.copy_(rows, non_blocking=True)
        else:
            positions = move.positions.to(move.target.device, non_blocking=True)
            rows = rows.to(move.target.device, non_blocking=True)
            move.target.index_copy_(0, positions, rows)
        return staged


def open_device(name: str | torch.device | None) -> Device:
    """Make the device that rows are delivered to.

    Args:
        name: As torch names devices; ``None`` is the CPU, where host tables lie.

    Raises:
        ConfigError: There is no such device here.
    """
    if name is None or torch.device(name).type == "cpu":
        return CpuDevice()
    check_device(name)
    device = torch.device(name)
    return StagedDevice(device, CudaStreams(device))


def check_device(name: str | torch.device | None) -> None:
    """Refuse a device that is not there.

    Raises:
        ConfigError: Not a device, not a kind that featsync delivers to, or not present.
    """
    try:
        device = torch.device("cpu" if name is None else name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"sync_feature.device = {name!r} is not a device; it can be cpu, cuda or cuda:N"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"sync_feature.device = {name!r}: rows are delivered on cpu or cuda, not {device.type}"
        )
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"sync_feature.device = {name!r} is not there: torch {torch.__version__} sees {count} "
            f"CUDA devices. Leave device out to deliver on the CPU."
        )


def free_bytes(device: Device) -> int:
    """Memory that can still be allocated on ``device``, by the system's own account."""
    if device.torch_device.type == "cuda":
        return int(torch.cuda.mem_get_info(device.torch_device)[0])
    with open("/proc/meminfo", encoding="ascii") as table:  # noqa: PTH123 - a table, not a file
        fields = dict(line.split(":", 1) for line in table)
    return int(fields["MemAvailable"].split()[0]) * 1024
