"""Worker ``inline``: moves happen when they are waited for, on the thread that waits.

No overlap: the reference for tests, and the base against which overlap is measured.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from featsync.device import Device
from featsync.errors import PeerError
from featsync.move import Move
from featsync.workers.contract import Ticket, Worker


class InlineTicket(Ticket):
    """Moves that run once they, or later ones, are waited for."""

    def __init__(self, moves: Sequence[Move], queue: deque[InlineTicket], device: Device) -> None:
        self._moves = moves
        self._queue = queue
        self._device = device
        self._error: Exception | None = None
        self._seconds = 0.0

    def wait(self) -> None:
        """Carry out everything submitted up to here; see `Ticket.wait`."""
        while self in self._queue:
            self._queue.popleft().run()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Carry out these moves and keep what they raise for `wait`."""
        start = time.perf_counter()
        try:
            self._device.execute(self._moves)
        except Exception as error:  # noqa: BLE001 - raised to whoever waits
            self._error = error
        self._moves = ()
        self._seconds = time.perf_counter() - start

    def drop(self) -> None:
        """Never carry out these moves, and say so to `wait`."""
        self._moves = ()
        self._error = PeerError(
            "worker inline was closed before these rows were waited for", "worker inline"
        )

    @property
    def seconds(self) -> float:
        """How long the moves took."""
        return self._seconds


class InlineWorker(Worker):
    """Carries out moves on the thread that waits for them.

    Args:
        device: Where rows are delivered.
    """

    runs_ahead = False

    def __init__(self, device: Device) -> None:
        self._device = device
        self._queue: deque[InlineTicket] = deque()

    def submit(self, moves: Sequence[Move], is_watched: bool = False) -> InlineTicket:
        """Queue the moves; see `Worker.submit`."""
        ticket = InlineTicket(moves, self._queue, self._device)
        self._queue.append(ticket)
        return ticket

    def carry_out(self) -> None:
        """Do now what was submitted; errors wait for whoever waits for it."""
        while self._queue:
            self._queue.popleft().run()

    def close(self) -> None:
        """Drop what was not waited for."""
        while self._queue:
            self._queue.popleft().drop()
