"""One engine a process and group: serves this rank's rows, and hears what other ranks say.

It works on a thread of its own, whether the rank iterates, computes, or has left its loop::

    asks (any thread)                         owner's engine
    post the receive, then ── order ───────▶  gather the rows, post the send
    wait until it is named ◀── sent ────────  (or what went wrong)
    wait for the rows      ◀══ rows ════════  isend / irecv on a group of featsync's own

Rows never come unasked, nor in a size that was not agreed: the order names it, and the owner
checks. They are matched by a tag that both sides take from the order. A receive is posted before
its order is sent, so a send always finds its receiver. Waiting for rows begins when the owner has
named them, so that whoever waits can still be told of an error, of a death, or of silence.

Of two ranks, one uses even tags and the other odd ones. gloo picks a connection by the tag, so rows
in one direction are never behind rows in the other.

At the end of the process the engine lingers until the other ranks are done too.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from featsync.errors import PeerError
from featsync.exchange.arrival import Arrival
from featsync.exchange.faults import Faults, cut_off, gone, is_failing, silent
from featsync.exchange.frames import Frame
from featsync.exchange.links import Links
from featsync.exchange.sender import Sender, time_limit
from featsync.exchange.served import Served
from featsync.profile import Profile
from featsync.world import World

__all__ = ["Engine"]

_LOG = logging.getLogger(__name__)
_TAGS = 1 << 30
_LOOK_S = 0.5
_FLUSH_S = 2.0
_EXIT_PRIORITY = 10


class Engine:
    """Moves rows between this rank and the others of a group.

    Args:
        world: The ranks.
        links: Connections to all of them; the engine's own from here on.
        group: For rows, of featsync's own; ranks are numbered as in ``world``.
        profile: Costs of transports, the same on all ranks.
        timeout: Seconds without a sign of life after which a rank is given up.

    Attributes:
        served: What this rank serves.
        faults: What other ranks failed with.
    """

    def __init__(
        self,
        world: World,
        links: Links,
        group: dist.ProcessGroup,
        profile: Profile,
        timeout: float,
    ) -> None:
        self.world = world
        self.profile = profile
        self.timeout = timeout
        self._links = links
        self._group = group
        self.served = Served()
        self.faults = Faults()
        self._changed = threading.Condition()
        self._arrivals: dict[tuple[int, int], Arrival] = {}
        self._next_tag = {rank: int(rank > world.rank) for rank in links.ranks}
        self._sessions = itertools.count()
        self._dropped: deque[int] = deque()
        self._left: set[int] = set()
        self._sender = Sender(world, links, group, self.served, timeout)
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="featsync-engine", daemon=True)
        self._thread.start()
        # Like atexit, and in processes that multiprocessing started as well.
        Finalize(None, self.leave, exitpriority=_EXIT_PRIORITY)

    def open_session(self) -> int:
        """Number a loader's iteration, for the ranks that it asks; see `close_session`."""
        session = next(self._sessions)
        self.faults.watch(session)
        return session

    def close_session(self, session: int) -> None:
        """Let the others forget what an iteration announced; takes no lock."""
        self.faults.forget(session)
        for rank in self._links.ranks:
            self._links.send(rank, {"kind": "forget", "session": session})

    def drop(self, number: int) -> None:
        """This rank will ask for no more rows of a table; takes no lock."""
        self._dropped.append(number)
        for rank in self._links.ranks:
            self._links.send(rank, {"kind": "drop", "number": number})

    def fail(self, error: Exception) -> None:
        """Tell the other ranks that an iteration of this one ended with an error."""
        what = f"{type(error).__name__}: {error}"
        for rank in self._links.ranks:
            self._links.send(rank, {"kind": "fault", "what": what})

    def tell(
        self, rank: int, words: dict[str, Any], numbers: Sequence[NDArray[np.uint8]] = ()
    ) -> None:
        """Send a message and return."""
        self._links.send(rank, words, numbers)

    def ask(
        self,
        rank: int,
        words: dict[str, Any],
        numbers: Sequence[NDArray[np.uint8]],
        buffer: torch.Tensor,
    ) -> Arrival:
        """Order rows and return.

        Args:
            rank: Who holds them.
            words: Of the order; ``tag`` and ``num_bytes`` are added.
            numbers: Of the order.
            buffer: ``(num_bytes,)`` uint8, at least one byte, for the rows: the engine's until
                `wait` has returned.
        """
        with self._changed:
            tag = self._next_tag[rank] = (self._next_tag[rank] + 2) % _TAGS
            arrival = Arrival(rank, tag, buffer)
            try:
                arrival.work = self._group.recv([buffer], rank, tag)
            except RuntimeError:
                arrival.error = self._why_cut_off(rank)
                return arrival
            if not self._links.is_open(rank):
                arrival.error = gone(self.world, rank)
                return arrival
            self._arrivals[rank, tag] = arrival
        self._links.send(rank, {**words, "tag": tag, "num_bytes": buffer.numel()}, numbers)
        return arrival

    def longest_wait(self, num_bytes: int) -> float:
        """Seconds after which `wait` has given up a silent rank that so much was ordered of."""
        return self.timeout + time_limit(self.timeout, num_bytes).total_seconds()

    def wait(self, arrival: Arrival, session: int) -> None:
        """Block until ordered rows are in their buffer.

        Args:
            arrival: What `ask` gave.
            session: The iteration that asked.

        Raises:
            PeerError: The rank cannot send them, or its process has ended.
            PeerTimeoutError: It gave no sign of life for too long.
        """
        asked = time.monotonic()
        pinged = asked
        with self._changed:
            while not arrival.is_named and arrival.error is None:
                self._changed.wait(_LOOK_S)
                self.faults.check(session)
                now = time.monotonic()
                heard = max(asked, self._links.last_heard(arrival.rank))
                if now - heard > self.timeout:
                    arrival.error = silent(self.world, arrival.rank, self.timeout)
                elif now - max(heard, pinged) > self.timeout / 4:
                    pinged = now
                    self._links.send(arrival.rank, {"kind": "ping"})
        if arrival.error is not None:
            raise arrival.error
        limit = time_limit(self.timeout, arrival.buffer.numel())
        named = time.monotonic()
        try:
            arrival.work.wait(limit)
        except RuntimeError as error:
            if time.monotonic() - named >= limit.total_seconds():
                raise silent(self.world, arrival.rank, self.timeout) from error
            raise self._why_cut_off(arrival.rank) from error
        arrival.work = None
        with self._changed:
            self._arrivals.pop((arrival.rank, arrival.tag), None)

    def say_goodbye(self) -> None:
        """Tell the others that this rank will ask for nothing more; it still serves."""
        for rank in self._links.ranks:
            self._links.send(rank, {"kind": "bye"})

    def leave(self) -> None:
        """Stop asking; serve the others until they stop too, for ``timeout`` at most; idempotent.

        Whoever ends with an error does not linger: the others have to hear of it.
        """
        if self._is_over:
            return
        self.say_goodbye()
        patience = 0.0 if is_failing() else self.timeout
        deadline = time.monotonic() + patience
        with self._changed:
            while (staying := self._staying()) and time.monotonic() < deadline:
                self._changed.wait(_LOOK_S)
        if staying and patience:
            _LOG.warning(
                "%s leaves after %g s, though %s may still ask for its rows",
                self.world.name(self.world.rank),
                self.timeout,
                self.world.names(staying),
            )
        self._is_over = True
        self._links.wake()
        self._thread.join(self.timeout)

    def _staying(self) -> list[int]:
        return [r for r in self._links.ranks if self._links.is_open(r) and r not in self._left]

    def _run(self) -> None:
        while not self._is_over:
            while self._dropped:
                self.served.drop(self._dropped.popleft(), self.world.rank, self.world.size)
            for rank, frame in self._links.poll(None):
                try:
                    self._handle(rank, frame)
                except Exception as error:  # noqa: BLE001 - the thread lives on, the rank is told
                    self._sender.refuse(rank, frame, error)
        with contextlib.suppress(OSError, ValueError):
            self._links.flush(_FLUSH_S)
        self._links.close()

    def _handle(self, rank: int, frame: Frame | None) -> None:
        kind = "lost" if frame is None else frame.words["kind"]
        if frame is None:
            self._lose(rank)
        elif kind == "announce":
            self.served.announce(rank, frame)
        elif kind == "order":
            self._sender.send(rank, frame)
        elif kind == "forget":
            self.served.forget(rank, frame.words["session"])
        elif kind == "drop":
            self.served.drop(frame.words["number"], rank, self.world.size)
        elif kind == "ping":
            self._links.send(rank, {"kind": "pong"})
        elif kind in ("sent", "failed"):
            self._name(rank, frame.words)
        elif kind == "fault":
            name = self.world.name(rank)
            with self._changed:
                self.faults.add(PeerError(f"{name} failed: {frame.words['what']}", name))
                self._changed.notify_all()
        elif kind == "bye":
            with self._changed:
                self._left.add(rank)
                self._changed.notify_all()

    def _name(self, rank: int, words: dict[str, Any]) -> None:
        with self._changed:
            arrival = self._arrivals.get((rank, words["tag"]))
            if arrival is None:
                return
            if words["kind"] == "failed":
                name = self.world.name(rank)
                arrival.error = PeerError(f"{name} cannot send its rows: {words['what']}", name)
            arrival.is_named = True
            self._changed.notify_all()

    def _why_cut_off(self, rank: int) -> PeerError:
        """The connection for rows is broken; that for words soon tells whether the process is."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._links.is_open(rank), _LOOK_S):
                return gone(self.world, rank)
        return cut_off(self.world, rank)

    def _lose(self, rank: int) -> None:
        with self._changed:
            for (other, _), arrival in self._arrivals.items():
                if other == rank and not arrival.is_named:
                    arrival.error = gone(self.world, rank)
            self._changed.notify_all()
        self.served.lose(rank)
