"""One pretended machine: namespaces without names, which end with the process that holds them.

::

    launcher ── unshare ─ holder (PID 1 in there, reads a pipe from the launcher)
                            │  own network, processes and /proc, /dev/shm, IPC, maybe a name
                            ├─ what is started on the machine joins by nsenter
                            └─ the pipe closes, or the launcher is killed: PID 1 ends, and the
                               kernel ends every process in there, its mounts and its network

Files, users and CPU cores are those of the real machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

__all__ = ["ClusterError", "Machine", "Process"]

_START_S = 20.0
_END_S = 10.0
_NAMESPACES = ("--net", "--pid", "--mount", "--ipc", "--uts")
_PREPARE = """
set -e
mount -t proc proc /proc
mount -t tmpfs -o size="$1",mode=1777 tmpfs /dev/shm
[ -z "$2" ] || hostname "$2"
"""
_HOLD = "ip link set lo up; echo ready; exec cat > /dev/null"


class ClusterError(Exception):
    """The pretended cluster cannot be made, or what ran on it went wrong; says what and where."""


@dataclass(frozen=True)
class Process:
    """A process of a machine.

    Attributes:
        pid: Its number outside, by which the launcher can signal it.
        rank: What its environment calls ``RANK``; ``None`` if it has none.
        command: Its command line, shortened.
    """

    pid: int
    rank: int | None
    command: str

    def __str__(self) -> str:
        who = "a process" if self.rank is None else f"rank {self.rank}"
        return f"{who} (pid {self.pid}: {self.command})"


class Machine:
    """Starts a machine; end it with `close`.

    Args:
        label: What messages call it.
        shm: Size of its /dev/shm, as ``mount`` takes it ("64m").
        host_name: Its own host name; ``None``: that of the real machine.
        processes_of: A machine whose processes, /proc and /dev/shm it shares: only the network is
            its own then.

    Attributes:
        label: As given.
        pid: Of the holder, seen from outside.

    Raises:
        ClusterError: The system does not allow it; says what failed.
    """

    def __init__(
        self,
        label: str,
        shm: str = "64m",
        host_name: str | None = None,
        processes_of: Machine | None = None,
    ) -> None:
        self.label = label
        if processes_of is None:
            command = ["unshare", *_NAMESPACES, "--fork", "--kill-child"]
            script = _PREPARE + _HOLD
        else:
            command = [*processes_of._entering(*_NAMESPACES), "unshare", "--net"]
            script = _HOLD
        command += ["sh", "-c", script, "sh", shm, host_name or ""]
        self._commands: list[subprocess.Popen[bytes]] = []
        self._outer = _start_holder(command, label)
        self.pid = _only_child_of(self._outer.pid)
        self._spaces = _spaces_of(self.pid)
        # What is in there is killed at the end: it must be nothing else.
        if self._spaces in (None, _spaces_of(os.getpid())):
            self._outer.kill()
            self._outer.wait()
            raise ClusterError(f"{label} cannot be set up: its holder has ended")

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        output: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on the machine and return; it ends with the machine at the latest.

        Args:
            command: Program and arguments.
            env: Its environment; ``None``: the launcher's.
            output: Where standard output and errors go; ``None``: the launcher's own. A pipe is
                closed with the machine.
        """
        # Entering another mount namespace loses the working folder.
        go = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd()]  # noqa: PTH109 - a word to pass on
        process = subprocess.Popen(
            [*self._entering(*_NAMESPACES), *go, *command],
            env=dict(os.environ if env is None else env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
        )
        self._commands.append(process)
        return process

    def call_network(self, *command: str) -> str:
        """Run a tool of the real machine in this one's network; returns what it prints.

        Raises:
            ClusterError: It failed; says what it said.
        """
        return call(*self._entering("--net"), *command)

    def processes(self) -> list[Process]:
        """What runs on the machine now, its holder left out; ranks in order, then the others."""
        found = [
            Process(pid, _rank_of(pid), _command_of(pid))
            for pid in self._members()
            if pid != self.pid
        ]
        # Which of two ranks has the lower number of process is chance.
        return sorted(found, key=lambda one: (one.rank is None, one.rank or 0, one.pid))

    def close(self) -> None:
        """End the machine and all that runs on it; idempotent.

        Raises:
            ClusterError: Some process cannot be ended; names it.
        """
        if self._outer.returncode is not None:
            return
        assert self._outer.stdin is not None
        self._outer.stdin.close()
        self._outer.kill()
        self._outer.wait()
        deadline = time.monotonic() + _END_S
        while left := self._members():
            if time.monotonic() > deadline:
                names = ", ".join(f"{pid}: {_command_of(pid)}" for pid in left)
                raise ClusterError(f"{self.label} does not end: {names}")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        for process in self._commands:
            process.wait(_END_S)
            if process.stdout is not None:
                process.stdout.close()

    def _members(self) -> list[int]:
        return [pid for pid in _pids() if _spaces_of(pid) == self._spaces]

    def _entering(self, *namespaces: str) -> list[str]:
        return ["nsenter", f"--target={self.pid}", *namespaces, "--"]


def call(*command: str) -> str:
    """Run a tool; returns what it prints.

    Raises:
        ClusterError: It is not installed, or failed; says what it said.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_START_S, check=True)
    except FileNotFoundError as error:
        raise ClusterError(f"the program {command[0]!r} is not installed") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip() or f"exit status {error.returncode}"
        raise ClusterError(f"{' '.join(command)}: {said}") from error
    return done.stdout


def _start_holder(command: Sequence[str], label: str) -> subprocess.Popen[bytes]:
    try:
        holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except FileNotFoundError as error:
        raise ClusterError(f"the program {command[0]!r} is not installed") from error
    assert holder.stdout is not None
    assert holder.stderr is not None
    with holder.stdout, holder.stderr:
        if holder.stdout.readline() != b"ready\n":
            said = holder.stderr.read().decode().strip()
            holder.kill()
            holder.wait()
            raise ClusterError(f"{label} cannot be set up: {said}")
    return holder


def _only_child_of(parent: int) -> int:
    for pid in _pids():
        with contextlib.suppress(OSError):
            # After the name in brackets, which may hold anything: state, then parent.
            if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == parent:
                return pid
    raise ClusterError(f"process {parent} has ended")


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _spaces_of(pid: int) -> tuple[str, ...] | None:
    """What a process's network and processes are known by; a zombie has none any more."""
    try:
        return tuple(os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("net", "pid"))  # noqa: PTH115
    except OSError:
        return None


def _rank_of(pid: int) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                return int(entry.removeprefix(b"RANK="))
    return None


def _command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b" ".join(words).decode(errors="replace").strip()[:80]
    return "?"
