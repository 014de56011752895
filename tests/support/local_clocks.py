"""Ranks that share a table whose rows change, as threads of one process; needs no DGL."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from featsync.dynamic.clock import FeatureClock
from featsync.dynamic.merge import MERGES
from featsync.dynamic.opening import clock_in, size_of
from featsync.dynamic.waits import Neighbours
from featsync.host_lock import HostLock
from featsync.row_kind import RowKind
from featsync.segment import Segment


def local_clocks(
    num_ranks: int, start: torch.Tensor, merge: str, timeout: float = 10.0
) -> list[FeatureClock]:
    """One clock a rank, of one table."""
    kind = RowKind(tuple(start.shape[1:]), start.dtype)
    segment = Segment.create(size_of(len(start), kind, num_ranks))
    HostLock.lay(segment.array[: HostLock.NUM_BYTES])
    rooms: dict[str, Any] = {}
    making = threading.Lock()

    def room(name: str, num_bytes: int, terms: object) -> Any:
        with making:
            return rooms.setdefault(name, Segment.create(num_bytes)).array

    def watch(rank: int) -> Callable[[], None]:
        return lambda: None

    clocks = [
        clock_in(
            segment,
            len(start),
            kind,
            num_ranks,
            MERGES[merge],
            Neighbours(rank, "rank {}".format, watch, timeout),
            room,
        )
        for rank in range(num_ranks)
    ]
    clocks[0].table.copy_(start)
    return clocks


def on_threads(body: Callable[[int], Any], num_ranks: int, timeout_s: float = 60.0) -> list[Any]:
    """Call ``body(rank)`` on a thread each; raises what one of them raised."""
    results: list[Any] = [None] * num_ranks
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "ranks still wait for each other"
    return results
