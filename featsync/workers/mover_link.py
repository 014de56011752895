"""The trainer's end of the helper program of worker ``process``: start it, talk, end it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from featsync import mover
from featsync.errors import ConfigError, FeatureError, PeerError, PeerTimeoutError, PlanError
from featsync.workers.contract import Ticket

_LOOK_S = 0.2  # between looks at whether the process lives, while it says nothing
_REAP_S = 5.0  # a killed process is gone within milliseconds
_MAX_JOBS = 64  # in one message
_MAX_NUMBERS = 4096  # in one message
# One thread copies; the pools that libraries start on import would only take memory and time.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

Job = Sequence[Any]
"""``(what, source, rows, target, positions)`` as `featsync.mover` reads it."""


class ProcessTicket(Ticket):
    """Moves on their way through the mover process.

    Args:
        link: Who brings the answer.
        held: The tensors that the mover reads and writes; kept until it is done.
    """

    def __init__(self, link: MoverLink, held: Sequence[torch.Tensor]) -> None:
        self._link: MoverLink | None = link
        self._held = held
        self._seconds = 0.0
        self._error: Exception | None = None

    def wait(self) -> None:
        """Block until the moves are done; see `Ticket.wait`."""
        while self._link is not None:
            self._link.receive()
        if self._error is not None:
            raise self._error

    @property
    def seconds(self) -> float:
        """How long the moves took."""
        return self._seconds

    def finish(self, seconds: float, error: Exception | None) -> None:
        """Take the mover's answer, and let go of the tensors."""
        self._seconds = seconds
        self._error = error
        self._held = ()
        self._link = None


class MoverLink:
    """One mover process and the socket to it. Used by one thread at a time.

    Args:
        timeout: Seconds without a sign of life after which the process counts as lost.

    Raises:
        ConfigError: This interpreter does not know its own program.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _start(theirs.fileno())
        self._name = f"mover process {self._process.pid}"
        self._pending: dict[int, ProcessTicket] = {}
        self._next_ticket = 0
        self._lost: PeerError | None = None
        self._last_sign = time.monotonic()
        self._poller = select.poll()
        self._poller.register(self._link, select.POLLIN)
        # Also when this object is merely dropped, and when the interpreter ends.
        self._end = weakref.finalize(self, _end, self._process, self._link, os.getpid())

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def map(self, number: int, fd: int, num_bytes: int) -> None:
        """Let the mover map a segment or file; the descriptor may be closed afterwards."""
        self._send(["map", number, num_bytes], [fd])

    def unmap(self, numbers: Sequence[int]) -> None:
        """Let the mover forget what it mapped, after the moves that it was given so far."""
        for start in range(0, len(numbers), _MAX_NUMBERS):
            self._send(["unmap", numbers[start : start + _MAX_NUMBERS]])

    def gather(self, jobs: Sequence[Job], held: Sequence[torch.Tensor]) -> ProcessTicket:
        """Hand over jobs and return; ``held`` is what must stay in memory until they are done."""
        ticket = ProcessTicket(self, held)
        number = self._next_ticket
        self._next_ticket += 1
        for start in range(0, max(1, len(jobs)), _MAX_JOBS):
            is_last = start + _MAX_JOBS >= len(jobs)
            self._send(["gather", number, jobs[start : start + _MAX_JOBS], is_last])
            self._pending[number] = ticket
        return ticket

    def receive(self) -> None:
        """Block for the next answer or for a short while, whichever comes first.

        Raises:
            PeerError: The process ended; all that was pending is lost.
            PeerTimeoutError: It gave no sign of life for too long.
        """
        if self._lost is not None:
            raise self._lost
        if self._poller.poll(_LOOK_S * 1000):
            self._read()
        elif self._process.poll() is not None:
            raise self._ended()
        elif time.monotonic() - self._last_sign > self._timeout:
            raise self._silent()

    def close(self) -> None:
        """End the process; idempotent."""
        if self._lost is None:
            self._lost = PeerError(f"{self._name} was closed before it was done", self._name)
        self._end()

    def _send(self, message: Sequence[Any], fds: Sequence[int] = ()) -> None:
        """Send a message; if the process is lost, whoever waits for its answer will hear of it."""
        if not self._pending:
            self._last_sign = time.monotonic()  # idle until now: silence begins here
        data = json.dumps(message).encode()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        while self._lost is None:
            try:
                # socket.send_fds would be the same, but some Pythons ignore the flags it is given.
                self._link.sendmsg([data], ancillary, flags)
            except BlockingIOError:
                with contextlib.suppress(PeerError):
                    self.receive()  # its answers may be what fills the way
            except (BrokenPipeError, ConnectionResetError) as error:
                self._ended().__cause__ = error
            else:
                return

    def _read(self) -> None:
        try:
            data = self._link.recv(mover.MAX_MESSAGE_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            raise self._ended()
        self._last_sign = time.monotonic()
        kind, *values = json.loads(data)
        if kind == "done":
            number, seconds, failure = values
            error = None if failure is None else self._error(*failure)
            self._pending.pop(number).finish(seconds, error)

    def _error(self, what: str, kind: str, *facts: Any) -> Exception:
        if kind == "rows":
            row, size = facts
            return FeatureError(
                f"feature {what}: id {row} is outside its table of {size} rows (allowed 0 to "
                f"{size - 1}): table and graph do not match"
            )
        if kind == "positions":
            row, size = facts
            return PlanError(
                f"feature {what}: position {row} is outside the {size} rows to fill. This is a "
                "fault of featsync; please report it."
            )
        return PeerError(f"{self._name} failed on feature {what}: {facts[0]}", self._name)

    def _ended(self) -> PeerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)
        code = self._process.returncode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how += f", killed by {signal.Signals(-code).name}"
        self._lost = PeerError(
            f"{self._name} ended ({how}) before all rows were moved. It prints its own errors to "
            "the standard error; SIGKILL mostly means that memory ran out. Start the loader again, "
            'or use worker="thread".',
            self._name,
        )
        return self._lost

    def _silent(self) -> PeerTimeoutError:
        self._lost = PeerTimeoutError(
            f"{self._name} gave no sign of life for {self._timeout:.1f} s with rows still to move. "
            "Is it stopped, or does the disk of a mapped table not answer? Raise sync_feature's "
            "timeout if it is merely slow.",
            self._name,
        )
        return self._lost


def _start(fd: int) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise ConfigError(
            'worker = "process" starts a Python program, but this interpreter does not know where '
            'Python is (sys.executable is empty). Use worker="thread".'
        )
    numpy_folder = Path(np.__file__).resolve().parent.parent
    command = [sys.executable, mover.__file__, str(fd), str(os.getpid()), str(numpy_folder)]
    # Held back in this thread until the child has inherited that: an interrupt is the trainer's
    # alone, even before the mover can say that it ignores them. No session of its own would do:
    # some systems give each session an equal share of the processor.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, mover.IGNORED_SIGNALS)
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=[fd],
            env={**os.environ, **_ONE_THREAD},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _end(process: subprocess.Popen[bytes], link: socket.socket, owner: int) -> None:
    """End the process for good; safe in a finalizer."""
    if os.getpid() != owner:
        link.close()  # a forked child has a copy of the socket, but the process is not its own
        return
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)  # closing is not enough while forked children hold copies
    link.close()
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_S)
