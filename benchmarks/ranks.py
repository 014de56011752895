"""Ranks for benchmarks: a process each, which call functions of this folder's modules."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from featsync.rank_processes import RankProcesses, environment_of_ranks


@dataclass(frozen=True)
class Description:
    """What a rank is told first."""

    rank: int
    num_ranks: int
    store_file: str
    timeout: float


@dataclass(frozen=True)
class Ready:
    """A rank has joined the group of all."""


@dataclass(frozen=True)
class Job:
    """Asks for ``function(*args)``; found by its name, so a module's and not a script's."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Done:
    """What it returned."""

    value: Any


class Ranks:
    """Ranks of one gloo group; they end with the context.

    Args:
        num_ranks: How many.
        timeout: Seconds that one job may take.
    """

    def __init__(self, num_ranks: int, timeout: float = 600.0) -> None:
        self._all = range(num_ranks)
        self._processes = RankProcesses(
            "rank_jobs",
            f"{num_ranks}",
            num_ranks,
            lambda rank, store_file: Description(rank, num_ranks, store_file, timeout),
            environment_of_ranks(os.environ, threads=1),
            timeout,
        )
        self._processes.wait_ready(Ready)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._processes.finish()
        self._processes.kill()

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function on all ranks at once; what each returned, by rank."""
        job = Job(function, args)
        answers = self._processes.ask(dict.fromkeys(self._all, job), Done)
        return [answer.value for answer in answers.values()]
