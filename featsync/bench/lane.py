"""A lane: one configuration, loaded by one process a rank, that waits until it is told to run.

Every wait has a deadline, which each sign of life pushes back. The first rank that raises or dies
ends the lane, with what that rank itself said.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, TypeVar

from featsync.allocator import KEEP_ENVIRONMENT
from featsync.bench.protocol import (
    EpochReport,
    Failure,
    Finish,
    Progress,
    RankSpec,
    Ready,
    RunEpoch,
)
from featsync.errors import PeerError, PeerTimeoutError

_Reply = TypeVar("_Reply")
_LOG_TAIL = 4000
_END_S = 20.0


class Lane:
    """The processes of one configuration.

    Attributes:
        name: Of the configuration.
    """

    def __init__(self, spec: RankSpec) -> None:
        self.name = spec.lane
        self._timeout = spec.timeout
        self._folder = contextlib.ExitStack()
        store_file = ""
        if spec.world_size > 1:
            folder = tempfile.TemporaryDirectory(prefix="featsync-bench-")
            store_file = str(Path(self._folder.enter_context(folder)) / "store")
        self._ranks: list[_RankProcess] = []
        try:
            for rank in range(spec.world_size):
                self._ranks.append(_RankProcess(replace(spec, rank=rank, store_file=store_file)))
        except BaseException:
            self.kill()
            raise

    def wait_ready(self) -> dict[str, object]:
        """Wait until all ranks have loaded; give what the first says of the workload."""
        found = self._collect(Ready, None)
        return found[0].workload

    def run(
        self, request: RunEpoch, on_progress: Callable[[Progress], None] | None = None
    ) -> list[EpochReport]:
        """Run one epoch on all ranks and give what each measured.

        Raises:
            FeatsyncError: What a rank raised, or that one died or fell silent.
        """
        for rank in self._ranks:
            rank.send(request)
        return self._collect(EpochReport, on_progress)

    def finish(self) -> None:
        """End all processes in order; those that do not follow are killed."""
        for rank in self._ranks:
            rank.send(Finish())
        deadline = time.monotonic() + _END_S
        for rank in self._ranks:
            rank.wait_end(deadline)
        self.kill()

    def kill(self) -> None:
        """End all processes at once; idempotent."""
        for rank in self._ranks:
            rank.kill()
        self._folder.close()

    def _collect(
        self, kind: type[_Reply], on_progress: Callable[[Progress], None] | None
    ) -> list[_Reply]:
        """Wait for one reply of a kind from every rank."""
        replies: dict[int, _Reply] = {}
        waiting: dict[object, int] = {
            rank.connection: index for index, rank in enumerate(self._ranks)
        }
        first_deadline = time.monotonic() + self._timeout
        deadlines: dict[object, float] = dict.fromkeys(waiting, first_deadline)
        while waiting:
            next_deadline = min(deadlines[connection] for connection in waiting)
            open_ = [self._ranks[index].connection for index in waiting.values()]
            for connection in wait(open_, max(0.0, next_deadline - time.monotonic())):
                index = waiting[connection]
                reply = self._receive(self._ranks[index])
                deadlines[connection] = time.monotonic() + self._timeout
                if isinstance(reply, kind):
                    replies[index] = reply
                    del waiting[connection]
                elif isinstance(reply, Progress) and on_progress is not None and index == 0:
                    on_progress(reply)
            late = [c for c in waiting if deadlines[c] < time.monotonic()]
            if late:
                raise self._ranks[waiting[late[0]]].silent(self._timeout)
        return [replies[index] for index in range(len(self._ranks))]

    @staticmethod
    def _receive(rank: _RankProcess) -> object:
        try:
            reply = rank.connection.recv()
        except (EOFError, OSError) as error:
            raise rank.died() from error
        if isinstance(reply, Failure):
            if reply.error is not None:
                raise reply.error
            raise PeerError(f"{rank.who} failed:\n{reply.text}", rank.who)
        return reply


class _RankProcess:
    """One process, its connection, and the file that its output goes to."""

    def __init__(self, spec: RankSpec) -> None:
        self.who = f"rank {spec.rank} of {spec.lane}"
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.connection: Connection
        self.connection, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "featsync.bench.rank", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            env=_environment(os.environ, spec),
        )
        theirs.close()
        self.send(spec)

    def send(self, message: object) -> None:
        """Send, unless the process is gone: whoever waits for its answer will say so."""
        try:
            self.connection.send(message)
        except OSError:
            return

    def silent(self, timeout: float) -> PeerTimeoutError:
        """Say that the process gave no sign of life for too long."""
        return PeerTimeoutError(
            f"{self.who} gave no sign of life for {timeout:.0f} s; if a step or the loading takes"
            f" that long, allow more with --timeout. Its last words:\n{self.last_words()}",
            self.who,
        )

    def died(self) -> PeerError:
        """Say how the process ended."""
        code = self.process.wait(timeout=_END_S)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return PeerError(f"{self.who} {how}. Its last words:\n{self.last_words()}", self.who)

    def last_words(self) -> str:
        """The end of what the process printed."""
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - _LOG_TAIL))
        return self.log.read().decode(errors="replace").strip() or "(nothing)"

    def wait_end(self, deadline: float) -> None:
        """Wait for the process to end by itself, until the deadline."""
        try:
            self.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return

    def kill(self) -> None:
        """End the process; idempotent."""
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self.log.close()


def _environment(inherited: Mapping[str, str], spec: RankSpec) -> dict[str, str]:
    """The environment of a rank: the threads, the allocator and the modules of its lane."""
    environment = dict(inherited)
    environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(spec.threads)
    # What the driver can import, its ranks can: `--import` may name a module beside a script.
    environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    for name, value in KEEP_ENVIRONMENT.items():
        environment.pop(name, None)
        if spec.config.allocator == "keep":
            environment[name] = value
    return environment
