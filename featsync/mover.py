"""The helper program of worker ``process``: copies rows between memory that it was sent.

Needs NumPy and the standard library only, so that it starts in a tenth of a second and stays small;
it is started by its path, since importing the package would bring torch along. It ends when the
trainer does, however that ends. The two talk over a socket that keeps messages apart, in JSON::

    trainer ──▶ mover   ["map", number, num_bytes]  and the descriptor of a segment or file
                        ["unmap", [number, …]]
                        ["gather", ticket, [job, …], is_last]
    mover ──▶ trainer   ["alive"]                           at least once a second while it works
                        ["done", ticket, seconds, failure]  failure: null, or [what, kind, …]

A job is ``[what, source, rows, target, positions]``: the name of the feature, and where four arrays
lie (`Layout`), of which ``positions`` may be null. Rows are bytes to the mover.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Started by path: the package's own folder must not hide modules of other packages, and NumPy
    # comes from where the trainer has it.
    sys.path[:] = [folder for folder in sys.path if folder != __file__.rpartition("/")[0]]
    sys.path.append(sys.argv[3])

import fcntl
import json
import mmap
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

MAX_MESSAGE_BYTES = 1 << 17
# Sent to whole groups of processes: the trainer decides what they mean, and its end is the mover's.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGN_S = 0.5  # between signs of life while working
_LOOK_S = 1.0  # between looks at whether the trainer is still there, while idle
_CHUNK_BYTES = 4 << 20  # copied between two signs of life
_SCRATCH_BYTES = 256 << 10  # of rows on their way, small enough to stay in the processor's cache
_ITEMS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class Layout(NamedTuple):
    """Where an array lies in what was mapped.

    Attributes:
        number: Of the segment or file; ``None`` for an array without elements.
        offset: Of its first byte.
        shape: Of the array, rows first.
        strides: In bytes.
        item_bytes: Of one element.
    """

    number: int | None
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int


class OutsideError(Exception):
    """A row number lies outside what it counts.

    Attributes:
        kind: ``"rows"`` of the source or ``"positions"`` in the target.
        row: The first one outside.
        size: How many rows there are.
    """

    def __init__(self, kind: str, row: int, size: int) -> None:
        super().__init__(kind, row, size)
        self.kind = kind
        self.row = row
        self.size = size


def has_whole_rows(layout: Layout) -> bool:
    """Tell whether the bytes of each row lie together, in order."""
    expected = layout.item_bytes
    for size, stride in zip(reversed(layout.shape[1:]), reversed(layout.strides[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def view(memory: Any, layout: Layout, whole_rows: bool) -> Array:
    """View mapped memory as rows.

    Returns:
        ``(num_rows,)`` with rows as single elements if ``whole_rows``, else in its own shape.
    """
    if not whole_rows:
        item = _ITEMS[layout.item_bytes]
        return np.ndarray(layout.shape, item, memory, layout.offset, layout.strides)
    row_bytes = layout.item_bytes * int(np.prod(layout.shape[1:], dtype=np.int64))
    return np.ndarray(layout.shape[:1], f"V{row_bytes}", memory, layout.offset, layout.strides[:1])


def check_inside(kind: str, rows: Array, size: int) -> None:
    """Check row numbers, ``(n,)`` of any integer type.

    Raises:
        OutsideError: One is negative or not less than ``size``.
    """
    # Read as unsigned, negative numbers are the largest: one pass instead of two.
    if len(rows) and int(rows.view(f"u{rows.itemsize}").max()) >= size:
        outside = rows[(rows < 0) | (rows >= size)]
        raise OutsideError(kind, int(outside[0]), size)


def gather(
    source: Array, rows: Array, target: Array, positions: Array | None, sign: Callable[[], None]
) -> None:
    """Store ``source[rows]`` at ``target[positions]``, or in ``target`` as it is.

    Args:
        source: ``(num_source_rows, …)``, any strides.
        rows: ``(n,)``, checked.
        target: ``(num_target_rows, …)``, same row shape and type.
        positions: ``(n,)``, checked; ``None``: rows of the target in order.
        sign: Called between chunks.
    """
    row_bytes = max(1, source.itemsize * int(np.prod(source.shape[1:], dtype=np.int64)))
    # np.take is the fastest, but copies the source first if it is not contiguous.
    takes = source.flags.c_contiguous and source.ndim == 1
    if takes and positions is None and target.flags.c_contiguous:
        for part in _chunks(len(rows), _CHUNK_BYTES // row_bytes):
            np.take(source, rows[part], out=target[part], mode="clip")
            sign()
        return
    num_chunk_rows = max(1, _SCRATCH_BYTES // row_bytes)
    scratch = np.empty((num_chunk_rows if takes else 0, *source.shape[1:]), source.dtype)
    for part in _chunks(len(rows), num_chunk_rows):
        chosen = rows[part]
        found = scratch[: len(chosen)]
        if takes:
            np.take(source, chosen, out=found, mode="clip")
        else:
            found = source[chosen]
        target[part if positions is None else positions[part]] = found
        sign()


def _chunks(length: int, size: int) -> Iterator[slice]:
    size = max(1, size)
    return (slice(start, start + size) for start in range(0, length, size))


class Mover:
    """Serves one trainer over one socket, until the trainer closes it or is gone."""

    def __init__(self, link: socket.socket, trainer: int) -> None:
        self._link = link
        self._trainer = trainer
        self._memory: dict[int, mmap.mmap] = {}
        self._failed_ticket: tuple[int, list[Any]] | None = None
        self._seconds = 0.0
        self._next_sign = 0.0

    def serve(self) -> None:
        """Carry out messages in order; return when there is nobody left to send any."""
        while (received := self._receive()) is not None:
            (action, *values), fds = received
            if action == "map":
                self._map(fds[0], *values)
            elif action == "unmap":
                for number in values[0]:
                    del self._memory[number]
            else:
                self._gather_all(*values)

    def _receive(self) -> tuple[list[Any], list[int]] | None:
        poller = select.poll()
        poller.register(self._link, select.POLLIN)
        while not poller.poll(_LOOK_S * 1000):
            # A forked child of the trainer may hold its end of the socket open for longer.
            if os.getppid() != self._trainer:
                return None
        try:
            message, fds, _, _ = socket.recv_fds(self._link, MAX_MESSAGE_BYTES, 1)
        except ConnectionError:
            return None
        return (json.loads(message), fds) if message else None

    def _map(self, fd: int, number: int, num_bytes: int) -> None:
        writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._memory[number] = mmap.mmap(fd, max(num_bytes, 1), access=access)
        os.close(fd)

    def _gather_all(self, ticket: int, jobs: list[list[Any]], is_last: bool) -> None:
        start = time.perf_counter()
        failure = None
        if self._failed_ticket is not None and self._failed_ticket[0] == ticket:
            failure = self._failed_ticket[1]
        for what, *job in jobs:
            failure = failure or self._attempt(what, job)
        self._seconds += time.perf_counter() - start
        self._failed_ticket = (ticket, failure) if failure else None
        if is_last:
            self._send(["done", ticket, self._seconds, failure])
            self._seconds = 0.0

    def _attempt(self, what: str, job: list[Any]) -> list[Any] | None:
        try:
            source, rows, target, positions = job
            where = None if positions is None else _layout(positions)
            self._gather(_layout(source), _layout(rows), _layout(target), where)
        except OutsideError as error:
            return [what, error.kind, error.row, error.size]
        except Exception as error:  # noqa: BLE001 - told to the trainer, whatever it is
            return [what, "error", f"{type(error).__name__}: {error}"]
        return None

    def _gather(
        self, source: Layout, rows: Layout, target: Layout, positions: Layout | None
    ) -> None:
        row_numbers = self._numbers(rows)
        check_inside("rows", row_numbers, source.shape[0])
        places = None if positions is None else self._numbers(positions)
        if places is not None:
            check_inside("positions", places, target.shape[0])
        if len(row_numbers) == 0 or source.number is None or target.number is None:
            return
        whole = has_whole_rows(source) and has_whole_rows(target)
        gather(
            view(self._memory[source.number], source, whole),
            row_numbers,
            view(self._memory[target.number], target, whole),
            places,
            self._sign,
        )

    def _numbers(self, layout: Layout) -> Array:
        item = f"i{layout.item_bytes}"
        memory = b"" if layout.number is None else self._memory[layout.number]
        return np.ndarray(layout.shape, item, memory, layout.offset, layout.strides)

    def _sign(self) -> None:
        now = time.monotonic()
        if now > self._next_sign:
            self._next_sign = now + _SIGN_S
            try:
                self._link.send(b'["alive"]', socket.MSG_DONTWAIT)
            except BlockingIOError:
                return  # signs that nobody has read yet are there already

    def _send(self, message: list[Any]) -> None:
        self._link.send(json.dumps(message).encode())


def _layout(fields: list[Any]) -> Layout:
    number, offset, shape, strides, item_bytes = fields
    return Layout(number, offset, tuple(shape), tuple(strides), item_bytes)


def main() -> None:
    """Serve the trainer at the socket that was inherited.

    Arguments are the socket's descriptor, the trainer's process id and the folder of NumPy.
    """
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as link:
        try:
            Mover(link, int(sys.argv[2])).serve()
        except (BrokenPipeError, ConnectionResetError):
            return  # the trainer is gone in the middle of an answer


if __name__ == "__main__":
    main()
