"""Sends rows that were ordered; used by the engine's thread."""

from __future__ import annotations

import logging
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from featsync.errors import FeatsyncError
from featsync.exchange.frames import Frame
from featsync.exchange.links import Links
from featsync.exchange.served import Served
from featsync.pool import Pool
from featsync.world import World

__all__ = ["Sender", "time_limit"]

_LOG = logging.getLogger(__name__)
_MAX_SENDS = 2  # to one rank, not waited for
_SLOWEST_LINK = 1e6  # bytes a second


class Sender:
    """Gathers ordered rows into warm memory and posts the sends.

    Args:
        world: The ranks.
        links: To answer by.
        group: For rows.
        served: What to gather from.
        timeout: Seconds without a sign of life after which a rank is given up.
    """

    def __init__(
        self,
        world: World,
        links: Links,
        group: dist.ProcessGroup,
        served: Served,
        timeout: float,
    ) -> None:
        self._world, self._links, self._group = world, links, group
        self._served = served
        self._timeout = timeout
        self._blocks = Pool()
        self._sends: dict[int, deque[tuple[Any, torch.Tensor]]] = {}

    def send(self, rank: int, order: Frame) -> None:
        """Send what was ordered, and say that it is under way.

        Raises:
            PlanError: The order does not fit what was announced.
        """
        words = order.words
        sends = self._sends.setdefault(rank, deque())
        while len(sends) >= _MAX_SENDS:
            work, sent = sends.popleft()
            work.wait(time_limit(self._timeout, sent.numel()))
            del work  # before the tensor, so that nothing of C++ outlives Python's hold on it
        buffer = self._blocks.take((words["num_bytes"],), torch.uint8)
        self._served.gather(rank, order, buffer)
        sends.append((self._group.send([buffer], rank, words["tag"]), buffer))
        self._links.send(rank, {"kind": "sent", "tag": words["tag"]})

    def refuse(self, rank: int, frame: Frame | None, error: Exception) -> None:
        """Say why an order is not carried out; whoever still waits for it raises that."""
        if not isinstance(error, FeatsyncError):
            _LOG.error("cannot serve %s", self._world.name(rank), exc_info=error)
        if frame is not None and frame.words.get("kind") == "order":
            what = str(error) if isinstance(error, FeatsyncError) else repr(error)
            self._links.send(rank, {"kind": "failed", "tag": frame.words["tag"], "what": what})


def time_limit(timeout: float, num_bytes: int) -> timedelta:
    """How long rows may be under way: gloo ends its connections when it is over."""
    return timedelta(seconds=timeout + num_bytes / _SLOWEST_LINK)
