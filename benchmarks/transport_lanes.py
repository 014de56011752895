"""Rows of rank 1 brought to rank 0 again and again, by each way in turn; see `bench_transports.py`.

Lanes of rank 0, and what each is compared with::

    raw          irecv of the bytes; a byte that says "go"; the other rank's isend of what is ready
    landed       order, until the rows are in the buffer                     p2p
    in place     order, until they are where the minibatch wants them        p2p
    select       torch.index_select(out=) out of the peer's mapped memory
    memory       the moves of transport shared_memory
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from featsync.device import CpuDevice
from featsync.exchange.engines import engine_of
from featsync.exchange.split import split_by_rank
from featsync.partitioned_table import PartitionedTable
from featsync.parts import bring_together
from featsync.plan import FeatureKey
from featsync.transports import TRANSPORTS, Landing, Pull

_SETTLE_S = 0.02  # for an announcement to arrive, which is long before its order
_TIMEOUT = 120.0


def measure(rows: int, part_rows: int, width: int, rounds: int) -> dict[str, Any]:
    """Build a table, and measure on rank 0 while rank 1 serves; collective.

    Args:
        rows: To bring, distinct, chosen at random.
        part_rows: That each of the two ranks holds.
        width: float32 numbers a row.
        rounds: How often each lane runs; the first is for warming up and not counted.

    Returns:
        Of rank 0 the seconds of each lane, by round, and facts; of rank 1 nothing.
    """
    engine = engine_of(None, _TIMEOUT)
    rank = dist.get_rank()
    bounds = [0, part_rows, 2 * part_rows]
    generator = torch.Generator().manual_seed(rank)
    part = torch.rand((part_rows, width), generator=generator)
    table = PartitionedTable(
        FeatureKey("node", None, "feat"), bring_together(part, bounds, engine, _TIMEOUT)
    )
    del part
    if rank == 1:
        _serve(table, rows)
        return {}
    return _Reader(engine, table, rows).run(rounds)


class _Reader:
    """Rank 0."""

    def __init__(self, engine: Any, table: PartitionedTable, rows: int) -> None:
        self._table, self._num_rows = table, rows
        self._device = CpuDevice()
        self._engine = engine
        self._session = engine.open_session()
        self._transports = {
            name: TRANSPORTS[name](engine, self._session) for name in ("p2p", "shared_memory")
        }
        width = table.kind.shape[0]
        # As in a minibatch: what the other rank sends is half of the rows, anywhere among them.
        self._target = torch.zeros((2 * rows, width))
        self._warm = torch.zeros((rows, width))
        self._lanes: dict[str, Callable[[int, Pull], float]] = {
            "raw": self._raw,
            "landed": self._landed,
            "in place": self._in_place,
            "select": self._select,
            "memory": self._memory,
        }

    def run(self, rounds: int) -> dict[str, Any]:
        """Run all lanes in turn."""
        seconds: dict[str, list[float]] = {name: [] for name in self._lanes}
        before = None
        batch = 0
        wrong = 0
        for turn in range(rounds + 1):
            pull = self._pull(turn)
            for name, lane in self._lanes.items():
                took = lane(batch, pull)
                batch += 1
                wrong += self._wrong_rows(name, pull)
                if turn:
                    seconds[name].append(took)
        dist.send(torch.zeros(1, dtype=torch.uint8), 1)
        traffic = None
        self._engine.close_session(self._session)
        return {"seconds": seconds, "wrong_rows": wrong, "traffic": traffic}

    def _pull(self, turn: int) -> Pull:
        random = np.random.default_rng(turn)
        size = self._table.parts.partition.sizes[1]
        rows = np.sort(random.choice(size, self._num_rows, replace=False))
        return Pull(self._table, 1, rows, random.permutation(2 * self._num_rows)[: len(rows)])

    def _raw(self, batch: int, pull: Pull) -> float:
        rows = self._warm.view(-1)
        start = time.perf_counter()
        work = dist.irecv(rows, 1)
        dist.send(torch.ones(1, dtype=torch.uint8), 1)
        work.wait()
        return time.perf_counter() - start

    def _landed(self, batch: int, pull: Pull) -> float:
        self._transports["p2p"].announce(batch, [pull])
        time.sleep(_SETTLE_S)
        buffer = self._warm.view(-1).view(torch.uint8)
        words = {"kind": "order", "session": self._session, "batch": batch, "masks": [None]}
        start = time.perf_counter()
        arrival = self._engine.ask(1, words, [], buffer)
        for _ in self._engine.wait(arrival, self._session):
            pass
        return time.perf_counter() - start

    def _in_place(self, batch: int, pull: Pull) -> float:
        return self._by("p2p", batch, pull)

    def _memory(self, batch: int, pull: Pull) -> float:
        return self._by("shared_memory", batch, pull)

    def _by(self, name: str, batch: int, pull: Pull) -> float:
        transport = self._transports[name]
        transport.announce(batch, [pull])
        time.sleep(_SETTLE_S)
        fetches = transport.fetch(batch, [Landing(pull, None, self._target)])
        start = time.perf_counter()
        self._device.execute([*fetches.first, *fetches.last])
        return time.perf_counter() - start

    def _select(self, batch: int, pull: Pull) -> float:
        source, rows = self._table.parts.readable[1], torch.from_numpy(pull.rows)
        start = time.perf_counter()
        torch.index_select(source, 0, rows, out=self._warm)
        return time.perf_counter() - start

    def _wrong_rows(self, name: str, pull: Pull) -> int:
        """Compare what came, and wipe it out."""
        wanted = self._table.parts.readable[1][torch.from_numpy(pull.rows)]
        if name in ("in place", "memory"):
            found = self._target[torch.from_numpy(pull.positions)]
            self._target.zero_()
        else:
            found = self._warm.clone()
            self._warm.zero_()
        return 0 if name == "raw" else int((found != wanted).any(1).sum())


def _serve(table: PartitionedTable, rows: int) -> None:
    """Rank 1: its engine serves; this thread answers a byte that says "go" with rows that are ready."""
    ready = table.parts.readable[1][:rows].clone()
    word = torch.zeros(1, dtype=torch.uint8)
    while True:
        dist.recv(word, 0)
        if not word.item():
            return
        dist.send(ready.view(-1), 0)
