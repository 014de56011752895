"""The process of one rank, which fetches rows, or keeps its Python busy, when it is told to.

Started by `featsync.calibration.measure`; see `featsync.rank_program`. Threads of torch's operators
are one a process.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from featsync.calibration.errands import Errand, Errands
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
    SignOfLife,
)
from featsync.calibration.python_work import eager_switches, run_python
from featsync.errors import ConfigError
from featsync.exchange.engines import engine_of
from featsync.rank_program import join_group, serve

_MEASURED = 0  # the rank whose Python is measured


class Rank:
    """Does what it is asked to.

    Args:
        errands: Of this rank.
    """

    def __init__(self, errands: Errands) -> None:
        self._errands = errands
        self._prepared: list[Errand] = []
        self._answers: dict[type, Callable[[Any], object]] = {
            Prepare: self._prepare,
            FetchPrepared: self._fetch,
            RunPython: self._run_python,
            KeepFetching: self._keep_fetching,
        }

    def answer(self, request: object) -> object:
        """Carry out one request."""
        return self._answers[type(request)](request)

    def _prepare(self, request: Prepare) -> Prepared:
        self._prepared = [
            self._errands.make(request.way, request.setting) for _ in range(request.times)
        ]
        return Prepared()

    def _fetch(self, request: FetchPrepared) -> Fetched:
        seconds = []
        for errand in self._prepared:
            started = time.perf_counter()
            errand.fetch()
            seconds.append(time.perf_counter() - started)
        last = self._prepared[-1]
        last.check()
        return Fetched(seconds, last.messages)

    def _run_python(self, request: RunPython) -> Ran:
        with eager_switches():
            if request.beside is None:
                return Ran(*run_python(request.seconds), messages=0)
            errand = self._errands.make(request.beside, request.setting)
            is_over = threading.Event()
            with ThreadPoolExecutor(1, "mover") as mover:
                moving = mover.submit(fetch_until, is_over.is_set, errand)
                try:
                    work, seconds = run_python(request.seconds)
                finally:
                    is_over.set()
                return Ran(work, seconds, moving.result())

    def _keep_fetching(self, request: KeepFetching) -> Ran:
        errand = self._errands.make(request.way, request.setting, of=[_MEASURED])
        deadline = time.monotonic() + request.seconds
        messages = fetch_until(lambda: time.monotonic() > deadline, errand)
        return Ran(work=0, seconds=request.seconds, messages=messages)


def fetch_until(is_over: Callable[[], bool], errand: Errand) -> int:
    """Fetch again and again; give the messages that came before it was over."""
    messages = 0
    while True:
        errand.fetch()
        if is_over():
            return messages
        messages += errand.messages


def _start(spec: RankSpec, send: Callable[[object], None]) -> Callable[[object], object]:
    torch.set_num_threads(1)
    torch.manual_seed(spec.rank)
    send(SignOfLife())
    # The command gives a silent rank up after the timeout. Ranks that wait for it, and know whom
    # they wait for, say so earlier; the group, which does not know, later.
    join_group(spec.store_file, spec.rank, spec.num_ranks, 2 * spec.timeout)
    engine = engine_of(None, spec.timeout / 2)
    if engine is None:
        raise ConfigError(f"{spec.num_ranks} rank: there is nobody to fetch rows of")
    errands = Errands(engine, spec.settings, spec.timeout / 2, lambda: send(SignOfLife()))
    send(Ready(errands.ways))
    return Rank(errands).answer


if __name__ == "__main__":
    serve(int(sys.argv[1]), _start)
