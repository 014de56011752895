"""Rows that were ordered: from posting the receive until they are in their buffer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from featsync.errors import PeerError
from featsync.exchange.faults import gone, silent
from featsync.exchange.frames import Frame
from featsync.exchange.links import Links
from featsync.exchange.portions import portion_ends
from featsync.exchange.sender import time_limit
from featsync.exchange.vigil import LOOK_S, Vigil
from featsync.world import World

__all__ = ["Arrival", "Arrivals"]

_TAGS = 1 << 30


@dataclass(eq=False)
class Arrival:
    """What one order asked for.

    Attributes:
        rank: Who was asked.
        tag: By which order and rows are matched.
        buffer: ``(num_bytes,)`` uint8, where the rows land.
        works: The posted receives, one a portion; none if the rank was gone already.
        is_named: Whether the owner has said that the rows are under way.
        error: Why they will not come.
        masks: How the rows of each part are arranged, see `arranged`; known when they have come.
    """

    rank: int
    tag: int
    buffer: torch.Tensor
    works: list[Any] = field(default_factory=list)
    is_named: bool = False
    error: PeerError | None = None
    masks: list[list[NDArray[np.bool_]]] = field(default_factory=list)


class Arrivals:
    """All orders of a rank that are under way; methods may be called by any thread.

    Args:
        world: The ranks.
        links: Tell whether a rank is still there.
        group: For rows.
        timeout: Seconds without a sign of life after which a rank is given up.
    """

    def __init__(
        self, world: World, links: Links, group: dist.ProcessGroup, timeout: float
    ) -> None:
        self._world, self._links, self._group = world, links, group
        self._timeout = timeout
        self._changed = threading.Condition()
        self._arrivals: dict[tuple[int, int], Arrival] = {}
        self._next_tag = dict.fromkeys(links.ranks, 0)

    def post(self, rank: int, buffer: torch.Tensor) -> Arrival:
        """Post a receive, before its order is sent."""
        with self._changed:
            tag = self._next_tag[rank] = (self._next_tag[rank] + 1) % _TAGS
            arrival = Arrival(rank, tag, buffer)
            if self._links.is_open(rank):
                ends = portion_ends(buffer.numel())
                arrival.works = [
                    self._group.recv([buffer[start:end]], rank, tag)
                    for start, end in pairwise([0, *ends])
                ]
                self._arrivals[rank, tag] = arrival
            else:
                arrival.error = gone(self._world, rank)
            return arrival

    def wait(self, arrival: Arrival, vigil: Vigil) -> Iterator[int]:
        """Block until some rows are in their buffer, and again until all of them are.

        Yields:
            Each time, how many bytes of the buffer are there.

        Raises:
            PeerError: They will not come.
            PeerTimeoutError: The owner gave no sign of life for too long.
        """
        rank, buffer = arrival.rank, arrival.buffer
        try:
            with self._changed:
                while not arrival.is_named and arrival.error is None:
                    self._changed.wait(LOOK_S)
                    if not arrival.is_named:
                        vigil.look()
            if arrival.error is not None:
                raise arrival.error
            ends = portion_ends(buffer.numel())
            for work, (start, end) in zip(arrival.works, pairwise([0, *ends]), strict=True):
                self._wait_for(work, rank, buffer)
                self._links.meter.count_received("rows", end - start)
                yield end
        finally:
            with self._changed:
                self._arrivals.pop((rank, arrival.tag), None)
        arrival.works = []

    def _wait_for(self, work: Any, rank: int, buffer: torch.Tensor) -> None:
        try:
            work.wait(time_limit(self._timeout, buffer))
        except RuntimeError as error:
            if self._links.is_open(rank):
                raise silent(self._world, rank, self._timeout) from error
            raise gone(self._world, rank) from error

    def name(self, rank: int, frame: Frame) -> None:
        """The owner says that rows are under way, or why not."""
        words = frame.words
        with self._changed:
            arrival = self._arrivals.get((rank, words["tag"]))
            if arrival is None:
                return
            if words["kind"] == "failed":
                name = self._world.name(rank)
                arrival.error = PeerError(f"{name} cannot send its rows: {words['what']}", name)
            else:
                arrival.masks = _masks(words["masks"], frame.numbers)
            arrival.is_named = True
            self._changed.notify_all()

    def wake(self) -> None:
        """Let all who wait look around: a rank has ended, or failed."""
        with self._changed:
            self._changed.notify_all()


def _masks(lengths: list[list[int]], numbers: NDArray[np.uint8]) -> list[list[NDArray[np.bool_]]]:
    start = 0
    masks: list[list[NDArray[np.bool_]]] = []
    for of_part in lengths:
        masks.append([])
        for length in of_part:
            end = start + -(-length // 8)
            masks[-1].append(np.unpackbits(numbers[start:end], count=length).view(np.bool_))
            start = end
    return masks
