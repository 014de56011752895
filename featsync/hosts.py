"""Which ranks share a machine: those that can reach what each other holds in memory.

Names of machines tell nothing: containers have their own, and clones have the same. Each rank shows
a nonce under a descriptor of its own, and looks whether it finds those of the others in /proc.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["Nonce", "hosts_of", "is_reached", "shown_nonce"]

_NONCE_BYTES = 16


class Nonce(NamedTuple):
    """Random bytes, and where whoever shares a machine with their owner finds them."""

    pid: int
    fd: int
    value: bytes


@contextmanager
def shown_nonce() -> Iterator[Nonce]:
    """Show a nonce to the processes of this machine for as long as the context lasts."""
    nonce = os.urandom(_NONCE_BYTES)
    fd = os.memfd_create("featsync-nonce", os.MFD_CLOEXEC)
    try:
        os.write(fd, nonce)
        yield Nonce(os.getpid(), fd, nonce)
    finally:
        os.close(fd)


def is_reached(nonce: Nonce) -> bool:
    """Whether this process finds what another one shows."""
    path = f"/proc/{nonce.pid}/fd/{nonce.fd}"
    try:
        found = os.stat(path)  # noqa: PTH116 - no path, a descriptor
        # On another machine the number is some other process's, and its descriptor may be a pipe:
        # reading from that would wait, or take what is not meant for us.
        if not stat.S_ISREG(found.st_mode) or found.st_size != len(nonce.value):
            return False
        with open(path, "rb") as file:  # noqa: PTH123 - as above
            return file.read(len(nonce.value)) == nonce.value
    except OSError:
        return False


def hosts_of(views: Sequence[Sequence[bool]]) -> tuple[int, ...]:
    """Number the machines by their first rank.

    Args:
        views: For each rank, which ranks it reaches. Two share a machine if each reaches the other.

    Returns:
        For each rank the number of its machine.

    Example:
        >>> hosts_of([[True, False, True], [False, True, False], [True, False, True]])
        (0, 1, 0)
    """
    hosts: list[list[int]] = []
    host_of_rank = []
    for rank in range(len(views)):
        for host, members in enumerate(hosts):
            if all(views[rank][member] and views[member][rank] for member in members):
                members.append(rank)
                host_of_rank.append(host)
                break
        else:
            host_of_rank.append(len(hosts))
            hosts.append([rank])
    return tuple(host_of_rank)
