"""How rows of other ranks come. One file and one line here add a transport."""

from __future__ import annotations

from featsync.transports.contract import Fetches, Landing, Pull, Transport
from featsync.transports.p2p import PointToPoint
from featsync.transports.shared_memory import SharedMemory

__all__ = ["TRANSPORTS", "Fetches", "Landing", "Pull", "Transport"]

TRANSPORTS: dict[str, type[Transport]] = {
    "p2p": PointToPoint,
    "shared_memory": SharedMemory,
}
