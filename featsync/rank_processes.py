"""Processes that a command starts, one a rank, and tells what to do: see `featsync.rank_program`.

Every wait has a deadline, which each sign of life pushes back. The first rank that raises or dies
ends the wait for all, with what that rank itself said.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, TypeVar

from featsync.errors import PeerError, PeerTimeoutError
from featsync.rank_program import Failure, Finish

__all__ = ["RankProcesses", "environment_of_ranks"]

_Reply = TypeVar("_Reply")
_LOG_TAIL = 4000
_END_S = 20.0
_DEATH_S = 0.2


class RankProcesses:
    """One process a rank, all of the same program; end them with `finish` or `kill`.

    Args:
        program: The module that runs as ``python -m program DESCRIPTOR``.
        name: What they are ranks of, for messages.
        num_ranks: How many to start.
        spec_of: Gives the description that a rank gets first, of its number and of the file in
            which the ranks meet.
        environment: Of the processes.
        timeout: Seconds without a sign of life after which a rank is given up.
    """

    def __init__(
        self,
        program: str,
        name: str,
        num_ranks: int,
        spec_of: Callable[[int, str], object],
        environment: Mapping[str, str],
        timeout: float,
    ) -> None:
        self._timeout = timeout
        self._folder = contextlib.ExitStack()
        folder = self._folder.enter_context(tempfile.TemporaryDirectory(prefix="featsync-ranks-"))
        store_file = str(Path(folder) / "store")
        self._ranks: list[_RankProcess] = []
        try:
            for rank in range(num_ranks):
                process = _RankProcess(program, f"rank {rank} of {name}", environment)
                self._ranks.append(process)
                process.send(spec_of(rank, store_file))
        except BaseException:
            self.kill()
            raise

    def ask(
        self,
        requests: Mapping[int, object],
        kind: type[_Reply],
        on_sign: Callable[[int, object], None] | None = None,
    ) -> dict[int, _Reply]:
        """Give some ranks something to do and wait until all of them have answered.

        Args:
            requests: By rank.
            kind: What they answer with.
            on_sign: Told of everything else that a rank sends meanwhile.

        Returns:
            The answers by rank, in the order of the requests.

        Raises:
            FeatsyncError: What a rank raised, or that one died or fell silent.
        """
        for rank, request in requests.items():
            self._ranks[rank].send(request)
        return self._collect(list(requests), kind, on_sign)

    def wait_ready(self, kind: type[_Reply]) -> list[_Reply]:
        """Wait until all ranks have said that they are ready.

        Args:
            kind: What they say it with.

        Raises:
            FeatsyncError: What a rank raised, or that one died or fell silent.
        """
        return list(self._collect(list(range(len(self._ranks))), kind, None).values())

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
        self,
        ranks: list[int],
        kind: type[_Reply],
        on_sign: Callable[[int, object], None] | None,
    ) -> dict[int, _Reply]:
        replies: dict[int, _Reply] = {}
        waiting: dict[object, int] = {self._ranks[rank].connection: rank for rank in ranks}
        deadlines: dict[object, float] = dict.fromkeys(waiting, time.monotonic() + self._timeout)
        while waiting:
            next_deadline = min(deadlines[connection] for connection in waiting)
            open_ = [self._ranks[rank].connection for rank in waiting.values()]
            for connection in wait(open_, max(0.0, next_deadline - time.monotonic())):
                rank = waiting[connection]
                reply = self._receive(self._ranks[rank])
                deadlines[connection] = time.monotonic() + self._timeout
                if isinstance(reply, kind):
                    replies[rank] = reply
                    del waiting[connection]
                elif on_sign is not None:
                    on_sign(rank, reply)
            if waiting:
                # The one that was heard longest ago: the others may be waiting for it.
                first = min(waiting, key=lambda connection: deadlines[connection])
                if deadlines[first] < time.monotonic():
                    raise self._ranks[waiting[first]].silent(self._timeout)
        return {rank: replies[rank] for rank in ranks}

    def _receive(self, rank: _RankProcess) -> object:
        try:
            reply = rank.connection.recv()
        except (EOFError, OSError) as error:
            raise rank.died() from error
        if isinstance(reply, Failure):
            # A rank that dies makes others fail, who may be heard first.
            dead = self._find_dead(time.monotonic() + _DEATH_S)
            if dead is not None:
                raise dead.died()
            if reply.error is not None:
                raise reply.error
            raise PeerError(f"{rank.who} failed:\n{reply.text}", rank.who)
        return reply

    def _find_dead(self, deadline: float) -> _RankProcess | None:
        while time.monotonic() < deadline:
            for rank in self._ranks:
                if rank.process.poll() is not None:
                    return rank
            time.sleep(_DEATH_S / 10)
        return None


class _RankProcess:
    """One process, its connection, and the file that its output goes to."""

    def __init__(self, program: str, who: str, environment: Mapping[str, str]) -> None:
        self.who = who
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.connection: Connection
        self.connection, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", program, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()

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


def environment_of_ranks(inherited: Mapping[str, str], threads: int) -> dict[str, str]:
    """Make the environment of processes with so many threads for torch's operators each."""
    environment = dict(inherited)
    environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(threads)
    # What the command can import, its ranks can: `--import` may name a module beside a script.
    environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    return environment
