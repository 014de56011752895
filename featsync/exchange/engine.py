"""One engine a process and group: serves this rank's rows, and hears what other ranks say.

It works on a thread of its own, whether the rank iterates, computes, or has left its loop::

    asks (any thread)                         owner's engine
    post the receive, then ── order ───────▶  look whether they are there
    wait until it is named ◀── sent ────────  (or what went wrong)
    wait for the rows      ◀══ rows ════════  gather, and isend / irecv on a group of featsync's own

Rows never come unasked, nor in a size that was not agreed: the order names it, and the owner
checks. They are matched by a tag that both sides take from the order. A receive is posted before
its order is sent, so a send always finds its receiver. Waiting for rows begins when the owner has
named them, so that whoever waits can still be told of an error, of a death, or of silence.

At the end of the process the engine lingers until the other ranks are done too.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from featsync.errors import CapacityError, ConfigError, FeatsyncError, PeerError
from featsync.exchange.arrival import Arrival, Arrivals
from featsync.exchange.faults import Faults, is_failing
from featsync.exchange.frames import Frame
from featsync.exchange.links import Links
from featsync.exchange.rooms import GivenRoom, given_room
from featsync.exchange.sender import Sender
from featsync.exchange.served import Served
from featsync.exchange.traffic import Traffic
from featsync.exchange.vigil import LOOK_S, Vigil
from featsync.profile import Profile
from featsync.world import World

__all__ = ["Engine"]

_LOG = logging.getLogger(__name__)
_ERRORS = {"ConfigError": ConfigError, "CapacityError": CapacityError}
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
        self.served = Served()
        self.faults = Faults()
        self._changed = threading.Condition()
        self._arrivals = Arrivals(world, links, group, timeout)
        self._sessions = itertools.count()
        self._tickets = itertools.count()
        self._answers: dict[int, dict[str, Any]] = {}
        self._dropped: deque[int] = deque()
        self._left: set[int] = set()
        self._sender = Sender(world, links, group, self.served, timeout)
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="featsync-engine", daemon=True)
        self._thread.start()
        # Like atexit, and in processes that multiprocessing started as well.
        Finalize(None, self.leave, exitpriority=_EXIT_PRIORITY)

    @property
    def traffic(self) -> Traffic:
        """What this rank sent and received so far."""
        return self._links.meter.read()

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
        self._links.send_now(rank, words, numbers)

    def post(self, rank: int, words: dict[str, Any], numbers: Sequence[Any] = ()) -> None:
        """Send a message soon; takes no lock."""
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
                `wait` is through.
        """
        arrival = self._arrivals.post(rank, buffer)
        if arrival.error is None:
            words = {**words, "tag": arrival.tag, "num_bytes": buffer.numel()}
            self._links.send_now(rank, words, numbers)
        return arrival

    def wait(self, arrival: Arrival, session: int) -> Iterator[int]:
        """Block until some of the ordered rows are there, and so on; see `Arrivals.wait`.

        Args:
            arrival: What `ask` gave.
            session: The iteration that asked.
        """
        return self._arrivals.wait(arrival, self.vigil(arrival.rank, session))

    def vigil(self, rank: int, session: int | None = None) -> Vigil:
        """Begin to wait for a rank; see `Vigil`."""
        return Vigil(self.world, self._links, self.faults, session, rank, self.timeout)

    def room(self, name: str, generation: int, num_bytes: int, terms: Any) -> GivenRoom:
        """Ask for shared memory of this machine's ranks; see `Rooms`. Blocks until it is there.

        Raises:
            ConfigError: Another rank got it on other terms.
            CapacityError: There is no memory for it.
            PeerError: The rank that keeps it has ended, or gives no sign of life.
        """
        wish = (name, generation, num_bytes, terms, self.world.name(self.world.rank))
        keeper = self.world.ranks_of_host[0]
        if keeper == self.world.rank:
            return given_room(self.served.rooms.give(*wish))
        vigil = self.vigil(keeper)
        with self._changed:
            ticket = next(self._tickets)
            self._links.send(keeper, {"kind": "room", "ticket": ticket, "wish": wish})
            while (words := self._answers.pop(ticket, None)) is None:
                self._changed.wait(LOOK_S)
                vigil.look()
        if words["error"] is not None:
            kind, what = words["error"]
            raise _ERRORS[kind](what)
        return given_room(words["room"])

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
                self._changed.wait(LOOK_S)
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
        self.served.close(_FLUSH_S)

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
        if frame is None:
            self._lose(rank)
            return
        kind = frame.words["kind"]
        if kind not in self._handlers:
            raise KeyError(f"a message of kind {kind!r}; all ranks need the same featsync")
        self._handlers[kind](rank, frame)

    @property
    def _handlers(self) -> dict[str, Callable[[int, Frame], None]]:
        served, arrivals = self.served, self._arrivals
        return {
            "announce": served.announce,
            "dynamic": served.hear,
            "order": self._sender.send,
            "forget": lambda rank, frame: served.forget(rank, frame.words["session"]),
            "drop": lambda rank, frame: served.drop(frame.words["number"], rank, self.world.size),
            "sent": arrivals.name,
            "failed": arrivals.name,
            "room": self._give_room,
            "room_given": self._take_room,
            "ping": lambda rank, frame: self._links.send(rank, {"kind": "pong"}),
            "pong": lambda rank, frame: None,  # that it came is all it says
            "fault": self._hear_fault,
            "bye": self._hear_bye,
        }

    def _hear_fault(self, rank: int, frame: Frame) -> None:
        name = self.world.name(rank)
        self.faults.add(PeerError(f"{name} failed: {frame.words['what']}", name))
        self._arrivals.wake()

    def _hear_bye(self, rank: int, frame: Frame) -> None:
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def _give_room(self, rank: int, frame: Frame) -> None:
        room = error = None
        try:
            room = self.served.rooms.give(*frame.words["wish"])
        except FeatsyncError as caught:
            error = (type(caught).__name__, str(caught))
        answer = {"ticket": frame.words["ticket"], "room": room, "error": error}
        self._links.send(rank, {"kind": "room_given", **answer})

    def _take_room(self, rank: int, frame: Frame) -> None:
        with self._changed:
            self._answers[frame.words["ticket"]] = frame.words
            self._changed.notify_all()

    def _lose(self, rank: int) -> None:
        self._arrivals.wake()
        with self._changed:
            self._changed.notify_all()
        self.served.lose(rank)
