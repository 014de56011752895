"""Sends rows that were ordered; used by the engine's thread."""

from __future__ import annotations

import logging
from collections import deque
from datetime import timedelta
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from featsync.errors import FeatsyncError
from featsync.exchange.frames import Frame
from featsync.exchange.links import Links
from featsync.exchange.portions import by_portion, portion_ends
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
        self._sends: dict[int, deque[tuple[list[Any], torch.Tensor]]] = {}

    def send(self, rank: int, order: Frame) -> None:
        """Say that what was ordered is under way, and send it.

        Raises:
            PlanError: The order does not fit what was announced.
        """
        words = order.words
        tag, num_bytes = words["tag"], words["num_bytes"]
        sends = self._sends.setdefault(rank, deque())
        while len(sends) >= _MAX_SENDS:
            works, sent = sends.popleft()
            for work in works:
                work.wait(time_limit(self._timeout, sent))
            del work, works  # before the tensor: nothing of C++ may outlive Python's hold on it
        buffer = self._blocks.take((num_bytes,), torch.uint8)
        masks, reads = self._served.find(rank, order, buffer)
        self._say_sent(rank, tag, masks)
        works = []
        ends = portion_ends(num_bytes)
        for (start, end), portion in zip(
            pairwise([0, *ends]), by_portion(reads, buffer, ends), strict=True
        ):
            for read in portion:
                read.carry_out()
            # Before it is sent: who has it may look at once.
            self._links.meter.count_sent("rows", end - start)
            works.append(self._group.send([buffer[start:end]], rank, tag))
        sends.append((works, buffer))

    def _say_sent(self, rank: int, tag: int, masks: list[list[NDArray[np.bool_]]]) -> None:
        """Name the rows, before the first of them: whoever waits can put them away as they come."""
        packed = [np.packbits(mask) for of_part in masks for mask in of_part]
        lengths = [[len(mask) for mask in of_part] for of_part in masks]
        self._links.send_now(rank, {"kind": "sent", "tag": tag, "masks": lengths}, packed)

    def refuse(self, rank: int, frame: Frame | None, error: Exception) -> None:
        """Say why an order is not carried out; whoever still waits for it raises that."""
        if not isinstance(error, FeatsyncError):
            _LOG.error("cannot serve %s", self._world.name(rank), exc_info=error)
        if frame is not None and frame.words.get("kind") == "order":
            what = str(error) if isinstance(error, FeatsyncError) else repr(error)
            self._links.send(rank, {"kind": "failed", "tag": frame.words["tag"], "what": what})


def time_limit(timeout: float, buffer: torch.Tensor) -> timedelta:
    """How long rows may be under way: gloo ends its connections when it is over."""
    return timedelta(seconds=timeout + buffer.numel() / _SLOWEST_LINK)
