"""Shared memory that the ranks of a machine ask for by name.

One of them, the first, keeps it, and makes it when somebody asks first; asking is not collective.
All who ask have to want it on the same terms::

    room    0                 HostLock.NUM_BYTES
            ├─────────────────┼──────────────────────────────
            │ a lock, laid    │ zeros at first

A room whose content cannot be trusted any more is given up for the next *generation* of it. Only
the newest is kept; who is in an older one may stay there.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from featsync.errors import ConfigError
from featsync.host_lock import HostLock
from featsync.segment import Segment, SegmentHandle

__all__ = ["GivenRoom", "Rooms", "given_room", "room_prefix"]


class GivenRoom(NamedTuple):
    """Where a room is.

    Attributes:
        generation: Of the room, at least that which was asked for.
        handle: Of its segment.
    """

    generation: int
    handle: SegmentHandle


@dataclass(frozen=True, eq=False)
class _Room:
    generation: int
    segment: Segment
    terms: Any
    by: str


class Rooms:
    """What the first rank of a machine keeps for the others."""

    def __init__(self) -> None:
        self._rooms: dict[str, _Room] = {}
        self._making = threading.Lock()

    def give(
        self, name: str, generation: int, num_bytes: int, terms: Any, by: str
    ) -> dict[str, Any]:
        """Say where a room is; the first to ask has it made.

        Args:
            name: Of the room.
            generation: The oldest that will do.
            num_bytes: Its size, without the lock.
            terms: What all who ask have to agree on, as JSON has it.
            by: Who asks, in words.

        Returns:
            Generation and handle, as JSON has them; see `given_room`.

        Raises:
            ConfigError: Another rank got it on other terms.
            CapacityError: There is no memory for it.
        """
        with self._making:
            room = self._rooms.get(name)
            if room is None or room.generation < generation:
                segment = Segment.create(HostLock.NUM_BYTES + num_bytes)
                HostLock.lay(segment.array[: HostLock.NUM_BYTES])
                room = self._rooms[name] = _Room(generation, segment, terms, by)
            if room.terms != terms:
                raise ConfigError(
                    f"ranks of one machine disagree about what they share as {name}: {room.by} "
                    f"has {room.terms}, {by} asks for {terms}. Give all of them the same settings."
                )
            return {"generation": room.generation, "handle": asdict(room.segment.handle)}

    def forget(self, prefix: str) -> None:
        """Let go of the rooms whose names begin so; who is in them may stay."""
        with self._making:
            for name in [name for name in self._rooms if name.startswith(prefix)]:
                del self._rooms[name]


def room_prefix(table: int) -> str:
    """How the names of rooms begin that belong to a table, which they do not outlive."""
    return f"table {table}, "


def given_room(words: dict[str, Any]) -> GivenRoom:
    """Read what `Rooms.give` gave."""
    handle = words["handle"]
    device, inode = handle["identity"]
    return GivenRoom(
        words["generation"],
        SegmentHandle(handle["pid"], handle["fd"], handle["num_bytes"], (device, inode)),
    )
