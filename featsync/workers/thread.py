"""Worker ``thread``: one background thread carries out the moves.

The trainer's Python and this thread share the GIL, so a list of moves is few, large operations
(two for each gather), each of which releases it while rows are copied.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from featsync.device import Device
from featsync.errors import PeerError, PeerTimeoutError
from featsync.move import Move
from featsync.workers.contract import Ticket, Worker

_LOG = logging.getLogger(__name__)


class ThreadTicket(Ticket):
    """Moves on their way through the thread.

    Attributes:
        is_watched: Whether other ranks may wait for them, and they for other ranks.
    """

    def __init__(self, moves: Sequence[Move], timeout: float, is_watched: bool) -> None:
        self._moves = moves
        self._timeout = timeout
        self.is_watched = is_watched
        # A lock that is held until the moves are done: cheaper than an Event, and enough for one
        # waiter.
        self._running = threading.Lock()
        self._running.acquire()
        self._error: BaseException | None = None
        self._seconds = 0.0

    def wait(self) -> None:
        """Block until the moves are done; see `Ticket.wait`."""
        if not self._running.acquire(timeout=-1 if self.is_watched else self._timeout):
            raise PeerTimeoutError(
                f"the mover thread did not finish {len(self._moves)} moves "
                f"({', '.join(move.what for move in self._moves)}) in {self._timeout} s. Is a "
                f"feature's read() stuck, or its disk? Raise sync_feature's timeout if it is slow.",
                peer="mover thread",
            )
        self._running.release()
        if self._error is not None:
            raise self._error

    def run(self, device: Device) -> None:
        """Carry out the moves and keep what they raise for `wait`."""
        start = time.perf_counter()
        try:
            device.execute(self._moves)
        except BaseException as error:  # noqa: BLE001 - raised to whoever waits
            self._error = error
        self._moves = ()
        self._seconds = time.perf_counter() - start
        self._running.release()

    @property
    def seconds(self) -> float:
        """How long the moves took."""
        return self._seconds


class ThreadWorker(Worker):
    """Carries out moves on a thread of its own, which ends with `close`.

    Args:
        device: Where rows are delivered.
        timeout: Seconds that one list of moves may take.
    """

    def __init__(self, device: Device, timeout: float) -> None:
        self._timeout = timeout
        self._is_closed = False
        # SimpleQueue.put is reentrant, so `close` may run in a finalizer.
        self._queue: SimpleQueue[ThreadTicket | None] = SimpleQueue()
        MoverThread(self._queue, device, timeout).start()
        # One registration, however many workers there are.
        atexit.unregister(_end_threads)
        atexit.register(_end_threads)

    def submit(self, moves: Sequence[Move], is_watched: bool = False) -> ThreadTicket:
        """Hand the moves to the thread; see `Worker.submit`."""
        if self._is_closed:
            raise PeerError("the mover thread was closed: it takes no more moves", "mover thread")
        ticket = ThreadTicket(moves, self._timeout, is_watched)
        self._queue.put(ticket)
        return ticket

    def close(self) -> None:
        """Let the thread end after the moves it has; does not wait for it."""
        self._is_closed = True
        self._queue.put(None)


class MoverThread(threading.Thread):
    """Runs tickets until told to end.

    Holds no reference to the worker, and to a ticket only while it runs: what was delivered is the
    caller's alone.
    """

    def __init__(
        self, queue: SimpleQueue[ThreadTicket | None], device: Device, timeout: float
    ) -> None:
        super().__init__(name="featsync-mover", daemon=True)
        self.queue = queue
        self.timeout = timeout
        self._device = device

    def run(self) -> None:
        """Serve the queue."""
        while (ticket := self.queue.get()) is not None:
            ticket.run(self._device)
            del ticket


def _end_threads() -> None:
    """Let every mover thread end before the interpreter does, as soon as its list of moves is done.

    A thread that comes back from copying rows to an interpreter that is being torn down is ended
    inside C++, which aborts the process. So it gets the time that any list of moves may take.
    """
    threads = [thread for thread in threading.enumerate() if isinstance(thread, MoverThread)]
    for thread in threads:
        waiting: list[ThreadTicket | None] = []
        with contextlib.suppress(Empty):
            while True:
                waiting.append(thread.queue.get_nowait())
        # Of what has not begun nobody here will wait for anything, but other ranks may.
        for ticket in waiting:
            if ticket is not None and ticket.is_watched:
                thread.queue.put(ticket)
        thread.queue.put(None)
    for thread in threads:
        thread.join(thread.timeout)
        if thread.is_alive():
            _LOG.warning(
                "leaving behind a mover thread that has been moving rows for over %g s; is a "
                "feature's read() stuck, or its disk?",
                thread.timeout,
            )
