"""Ranks in one process, each with a real engine, for tests: real messages, rows handed over.

Everything is as between processes but the backend that carries rows: a dictionary of mailboxes
stands for gloo.
"""

from __future__ import annotations

import queue
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch

from featsync.exchange.engine import Engine
from featsync.exchange.links import Links
from featsync.partition import Partition
from featsync.partitioned_table import PartitionedTable, Parts
from featsync.plan import FeatureKey
from featsync.profile import load_profile
from featsync.row_kind import RowKind
from featsync.world import World

__all__ = ["Mailboxes", "local_engines", "local_tables"]


class Message(NamedTuple):
    """One message with rows.

    Attributes:
        sender: A rank.
        receiver: Another.
        tag: By which they are matched.
        num_bytes: Its length.
    """

    sender: int
    receiver: int
    tag: int
    num_bytes: int


class Mailboxes:
    """What is under way between the ranks.

    Attributes:
        sent: All messages so far, in the order in which they were sent.
        posted: All receives so far, in the order in which they were posted.
    """

    def __init__(self) -> None:
        self._boxes: defaultdict[tuple[int, int, int], queue.Queue[torch.Tensor]]
        self._boxes = defaultdict(queue.Queue)
        self.sent: list[Message] = []
        self.posted: list[Message] = []

    def put(self, message: Message, rows: torch.Tensor) -> None:
        """Send."""
        self.sent.append(message)
        self._boxes[message[:3]].put(rows.clone())

    def box(self, message: Message) -> queue.Queue[torch.Tensor]:
        """Post a receive; where the message will be."""
        self.posted.append(message)
        return self._boxes[message[:3]]


class _Receive:
    """A posted receive."""

    def __init__(self, box: queue.Queue[torch.Tensor], buffer: torch.Tensor) -> None:
        self._box = box
        self._buffer = buffer

    def wait(self, limit: timedelta) -> None:
        """Block until the rows are there."""
        try:
            rows = self._box.get(timeout=limit.total_seconds())
        except queue.Empty as error:
            raise RuntimeError("nothing was sent") from error
        if rows.shape != self._buffer.shape:
            raise RuntimeError(f"{rows.numel()} bytes came for {self._buffer.numel()}")
        self._buffer.copy_(rows)


class _Sent:
    """A send, which is done at once."""

    def wait(self, limit: timedelta) -> None:
        """Nothing to wait for."""


class LocalGroup:
    """One rank's end of the mailboxes: what an engine asks of a process group."""

    def __init__(self, rank: int, mailboxes: Mailboxes) -> None:
        self._rank = rank
        self._mailboxes = mailboxes

    def send(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> _Sent:
        """Send one tensor."""
        (rows,) = tensors
        self._mailboxes.put(Message(self._rank, rank, tag, rows.numel()), rows)
        return _Sent()

    def recv(self, tensors: Sequence[torch.Tensor], rank: int, tag: int) -> _Receive:
        """Post a receive of one tensor."""
        (buffer,) = tensors
        message = Message(rank, self._rank, tag, buffer.numel())
        return _Receive(self._mailboxes.box(message), buffer)


@contextmanager
def local_engines(
    num_ranks: int, timeout: float = 10.0, mailboxes: Mailboxes | None = None
) -> Iterator[list[Engine]]:
    """Start an engine for each of some ranks of this process, and end them afterwards.

    Args:
        num_ranks: How many.
        timeout: Seconds without a sign of life after which a rank is given up.
        mailboxes: To carry rows; bring some to see what is sent.
    """
    links: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
    for rank in range(num_ranks):
        for other in range(rank):
            links[rank][other], links[other][rank] = socket.socketpair()
    mailboxes, profile = mailboxes or Mailboxes(), load_profile()
    engines = []
    for rank in range(num_ranks):
        world = World(rank, range(num_ranks), None, timeout)
        names = {other: world.name(other) for other in range(num_ranks) if other != rank}
        group = cast("Any", LocalGroup(rank, mailboxes))
        engines.append(Engine(world, Links(links[rank], names), group, profile, timeout))
    try:
        yield engines
    finally:
        for engine in engines:
            engine.say_goodbye()
        for engine in engines:
            engine.leave()


def local_tables(
    key: FeatureKey,
    rows: torch.Tensor,
    partition: Partition,
    engines: Sequence[Engine],
    *,
    same_host: bool = True,
) -> list[PartitionedTable]:
    """Split a table over ranks of this process.

    Args:
        key: Of the feature.
        rows: ``(num_rows, *row_shape)``, the whole table.
        partition: Who holds what.
        engines: Of the ranks.
        same_host: Whether the ranks can read each other's parts.

    Returns:
        The table as each of the ranks sees it.
    """
    parts = [rows[torch.from_numpy(partition.rows_of(rank))] for rank in range(len(engines))]
    kind = RowKind(tuple(rows.shape[1:]), rows.dtype)
    tables = []
    for rank, engine in enumerate(engines):
        readable = dict(enumerate(parts)) if same_host else {rank: parts[rank]}
        number = engine.served.new_number()
        engine.served.add(number, parts[rank])
        tables.append(
            PartitionedTable(
                key, Parts(partition, kind, rank, readable, engine=engine, number=number)
            )
        )
    return tables
