"""What other ranks failed with, and how their silence or end is put into words."""

from __future__ import annotations

import sys

from featsync.errors import PeerError, PeerTimeoutError
from featsync.world import World

__all__ = ["Faults", "busy", "cut_off", "gone", "is_failing", "silent"]


class Faults:
    """Tells each iteration of what went wrong elsewhere since it began.

    An error that a rank got over is no longer one when the next iteration begins.
    """

    def __init__(self) -> None:
        self._faults: list[PeerError] = []
        self._num_before: dict[int, int] = {}

    def watch(self, session: int) -> None:
        """An iteration begins."""
        self._num_before[session] = len(self._faults)

    def forget(self, session: int) -> None:
        """An iteration is over; takes no lock."""
        self._num_before.pop(session, None)

    def add(self, error: PeerError) -> None:
        """Another rank's iteration ended with an error."""
        self._faults.append(error)

    def check(self, session: int) -> None:
        """Raise the first fault since an iteration began.

        Raises:
            PeerError: The rank, and what it said.
        """
        before = self._num_before.get(session, len(self._faults))
        if len(self._faults) > before:
            raise self._faults[before]


def gone(world: World, rank: int) -> PeerError:
    """A rank's process has ended."""
    name = world.name(rank)
    return PeerError(
        f"{name} has ended, and with it went the rows that it held. Look at its own error first.",
        name,
    )


def cut_off(world: World, rank: int) -> PeerError:
    """The process of a rank lives, but rows of it cannot come any more."""
    name = world.name(rank)
    return PeerError(
        f"{world.name(world.rank)} is cut off from the rows of {name}: their connection has ended, "
        "mostly with an earlier error here or there. Look at the first error, and start all ranks "
        "again.",
        name,
    )


def silent(world: World, rank: int, timeout: float) -> PeerTimeoutError:
    """A rank has given no sign of life for too long."""
    name = world.name(rank)
    return PeerTimeoutError(
        f"{world.name(world.rank)} waited {timeout:g} s for rows of {name}, which gave no sign of "
        "life. Look whether its process is stopped or its machine is reachable, or raise the "
        "timeout that the feature was built with.",
        name,
    )


def busy(world: World, rank: int, seconds: float) -> PeerTimeoutError:
    """A rank lives, but has not answered for very long."""
    name = world.name(rank)
    return PeerTimeoutError(
        f"{world.name(world.rank)} has waited {seconds:g} s for {name}, which lives but does not "
        "answer. Look what keeps it busy, or raise the timeout that its feature was built with.",
        name,
    )


def is_failing() -> bool:
    """Whether this process, which is about to end, ends with an error."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return error is not None and not (isinstance(error, SystemExit) and not error.code)
