"""Rows that were ordered: from posting the receive until they are in their buffer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from featsync.errors import PeerError
from featsync.exchange.faults import cut_off, gone, silent
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
        self._changed = threading.Condition()  # reentrant: `post` may ask why
        self._arrivals: dict[tuple[int, int], Arrival] = {}
        # Of two ranks, one uses even tags and the other odd ones. gloo picks a connection by the
        # tag, so rows in one direction are never behind rows in the other.
        self._next_tag = {rank: int(rank > world.rank) for rank in links.ranks}

    def post(self, rank: int, buffer: torch.Tensor) -> Arrival:
        """Post a receive, before its order is sent."""
        with self._changed:
            tag = self._next_tag[rank] = (self._next_tag[rank] + 2) % _TAGS
            arrival = Arrival(rank, tag, buffer)
            ends = portion_ends(buffer.numel())
            try:
                arrival.works = [
                    self._group.recv([buffer[start:end]], rank, tag)
                    for start, end in pairwise([0, *ends])
                ]
            except RuntimeError:
                arrival.error = self._why_cut_off(rank)
                return arrival
            if self._links.is_open(rank):
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
        limit = time_limit(self._timeout, buffer)
        begun = time.monotonic()
        try:
            work.wait(limit)
        except RuntimeError as error:
            if time.monotonic() - begun >= limit.total_seconds():
                raise silent(self._world, rank, self._timeout) from error
            raise self._why_cut_off(rank) from error

    def _why_cut_off(self, rank: int) -> PeerError:
        """The connection for rows is broken; that for words soon tells whether the process is."""
        with self._changed:
            if self._changed.wait_for(lambda: not self._links.is_open(rank), LOOK_S):
                return gone(self._world, rank)
        return cut_off(self._world, rank)

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
