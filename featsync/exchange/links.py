"""Connections between all ranks of a group, for short messages; rows go another way.

A connection tells at once when the process at its other end is gone, whoever killed it, and can be
asked without waiting. The ranks find each other through the store of their process group; each
shows a nonce first, so that nobody else can join in.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featsync.errors import PeerError, PeerTimeoutError
from featsync.exchange.frames import Frame, FrameReader, encode_frame
from featsync.exchange.traffic import Meter
from featsync.world import World

__all__ = ["Links"]

_NONCE_BYTES = 16
_RANK_BYTES = 4
_SEND_PORTION = 1 << 18


class _Outgoing(NamedTuple):
    kind: str
    data: bytes


class _Peer:
    """One connection. The thread that polls reads and closes it, whoever holds `sending` sends."""

    def __init__(self, name: str, connection: socket.socket) -> None:
        self.name = name
        self.connection = connection
        self.reader = FrameReader(name)
        self.outgoing: deque[_Outgoing] = deque()  # appended by any thread
        self.sent_of_first = 0
        self.sending = threading.Lock()
        self.last_heard = time.monotonic()
        self.is_open = True


class Links:
    """The connections of one rank. Messages are sent from any thread, polled from one only.

    Get one with `connect`.

    Args:
        connections: To each other rank.
        names: Of the other ranks, for errors.

    Attributes:
        meter: Counts what goes over the connections, and what others have counted with it.
    """

    def __init__(self, connections: dict[int, socket.socket], names: dict[int, str]) -> None:
        self.meter = Meter()
        self._peers = {rank: _Peer(names[rank], link) for rank, link in connections.items()}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not closed before nobody can write to it: another file might have its number by then. Nor
        # at the end of the process, where the last words are still to be said.
        weakref.finalize(self, os.close, self._wake).atexit = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._is_closed = False
        for rank, peer in self._peers.items():
            peer.connection.setblocking(False)
            self._selector.register(peer.connection, selectors.EVENT_READ, rank)

    @classmethod
    def connect(cls, world: World, address: str, timeout: float) -> Links:
        """Connect all ranks with each other; collective.

        Args:
            world: The ranks.
            address: Where the others reach this one; see `find_addresses`.
            timeout: Seconds to wait for the others.

        Raises:
            PeerTimeoutError: Some ranks did not come, or cannot be reached; the message names them.
        """
        nonce = secrets.token_bytes(_NONCE_BYTES)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server(("", 0), family=family, backlog=world.size) as server:
            offer = (address, server.getsockname()[1], nonce)
            offers = world.exchange("connect", offer, timeout)
            connections: dict[int, socket.socket] = {}
            deadline = time.monotonic() + timeout
            try:
                for rank in range(world.rank):
                    connections[rank] = _call(world, rank, offers[rank], deadline)
                while len(connections) < world.size - 1:
                    rank, connection = _answer(world, server, nonce, deadline, connections)
                    connections[rank] = connection
            except BaseException:
                for connection in connections.values():
                    connection.close()
                raise
        return cls(connections, {rank: world.name(rank) for rank in connections})

    @property
    def ranks(self) -> list[int]:
        """The other ranks, ascending."""
        return sorted(self._peers)

    def name(self, rank: int) -> str:
        """Name a rank for people."""
        return self._peers[rank].name

    def is_open(self, rank: int) -> bool:
        """Whether the connection to a rank still stands."""
        return self._peers[rank].is_open

    def last_heard(self, rank: int) -> float:
        """When a rank last sent something, by ``time.monotonic``."""
        return self._peers[rank].last_heard

    def send(
        self, rank: int, words: dict[str, Any], numbers: Sequence[NDArray[np.uint8]] = ()
    ) -> None:
        """Queue a message and return; one to a rank that is gone is dropped. Takes no lock."""
        if self._queue(rank, words, numbers):
            self.wake()

    def send_now(
        self, rank: int, words: dict[str, Any], numbers: Sequence[NDArray[np.uint8]] = ()
    ) -> None:
        """Send a message from this thread, as far as that goes without waiting; else as `send`.

        Spares the thread that polls a turn, and the message the wait for it. Not for finalizers.
        """
        if self._queue(rank, words, numbers):
            try:
                is_through = self._flush(self._peers[rank])
            except OSError:
                is_through = False  # the thread that polls will see it too, and say so
            if not is_through:
                self.wake()

    def wake(self) -> None:
        """Make `poll` return soon; takes no lock, so that finalizers may call it."""
        os.eventfd_write(self._wake, 1)

    def poll(self, timeout: float | None) -> list[tuple[int, Frame | None]]:
        """Send what is queued, and wait for messages.

        Args:
            timeout: Seconds to wait at most; ``None``: until there is something.

        Returns:
            Rank and message, in order of arrival; ``None`` for the message that will never come
            because the rank's end is closed.
        """
        for rank, peer in self._peers.items():
            if peer.is_open:
                writes = selectors.EVENT_WRITE if peer.outgoing else 0
                self._selector.modify(peer.connection, selectors.EVENT_READ | writes, rank)
        arrived: list[tuple[int, Frame | None]] = []
        for key, events in self._selector.select(timeout):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                continue
            peer = self._peers[key.data]
            try:
                if events & selectors.EVENT_WRITE:
                    self._flush(peer)
                if events & selectors.EVENT_READ:
                    for frame in peer.reader.read(peer.connection):
                        peer.last_heard = time.monotonic()
                        self.meter.count_received(frame.words.get("kind", ""), frame.num_bytes)
                        arrived.append((key.data, frame))
            except (EOFError, OSError, PeerError):
                self._drop(peer)
                arrived.append((key.data, None))
        return arrived

    def flush(self, seconds: float) -> None:
        """Send what is queued, for so long at most."""
        deadline = time.monotonic() + seconds
        while any(p.outgoing and p.is_open for p in self._peers.values()):
            if time.monotonic() > deadline:
                return
            self.poll(0.01)

    def close(self) -> None:
        """Close all connections, in the thread that polls; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for peer in self._peers.values():
            self._drop(peer)
        self._selector.close()

    def _queue(
        self, rank: int, words: dict[str, Any], numbers: Sequence[NDArray[np.uint8]]
    ) -> bool:
        peer = self._peers[rank]
        if peer.is_open:
            peer.outgoing.append(_Outgoing(words["kind"], encode_frame(words, numbers)))
        return peer.is_open

    def _drop(self, peer: _Peer) -> None:
        if peer.is_open:
            peer.is_open = False
            self._selector.unregister(peer.connection)
            with peer.sending:  # nobody may send to a number that soon is another file's
                peer.connection.close()
                peer.outgoing.clear()

    def _flush(self, peer: _Peer) -> bool:
        """Send what is queued; whether nothing of it is left."""
        if not peer.sending.acquire(blocking=False):
            return False
        try:
            while peer.outgoing:
                kind, data = peer.outgoing[0]
                portion = memoryview(data)[peer.sent_of_first : peer.sent_of_first + _SEND_PORTION]
                peer.sent_of_first += peer.connection.send(portion)
                if peer.sent_of_first == len(data):
                    peer.outgoing.popleft()
                    peer.sent_of_first = 0
                    self.meter.count_sent(kind, len(data))
        except BlockingIOError:
            return False
        finally:
            peer.sending.release()
        return True


def _call(world: World, rank: int, offer: tuple[str, int, bytes], deadline: float) -> socket.socket:
    address, port, nonce = offer
    try:
        connection = socket.create_connection((address, port), deadline - time.monotonic())
    except (OSError, ValueError) as error:
        raise PeerTimeoutError(
            f"{world.name(world.rank)} cannot reach {world.name(rank)} at {address} port {port}: "
            f"{error}. Ranks on different machines have to reach each other by TCP on any port.",
            world.name(rank),
        ) from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(nonce + world.rank.to_bytes(_RANK_BYTES, "little"))
    return connection


def _answer(
    world: World,
    server: socket.socket,
    nonce: bytes,
    deadline: float,
    connected: dict[int, socket.socket],
) -> tuple[int, socket.socket]:
    """Take the next call of a rank; strangers are turned away."""
    while (left := deadline - time.monotonic()) > 0:
        server.settimeout(left)
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            shown = _receive(connection, _NONCE_BYTES + _RANK_BYTES)
            if secrets.compare_digest(shown[:_NONCE_BYTES], nonce):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return int.from_bytes(shown[_NONCE_BYTES:], "little"), connection
            connection.close()
    missing = [r for r in range(world.rank + 1, world.size) if r not in connected]
    raise PeerTimeoutError(
        f"{world.name(world.rank)} waited for {world.names(missing)} to connect: they did not. "
        "Check that they are alive, and reach this machine by TCP on any port.",
        world.names(missing),
    )


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes and (more := connection.recv(num_bytes - len(data))):
        data += more
    return data
