"""A cluster, and commands that run on all of its machines."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from .link import INTERFACE, Link, Traffic
from .machines import ClusterError, Machine

__all__ = ["Cluster", "Run", "why_impossible"]

_PORT = "29500"
_LOOK_S = 0.1
_KEPT_LINES = 400
_READ_BYTES = 1 << 16


class Cluster:
    """Machines that are joined; end them with `close`, or use it as a context manager.

    Args:
        hosts: How many machines, two or more.
        rate: Of each machine's connection ("1gbit"); ``None``: not limited.
        shm: Size of /dev/shm: of all machines, or of each.
        own_names: Whether each has a host name of its own (``host0``, …) instead of all the same.
        sharing_processes: Machines, by number, that share the processes, /proc and /dev/shm of
            machine 0, and have only a network of their own.

    Attributes:
        machines: In order.
        link: Between them.

    Raises:
        ClusterError: The system does not allow it; says what failed.
    """

    def __init__(
        self,
        hosts: int = 2,
        rate: str | None = "1gbit",
        shm: str | Sequence[str] = "64m",
        own_names: bool = False,
        sharing_processes: Iterable[int] = (),
    ) -> None:
        if hosts < 2:
            raise ClusterError(f"a cluster of {hosts} hosts: there have to be two or more")
        sizes = [shm] * hosts if isinstance(shm, str) else shm
        sharing = frozenset(sharing_processes)
        self.machines: list[Machine] = []
        self._link: Link | None = None
        try:
            for number in range(hosts):
                label = f"host {number}"
                host_name = f"host{number}" if own_names else None
                of = self.machines[0] if number in sharing else None
                self.machines.append(Machine(label, sizes[number], host_name, of))
            self._link = Link(self.machines, rate)
        except BaseException:
            self.close()
            raise

    @property
    def link(self) -> Link:
        """Between the machines."""
        assert self._link is not None
        return self._link

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all machines and what runs on them; idempotent."""
        # Those that live among another's processes go first.
        for machine in reversed(self.machines):
            machine.close()
        if self._link is not None:
            self._link.close()

    def torchrun(self, command: Sequence[str], ranks: int, env: dict[str, str]) -> Run:
        """Start a command under torchrun, on every machine.

        Args:
            command: Program and arguments.
            ranks: Processes on each machine.
            env: Added to the launcher's environment.
        """
        run = Run(self)
        hosts = len(self.machines)
        for number in range(hosts):
            agent = [
                *(sys.executable, "-m", "torch.distributed.run", "--no-python"),
                *(f"--nnodes={hosts}", f"--nproc-per-node={ranks}", f"--node-rank={number}"),
                *(f"--master-addr={self.link.address(0)}", f"--master-port={_PORT}"),
            ]
            run.start(f"host {number}", number, [*agent, *command], env)
        return run

    def plain(self, command: Sequence[str], ranks: int, env: dict[str, str]) -> Run:
        """Start a command on every machine, ``ranks`` times, with the environment of torchrun."""
        run = Run(self)
        hosts = len(self.machines)
        for number in range(hosts):
            for local_rank in range(ranks):
                rank = number * ranks + local_rank
                place = {
                    "RANK": rank,
                    "WORLD_SIZE": hosts * ranks,
                    "LOCAL_RANK": local_rank,
                    "LOCAL_WORLD_SIZE": ranks,
                    "GROUP_RANK": number,
                    "GROUP_WORLD_SIZE": hosts,
                    "MASTER_ADDR": self.link.address(0),
                    "MASTER_PORT": _PORT,
                }
                words = {name: str(value) for name, value in place.items()}
                run.start(f"rank {rank}", number, command, {**words, **env})
        return run


@dataclass(eq=False)
class _Started:
    label: str
    process: subprocess.Popen[bytes]
    rest: bytes = b""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))


class Run:
    """Commands that run on the machines of a cluster.

    Args:
        cluster: Where.

    Attributes:
        before: What each machine had sent and received when the run began.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._started: list[_Started] = []
        self.before = self._look()
        self._began = time.monotonic()

    def start(self, label: str, machine: int, command: Sequence[str], env: dict[str, str]) -> None:
        """Start one more command; returns at once.

        Args:
            label: What messages and lines of output call it.
            machine: By number.
            command: Program and arguments.
            env: Added to the launcher's environment. gloo would take the interface that the host's
                name stands for, which here is that of the real machine, so it is told.
        """
        env = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, **env}
        process = self._cluster.machines[machine].start(command, env, subprocess.PIPE)
        self._started.append(_Started(label, process))

    def wait(
        self,
        time_limit: float,
        grace: float = 10.0,
        say: Callable[[str, str], None] = lambda label, line: None,
    ) -> dict[str, int]:
        """Block until all commands have ended.

        Args:
            time_limit: Seconds since the start of the run.
            grace: Seconds that the others have once one has failed.
            say: Gets each line of output, and the label of the command that wrote it.

        Returns:
            Exit status by label; below 0 for a signal.

        Raises:
            ClusterError: Some are still running when their time is over: they are named, and left
                for the cluster to end.
        """
        deadline, why = self._began + time_limit, f"after {time_limit:g} s"
        is_failing = False
        with selectors.DefaultSelector() as selector:
            for one in self._started:
                assert one.process.stdout is not None
                selector.register(one.process.stdout, selectors.EVENT_READ, one)
            while any(one.process.poll() is None for one in self._started):
                _pass_on(selector, _LOOK_S, say)
                failed = [one.label for one in self._started if one.process.returncode]
                if failed and not is_failing and time.monotonic() + grace < deadline:
                    deadline = time.monotonic() + grace
                    why = f"{grace:g} s after {failed[0]} failed"
                is_failing = bool(failed)
                if time.monotonic() > deadline:
                    raise ClusterError(self._still_running(why))
            # What somebody left behind holds the other end open: only what is there is read.
            while _pass_on(selector, 0, say) and time.monotonic() < deadline:
                pass
        return {one.label: one.process.returncode for one in self._started}

    def last_lines(self, label: str) -> str:
        """The end of what a command printed."""
        return "\n".join(next(o.last_lines for o in self._started if o.label == label))

    def traffic(self) -> list[Traffic]:
        """What each machine sent and received since the run began."""
        return [now.since(then) for now, then in zip(self._look(), self.before, strict=True)]

    def _look(self) -> list[Traffic]:
        link = self._cluster.link
        return [link.traffic(number) for number in range(len(self._cluster.machines))]

    def _still_running(self, why: str) -> str:
        found = [
            f"{machine.label}: {'; '.join(map(str, processes))}"
            for machine in self._cluster.machines
            if (processes := machine.processes())
        ]
        return f"still running {why}:\n  " + "\n  ".join(found)


def why_impossible(hosts: int = 2) -> str | None:
    """Try to make a small cluster; returns what this system lacks, or ``None`` if it can."""
    if os.geteuid() != 0:
        return (
            "needs root, who alone may make namespaces and networks; or put "
            "`unshare --map-root-user --net` before the command"
        )
    try:
        Cluster(hosts, rate="1gbit", shm="1m").close()
    except ClusterError as error:
        return f"this system cannot make a cluster: {error}"
    return None


def _pass_on(
    selector: selectors.BaseSelector, seconds: float, say: Callable[[str, str], None]
) -> bool:
    """Pass on what commands wrote, by whole lines; returns whether there was anything."""
    ready = selector.select(seconds)
    for key, _ in ready:
        one: _Started = key.data
        data = os.read(key.fd, _READ_BYTES)
        if not data:
            selector.unregister(key.fileobj)
        *lines, one.rest = (one.rest + data).split(b"\n")
        if not data and one.rest:
            lines, one.rest = [one.rest], b""
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r")
            one.last_lines.append(text)
            say(one.label, text)
    return bool(ready)
