"""So many ranks, as processes, that fetch rows and keep their Python busy when they are told to."""

from __future__ import annotations

import os

from featsync.calibration.protocol import (
    Fetched,
    FetchPrepared,
    KeepFetching,
    Prepare,
    Prepared,
    Ran,
    RankSpec,
    Ready,
    RunPython,
)
from featsync.calibration.samples import Setting, settings
from featsync.profile import VARIABLE
from featsync.rank_processes import RankProcesses, environment_of_ranks

__all__ = ["Ranks"]

# What messages carry whose tax is measured: as many rows as transports are compared for.
_TAXED = Setting(rows=10_000, row_bytes=64)
_PYTHON_S = 0.2
_TIMES = 3


class Ranks:
    """Starts them; they end with the context, in order unless it raises.

    Everything raises `FeatsyncError`: what a rank raised, or that one died or fell silent.

    Args:
        num_ranks: How many, at least 2.
        timeout: Seconds without a sign of life after which a rank is given up.

    Attributes:
        settings: What messages can carry, the largest last.
    """

    def __init__(self, num_ranks: int, timeout: float) -> None:
        self.settings = settings(num_ranks)
        self._num_ranks = num_ranks
        environment = environment_of_ranks(os.environ, threads=1)
        # What is measured does not depend on it, and it may be the very file to be written.
        environment.pop(VARIABLE, None)
        self._processes = RankProcesses(
            "featsync.calibration.rank",
            f"{num_ranks} ranks",
            num_ranks,
            lambda rank, store_file: RankSpec(rank, num_ranks, store_file, self.settings, timeout),
            environment,
            timeout,
        )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self._processes.finish()
        self._processes.kill()

    def wait_ready(self) -> list[str]:
        """Wait until all have their tables; give the ways in which rows can come to each."""
        reached = [ready.ways for ready in self._processes.wait_ready(Ready)]
        return [way for way in reached[0] if all(way in of_rank for of_rank in reached)]

    def fetch(self, way: str, setting: Setting) -> list[float]:
        """Let all fetch rows of all others at once, or their own; some times in a row.

        Returns:
            Seconds a message, of each rank and each time.
        """
        prepare = dict.fromkeys(range(self._num_ranks), Prepare(way, setting, _TIMES))
        self._processes.ask(prepare, Prepared)
        answers = self._processes.ask(dict.fromkeys(prepare, FetchPrepared()), Fetched)
        return [one / fetched.messages for fetched in answers.values() for one in fetched.seconds]

    def run_python(self, beside: str | None = None) -> Ran:
        """Let rank 0 count, alone or while it fetches rows; the others wait."""
        return self._processes.ask({0: RunPython(_PYTHON_S, beside, _TAXED)}, Ran)[0]

    def serve(self, way: str) -> Ran:
        """Let rank 0 count while the others fetch its rows; gives their messages."""
        others = dict.fromkeys(range(1, self._num_ranks), KeepFetching(_PYTHON_S, way, _TAXED))
        answers = self._processes.ask({0: RunPython(_PYTHON_S, None, _TAXED), **others}, Ran)
        messages = sum(answers[rank].messages for rank in others)
        return Ran(answers[0].work, answers[0].seconds, messages)
