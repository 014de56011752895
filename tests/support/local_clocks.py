"""Ranks that share rows that change, as threads of one process; needs no DGL.

They may be on several machines: each of these has a part of its own, and letters between them are
encoded and decoded as on a wire.
"""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from featsync.dynamic.away import AwayPart
from featsync.dynamic.clock import FeatureClock
from featsync.dynamic.guest import Guest
from featsync.dynamic.homes import Homes, by_host
from featsync.dynamic.letters import Letter
from featsync.dynamic.merge import MERGES
from featsync.dynamic.part import PartSize, part_in
from featsync.dynamic.rows import FeatureRows
from featsync.dynamic.talk import server_of
from featsync.dynamic.waits import Neighbours
from featsync.exchange.frames import Frame, FrameReader, encode_frame
from featsync.host_lock import HostLock
from featsync.partition import OwnerPartition, Partition, RangePartition
from featsync.row_kind import RowKind
from featsync.segment import Segment


def local_clocks(
    num_ranks: int,
    start: torch.Tensor,
    merge: str,
    timeout: float = 10.0,
    hosts: Sequence[int] | None = None,
    owners: torch.Tensor | None = None,
) -> list[FeatureClock]:
    """One clock a rank, of one table.

    Args:
        num_ranks: How many.
        start: The table.
        merge: Of rows that several write.
        timeout: Seconds to wait for other ranks.
        hosts: The machine of each rank; ``None``: all are on one.
        owners: The rank whose machine holds each row; ``None``: in runs.
    """
    hosts = hosts or [0] * num_ranks
    kind = RowKind(tuple(start.shape[1:]), start.dtype)
    bounds = [len(start) * rank // num_ranks for rank in range(num_ranks + 1)]
    spread: Partition = RangePartition(bounds)
    if owners is not None:
        spread = OwnerPartition(owners.numpy(), num_ranks)
    partition = by_host(spread, hosts)
    segments, sizes, rooms = [], [], []
    for host in range(1 + max(hosts)):
        sizes.append(PartSize(partition.sizes[host], kind, num_ranks, hosts.count(host)))
        segments.append(Segment.create(sizes[-1].num_bytes))
        HostLock.lay(segments[-1].array[: HostLock.NUM_BYTES])
        rooms.append(partial(_room, {}, threading.Lock()))
    others = [Neighbours(r, "rank {}".format, _watch, timeout) for r in range(num_ranks)]
    parts = [
        part_in(segments[host], sizes[host], MERGES[merge], others[rank])
        for rank, host in enumerate(hosts)
    ]
    clocks = []
    for rank, host in enumerate(hosts):
        guests: list[Guest] = []
        away = {
            other: _away(parts, rank, server_of(rank, other, hosts), kind, guests)
            for other in set(hosts) - {host}
        }
        homes = Homes(partition, host, away) if away else None
        clock = FeatureClock(FeatureRows(parts[rank], rank, homes), others[rank], rooms[host])
        for guest in guests:
            weakref.finalize(clock, guest.leave)
        clocks.append(clock)
    for rank, host in enumerate(hosts):
        parts[rank].table.copy_(start[torch.from_numpy(partition.rows_of(host))])
    return clocks


def _away(
    parts: Sequence[Any], rank: int, server: int, kind: RowKind, guests: list[Guest]
) -> AwayPart:
    """A part, and one guest more: the rank that is one there."""
    wire = _LocalWire()
    away = AwayPart(wire, f"rank {server}", lambda: _nothing, kind)
    back = _LocalWire()
    back.hear = away.hear
    guests.append(Guest(parts[server], rank, f"rank {rank}", back.send))
    wire.hear = guests[-1].hear
    return away


class _LocalWire:
    """Carries letters within the process, as bytes."""

    hear: Callable[[Frame], None]

    def __init__(self) -> None:
        self._sending = threading.Lock()

    def send(self, letter: Letter) -> None:
        with self._sending:
            self.hear(_carried(letter))

    post = send


def _carried(letter: Letter) -> Frame:
    data = encode_frame(*letter)
    sender, receiver = socket.socketpair()
    with sender, receiver:
        receiver.setblocking(False)
        reader = FrameReader("a rank")
        while True:
            data = data[sender.send(data[: 1 << 14]) :]
            for frame in reader.read(receiver):
                return frame


def _room(rooms: dict[str, Any], making: Any, name: str, num_bytes: int, terms: object) -> Any:
    with making:
        return rooms.setdefault(name, Segment.create(num_bytes)).array


def _watch(rank: int) -> Callable[[], None]:
    return _nothing


def _nothing() -> None:
    """Nobody ends."""


def on_threads(body: Callable[[int], Any], num_ranks: int, timeout_s: float = 60.0) -> list[Any]:
    """Call ``body(rank)`` on a thread each; raises what one of them raised."""
    results: list[Any] = [None] * num_ranks
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "ranks still wait for each other"
    return results
