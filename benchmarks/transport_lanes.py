"""Rows of rank 1 brought to rank 0 again and again, by each way in turn; see `bench_transports.py`.

Lanes of rank 0, all of the same rows; the last three where rank 1 is on the same machine::

    raw          irecv of so many bytes; a byte that says "go"; the isend of what is ready there
    landed       p2p: order, until the rows are in the buffer
    in place     p2p: order, until they are where the minibatch wants them
    select       torch.index_select(out=) out of the peer's mapped memory
    memory       shared_memory: the moves that bring a minibatch
    scattered    shared_memory: those of a minibatch of which other machines hold the rest
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from featsync.device import CpuDevice
from featsync.exchange.engine import Engine
from featsync.exchange.engines import engine_of
from featsync.move import Move
from featsync.partitioned_table import PartitionedTable
from featsync.parts import bring_together
from featsync.plan import FeatureKey, Fetch, Want
from featsync.remote_rows import Delivery, RemoteRows
from featsync.routes import route_of
from featsync.transports import TRANSPORTS, Landing, Pull

KEY = FeatureKey("node", None, "feat")
_SETTLE_S = 0.02  # for an announcement to arrive, which comes long before its order
_TIMEOUT = 120.0


@dataclass(frozen=True)
class Setting:
    """What is brought.

    Attributes:
        width: float32 numbers a row.
        rows: At once; distinct, chosen at random of those of rank 1.
        part_rows: That each of the two ranks holds, dealt out at random.
    """

    width: int
    rows: int
    part_rows: int


def measure(setting: Setting, rounds: int) -> dict[str, Any]:
    """Build a table, and measure on rank 0 while rank 1 serves; collective.

    Returns:
        Of rank 0 the seconds of each lane by round, without the first, which warms up, and facts;
        of rank 1 nothing.
    """
    engine = engine_of(None, _TIMEOUT)
    if engine is None:
        raise RuntimeError("this takes two ranks")
    owners = np.random.default_rng(0).permutation(2 * setting.part_rows) % 2
    part = _rows_of(np.flatnonzero(owners == engine.world.rank), setting.width)
    parts = bring_together(part, torch.from_numpy(owners), engine, _TIMEOUT)
    del part
    table = PartitionedTable(KEY, parts)
    if parts.rank == 1:
        _serve(table, setting.rows)
        return {}
    return _Reader(engine, table, setting).run(rounds)


class _Reader:
    """Rank 0."""

    def __init__(self, engine: Engine, table: PartitionedTable, setting: Setting) -> None:
        self._engine, self._table, self._setting = engine, table, setting
        self._device = CpuDevice()
        self._session = engine.open_session()
        self._transports = {name: TRANSPORTS[name](engine, self._session) for name in TRANSPORTS}
        is_near = 1 in table.parts.readable
        route = route_of(table, "shared_memory" if is_near else "p2p")
        self._whole = RemoteRows({KEY: table}, {KEY: route})
        rows, width = setting.rows, setting.width
        # As in a minibatch: what the other rank holds is half of the rows, anywhere among them.
        self._target = torch.zeros((2 * rows, width))
        self._warm = torch.zeros((rows, width))
        self._lanes: dict[str, Callable[[int, Pull], float]] = {
            "raw": self._raw,
            "landed": self._landed,
            "in place": lambda batch, pull: self._by("p2p", batch, pull),
        }
        if is_near:
            self._lanes |= {
                "select": self._select,
                "memory": self._memory,
                "scattered": lambda batch, pull: self._by("shared_memory", batch, pull),
            }

    def run(self, rounds: int) -> dict[str, Any]:
        """Run all lanes in turn."""
        seconds: dict[str, list[float]] = {name: [] for name in self._lanes}
        before, batch, wrong = self._engine.traffic, 0, 0
        for turn in range(rounds + 1):
            pull = self._pull(turn)
            for name, lane in self._lanes.items():
                took = lane(batch, pull)
                batch += 1
                wrong += self._wrong_rows(name, pull)
                if turn:
                    seconds[name].append(took)
        dist.send(torch.zeros(1, dtype=torch.uint8), 1)
        self._whole.close()
        self._engine.close_session(self._session)
        return {
            **asdict(self._setting),
            "rounds": rounds,
            "seconds": seconds,
            "wrong_rows": wrong,
            **self._cost_of_ids(self._engine.traffic - before, 2 * (rounds + 1)),
        }

    def _pull(self, turn: int) -> Pull:
        random = np.random.default_rng(turn)
        size = self._table.parts.partition.sizes[1]
        rows = np.sort(random.choice(size, self._setting.rows, replace=False))
        return Pull(self._table, 1, rows, random.permutation(2 * len(rows))[: len(rows)])

    def _raw(self, batch: int, pull: Pull) -> float:
        start = time.perf_counter()
        work = dist.irecv(self._warm.view(-1), 1)
        dist.send(torch.ones(1, dtype=torch.uint8), 1)
        work.wait()
        return time.perf_counter() - start

    def _landed(self, batch: int, pull: Pull) -> float:
        self._transports["p2p"].announce(batch, [pull])
        time.sleep(_SETTLE_S)
        words = {"kind": "order", "session": self._session, "batch": batch, "masks": [None]}
        buffer = self._warm.view(-1).view(torch.uint8)
        start = time.perf_counter()
        arrival = self._engine.ask(1, words, [], buffer)
        for _ in self._engine.wait(arrival, self._session):
            pass
        return time.perf_counter() - start

    def _by(self, name: str, batch: int, pull: Pull) -> float:
        transport = self._transports[name]
        transport.announce(batch, [pull])
        time.sleep(_SETTLE_S)
        start = time.perf_counter()
        fetches = transport.fetch(batch, [Landing(pull, None, self._target)])
        self._device.execute([*fetches.first, *fetches.last])
        return time.perf_counter() - start

    def _select(self, batch: int, pull: Pull) -> float:
        source, rows = self._table.parts.readable[1], torch.from_numpy(pull.rows)
        start = time.perf_counter()
        torch.index_select(source, 0, rows, out=self._warm)
        return time.perf_counter() - start

    def _memory(self, batch: int, pull: Pull) -> float:
        ids = self._table.parts.partition.rows_of(1)[pull.rows]
        self._whole.announce(batch, {KEY: Want((torch.from_numpy(ids),))})
        fetches = self._whole.fetch(batch, {KEY: Delivery(Fetch(len(ids)), self._warm)})
        moves: list[Move] = [*fetches.first, *fetches.last]
        start = time.perf_counter()
        self._device.execute(moves)
        return time.perf_counter() - start

    def _wrong_rows(self, name: str, pull: Pull) -> int:
        """Compare what came, and wipe it out."""
        wanted = _rows_of(self._table.parts.partition.rows_of(1)[pull.rows], self._setting.width)
        if name in ("in place", "scattered"):
            found = self._target[torch.from_numpy(pull.positions)]
            self._target.zero_()
        else:
            found = self._warm.clone()
            self._warm.zero_()
        return 0 if name == "raw" else int((found != wanted).any(1).sum())

    def _cost_of_ids(self, traffic: Any, fetches: int) -> dict[str, float]:
        """Bytes an id that was announced, and their share of all bytes of the link."""
        ids = traffic.sent["announce"].num_bytes
        amounts = [*traffic.sent.values(), *traffic.received.values()]
        return {
            "bytes_an_id": ids / (fetches * self._setting.rows),
            "share_of_ids": ids / sum(amount.num_bytes for amount in amounts),
        }


def _rows_of(ids: NDArray[np.int64], width: int) -> torch.Tensor:
    """Rows of the table, ``(n, width)``: made up, so that either rank knows them."""
    return torch.from_numpy(ids).float().unsqueeze(1) + torch.arange(width) / width


def _serve(table: PartitionedTable, rows: int) -> None:
    """Rank 1: its engine serves rows; this thread sends some when it is told to."""
    ready = table.parts.readable[1][:rows].clone()
    word = torch.zeros(1, dtype=torch.uint8)
    while True:
        dist.recv(word, 0)
        if not word.item():
            return
        dist.send(ready.view(-1), 0)
