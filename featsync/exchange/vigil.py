"""Looks, while a rank waits for another, whether there is still something to wait for."""

from __future__ import annotations

import logging
import time

from featsync.exchange.faults import Faults, busy, gone, silent
from featsync.exchange.links import Links
from featsync.world import World

__all__ = ["LOOK_S", "Vigil"]

_LOG = logging.getLogger(__name__)
LOOK_S = 0.5  # between two looks
_PATIENCE = 30  # times the timeout, for a rank that lives: half an hour by default, as in gloo


class Vigil:
    """One wait for one rank; begins when it is made.

    Args:
        world: The ranks.
        links: Connections to them.
        faults: What they failed with.
        session: The iteration that waits, of which faults count; ``None``: none do.
        rank: Who is waited for.
        timeout: Seconds without a sign of life after which that rank is given up. One that lives,
            but does not answer, is named in a warning then, and given up after 30 times as long.
    """

    def __init__(
        self,
        world: World,
        links: Links,
        faults: Faults,
        session: int | None,
        rank: int,
        timeout: float,
    ) -> None:
        self._world, self._links, self._faults = world, links, faults
        self._session, self._rank, self._timeout = session, rank, timeout
        self._begun = self._pinged = time.monotonic()
        self._has_warned = False

    def look(self) -> None:
        """Raise if the wait is in vain; to be called about every `LOOK_S`.

        Raises:
            PeerError: Some rank failed, or the one waited for has ended.
            PeerTimeoutError: It gave no sign of life, or no answer, for too long.
        """
        if self._session is not None:
            self._faults.check(self._session)
        if not self._links.is_open(self._rank):
            raise gone(self._world, self._rank)
        now = time.monotonic()
        heard = max(self._begun, self._links.last_heard(self._rank))
        if now - heard > self._timeout:
            raise silent(self._world, self._rank, self._timeout)
        if now - self._begun > _PATIENCE * self._timeout:
            raise busy(self._world, self._rank, _PATIENCE * self._timeout)
        if now - self._begun > self._timeout and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "%s has waited %.0f s for %s, which lives but is busy",
                self._world.name(self._world.rank),
                now - self._begun,
                self._world.name(self._rank),
            )
        if now - max(heard, self._pinged) > self._timeout / 4:
            self._pinged = now
            self._links.send(self._rank, {"kind": "ping"})
