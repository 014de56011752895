"""Whom letters about one feature are for, on the rank that gets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from featsync.dynamic.away import AwayPart
from featsync.dynamic.guest import Guest
from featsync.dynamic.letters import Letter
from featsync.exchange.engine import Engine
from featsync.exchange.frames import Frame

__all__ = ["EngineWire", "Talk", "server_of"]


@dataclass(frozen=True)
class EngineWire:
    """Letters of one feature to one rank, through the engine of its group.

    Attributes:
        engine: Of the group.
        number: The feature's.
        rank: Whom to.
    """

    engine: Engine
    number: int
    rank: int

    def send(self, letter: Letter) -> None:
        """Send now; not for finalizers."""
        words, numbers = letter
        self.engine.tell(self.rank, {**words, "number": self.number}, numbers)

    def post(self, letter: Letter) -> None:
        """Send soon; takes no lock."""
        words, numbers = letter
        self.engine.post(self.rank, {**words, "number": self.number}, numbers)


@dataclass(frozen=True)
class Talk:
    """One feature's letters; used by the engine's thread.

    Attributes:
        guests: Ranks of other machines that this one serves, by rank.
        away: Parts of other machines, by the rank there that serves this one.
    """

    guests: Mapping[int, Guest]
    away: Mapping[int, AwayPart]

    def hear(self, rank: int, frame: Frame) -> None:
        """A letter came."""
        if frame.words["do"] == "answer":
            self.away[rank].hear(frame)
        else:
            self.guests[rank].hear(frame)

    def lose(self, rank: int) -> None:
        """A rank has ended."""
        if rank in self.guests:
            self.guests[rank].leave()

    def close(self) -> None:
        """No rank uses the feature any more."""
        for guest in self.guests.values():
            guest.leave()

    def join(self, timeout: float) -> None:
        """Wait until all is done that guests asked for, after `close`."""
        for guest in self.guests.values():
            guest.join(timeout)


def server_of(rank: int, host: int, host_of_rank: Sequence[int]) -> int:
    """The rank of another machine that serves a rank there: each of them serves equally many.

    Example:
        >>> [server_of(rank, 1, [0, 0, 1, 1]) for rank in (0, 1)]
        [2, 3]
    """
    neighbours = [r for r, its_host in enumerate(host_of_rank) if its_host == host_of_rank[rank]]
    there = [r for r, its_host in enumerate(host_of_rank) if its_host == host]
    return there[neighbours.index(rank) % len(there)]
