"""Shared memory that the ranks of a machine ask for by name.

One of them, the first, keeps it, and makes it when somebody asks first; asking is not collective.
All who ask have to want it on the same terms::

    room    0                 HostLock.NUM_BYTES
            ├─────────────────┼──────────────────────────────
            │ a lock, laid    │ zeros at first
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any

from featsync.errors import ConfigError
from featsync.host_lock import HostLock
from featsync.segment import Segment, SegmentHandle

__all__ = ["Rooms", "handle_from", "room_prefix"]


@dataclass(frozen=True, eq=False)
class _Room:
    segment: Segment
    terms: Any
    by: str


class Rooms:
    """What the first rank of a machine keeps for the others."""

    def __init__(self) -> None:
        self._rooms: dict[str, _Room] = {}
        self._making = threading.Lock()

    def give(self, name: str, num_bytes: int, terms: Any, by: str) -> dict[str, Any]:
        """Say where a room is; the first to ask has it made.

        Args:
            name: Of the room.
            num_bytes: Its size, without the lock.
            terms: What all who ask have to agree on, as JSON has it.
            by: Who asks, in words.

        Returns:
            The handle of its segment, as JSON has it.

        Raises:
            ConfigError: Another rank got it on other terms.
            CapacityError: There is no memory for it.
        """
        with self._making:
            room = self._rooms.get(name)
            if room is None:
                segment = Segment.create(HostLock.NUM_BYTES + num_bytes)
                HostLock.lay(segment.array[: HostLock.NUM_BYTES])
                room = self._rooms[name] = _Room(segment, terms, by)
            if room.terms != terms:
                raise ConfigError(
                    f"ranks of one machine disagree about what they share as {name}: {room.by} "
                    f"has {room.terms}, {by} asks for {terms}. Give all of them the same settings."
                )
            return asdict(room.segment.handle)

    def forget(self, prefix: str) -> None:
        """Let go of the rooms whose names begin so; who is in them may stay."""
        with self._making:
            for name in [name for name in self._rooms if name.startswith(prefix)]:
                del self._rooms[name]


def room_prefix(table: int) -> str:
    """How the names of rooms begin that belong to a table, which they do not outlive."""
    return f"table {table}, "


def handle_from(words: dict[str, Any]) -> SegmentHandle:
    """Read the handle that `Rooms.give` gave."""
    device, inode = words["identity"]
    return SegmentHandle(words["pid"], words["fd"], words["num_bytes"], (device, inode))
