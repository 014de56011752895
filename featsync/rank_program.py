"""What a program does that a command starts on every rank: it is told what to do until it is done.

The other end is `featsync.rank_processes`. What they say to each other is pickled::

    command                                   program, one a rank
    start, description of the rank ────────▶  get ready
    request ───────────────────────────────▶  do it
                       ◀── signs of life ───  while it takes long
                       ◀─────────── answer ─  (or what went wrong)
    Finish ────────────────────────────────▶  end
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from featsync.errors import FeatsyncError

__all__ = ["Failure", "Finish", "join_group", "serve"]

Send = Callable[[object], None]


@dataclass(frozen=True)
class Finish:
    """Asks a process to end."""


@dataclass(frozen=True)
class Failure:
    """A process cannot go on.

    Attributes:
        error: What it raised, where that is one of featsync's errors, which can be pickled.
        text: Its traceback.
    """

    error: Exception | None
    text: str


def serve(descriptor: int, start: Callable[[Any, Send], Callable[[Any], object]]) -> None:
    """Serve one command until it says `Finish` or goes away; blocks until then.

    Args:
        descriptor: The program's end of the connection.
        start: Given the rank's description, and what sends signs of life; gives what answers
            requests.
    """
    connection: Connection = Connection(descriptor)
    try:
        answer = start(connection.recv(), connection.send)
        while not isinstance(request := connection.recv(), Finish):
            connection.send(answer(request))
    except EOFError:
        return  # The command is gone; so is the reason to be here.
    except Exception as error:  # noqa: BLE001 - whatever it was, the command must hear of it
        known = error if isinstance(error, FeatsyncError) else None
        connection.send(Failure(known, traceback.format_exc()))
        # Ending now would make the other ranks fail as well, and perhaps be heard first.
        connection.poll(None)


def join_group(store_file: str, rank: int, num_ranks: int, timeout: float) -> None:
    """Join the default group of all ranks; collective.

    Args:
        store_file: Where they meet.
        rank: This one.
        num_ranks: How many there are.
        timeout: Seconds that one wait of the group may take.
    """
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store_file}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout),
    )
