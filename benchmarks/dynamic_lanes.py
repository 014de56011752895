"""Programs that train rows of one table on several ranks; each runs on all of them in turn."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import dgl
import dgl.graphbolt as gb
import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterDataPipe

import featsync
from featsync.dynamic.merge import Entries, RowNumbers, rounds_of
from featsync.optim.learning import Learning
from featsync.optim.rules import Adagrad
from featsync.plan import FeatureKey
from featsync.pool import Pool
from featsync.row_items import take_rows

# DGL puts eps inside of the root, torch and featsync outside; so small that it makes no difference.
LR, EPS = 0.1, 1e-24
NODE_EMBEDDING, INLINE, THREAD, ALONE = "NodeEmbedding", "featsync inline", "featsync", "alone"
FLOOR = "floor"

_Wanted = Sequence[Sequence[torch.Tensor]]  # rows, by rank and step


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        rows: Of the table.
        width: Floats of a row.
        ids: Drawn by each rank in each step, the popular ones often; each is wanted once.
        steps: Of an epoch.
        rounds: Epochs of each program.
        busy_ms: How long a device is busy in each step while the CPU is free (simulated).
    """

    rows: int
    width: int
    ids: int
    steps: int
    rounds: int
    busy_ms: float = 0.0


def ids_of(work: Workload, rank: int, of_ranks: int = 1) -> list[torch.Tensor]:
    """The rows that a rank wants, by step: ``(n,)`` distinct, of a power law.

    With ``of_ranks`` only those whose number leaves ``rank`` when divided by it.
    """
    random = np.random.default_rng(100 + rank)
    # The same for all ranks: popular rows are popular with all.
    names = np.random.default_rng(1).permutation(work.rows)
    found = []
    for _ in range(work.steps):
        drawn = (work.rows * random.random(work.ids) ** 3).astype(np.int64)
        rows = names[np.unique(drawn)]
        found.append(torch.from_numpy(rows[rows % of_ranks == rank] if of_ranks > 1 else rows))
    return found


def measure(work: Workload) -> dict[str, Any]:
    """Run all programs in turn; seconds of each epoch, by program, and what they disagree about."""
    rank, size = dist.get_rank(), dist.get_world_size()
    start = torch.randn((work.rows, work.width), generator=torch.Generator().manual_seed(3))
    lanes = {
        NODE_EMBEDDING: _NodeEmbedding(work, rank, start),
        INLINE: Featsync(work, rank, start, "inline"),
        THREAD: Featsync(work, rank, start, "thread"),
        ALONE: _Alone(work, rank, start),
        FLOOR: _Floor(work, rank, start),
    }
    # Where ranks share rows, DGL takes the mean of their gradients and featsync the sum, so all are
    # compared where they share none.
    alone = [ids_of(work, other, size) for other in range(size)]
    for lane in lanes.values():
        lane.epoch(alone)
        dist.barrier()
    apart = _apart({name: lane.table() for name, lane in lanes.items()})
    seconds: dict[str, list[float]] = {name: [] for name in lanes}
    wanted = [ids_of(work, other) for other in range(size)]
    for turn in range(work.rounds + 1):  # the first warms up
        for name, lane in lanes.items():
            dist.barrier()
            begun = time.perf_counter()
            lane.epoch(wanted)
            dist.barrier()
            if turn:
                seconds[name].append(time.perf_counter() - begun)
    dist.barrier()
    own = {name: lane.table() for name, lane in lanes.items() if name != NODE_EMBEDDING}
    for name, value in _apart(own).items():
        apart[name] = max(apart[name], value)
    return {"seconds": seconds, "apart": apart, "patched": lanes[THREAD].patched_share()}


def _apart(tables: dict[str, torch.Tensor | None]) -> dict[str, float]:
    """The largest difference of each table and featsync's."""
    return {
        name: float((table - tables[THREAD]).abs().max())
        for name, table in tables.items()
        if table is not None
    }


class _NodeEmbedding:
    """DGL's own: rows in shared memory, gradients exchanged through the store and files."""

    def __init__(self, work: Workload, rank: int, start: torch.Tensor) -> None:
        self._work, self._rank = work, rank
        self._embedding = dgl.nn.NodeEmbedding(
            work.rows, work.width, f"rows{work.width}", init_func=lambda rows: rows.copy_(start)
        )
        self._optimizer = dgl.optim.SparseAdagrad([self._embedding], lr=LR, eps=EPS)

    def epoch(self, wanted: _Wanted) -> None:
        for ids in wanted[self._rank]:
            self._optimizer.zero_grad()
            rows = self._embedding(ids, torch.device("cpu"))
            _use(rows, self._work)
            self._optimizer.step()

    def table(self) -> torch.Tensor:
        return self._embedding.weight


class Featsync:
    """Delivered by the stages, trained by ``featsync.optim``."""

    def __init__(self, work: Workload, rank: int, start: torch.Tensor, worker: str) -> None:
        self._work = work
        self._feature = featsync.DynamicFeature(start)
        self._optimizer = featsync.optim.SparseAdagrad(self._feature, lr=LR, eps=EPS)
        store = gb.BasicFeatureStore({("node", None, "x"): self._feature})
        self._rows, self._rank = _Rows(), rank
        pipe = _Given(self._rows).plan_feature(store, ["x"]).sync_feature(worker=worker)
        self._loader = gb.DataLoader(pipe)

    def epoch(self, wanted: _Wanted) -> None:
        """Read and train the rows of all steps."""
        self._rows.wanted = wanted[self._rank]
        for minibatch in self._loader:
            _use(minibatch.node_features["x"], self._work)
            self._optimizer.step(minibatch)
        # The last step's rows are changed within the clock.
        self._feature.commit()

    def table(self) -> torch.Tensor:
        """All rows, as they are now."""
        return self._feature.read()

    def patched_share(self) -> float:
        """Of delivered rows, those that were read again."""
        stats = featsync.stats(self._loader)
        return stats.features[FeatureKey("node", None, "x")].rows_patched / stats.rows


class _Alone:
    """The first rank does all ranks' work by the same means, uncoordinated; the others wait."""

    def __init__(self, work: Workload, rank: int, start: torch.Tensor) -> None:
        self._work, self._warm = work, Pool()
        self._table = start.clone() if rank == 0 else None
        rule = Adagrad(EPS)
        self._learning = Learning(rule, {"sum": torch.zeros_like(start)})
        self._numbers = RowNumbers(work.rows)

    def epoch(self, wanted: _Wanted) -> None:
        if self._table is None:
            return
        for of_ranks in zip(*wanted, strict=True):
            entries = []
            for ids in of_ranks:
                rows = self._warm.take((len(ids), self._work.width), torch.float32)
                take_rows(self._table, ids, rows)
                rows.requires_grad_()
                _use(rows, self._work)
                entries.append(Entries(ids.numpy(), rows.grad, True, LR))
            self._learning.apply(self._table, list(rounds_of(entries)), self._numbers)

    def table(self) -> torch.Tensor | None:
        return self._table


class _Floor:
    """Neither reads nor updates: the rows are there, in warm memory."""

    def __init__(self, work: Workload, rank: int, start: torch.Tensor) -> None:
        self._work, self._rank, self._start = work, rank, start

    def epoch(self, wanted: _Wanted) -> None:
        for ids in wanted[self._rank]:
            _use(self._start[: len(ids)].requires_grad_(), self._work)

    def table(self) -> None:
        return None


class _Rows:
    """Rows of minibatches; hidden from whoever walks a pipe by pickling its stages."""

    def __init__(self) -> None:
        self.wanted: Sequence[torch.Tensor] = ()

    def __reduce__(self) -> tuple[type[_Rows], tuple[()]]:
        return _Rows, ()


class _Given(IterDataPipe[Any]):
    """Minibatches that want the rows given last."""

    def __init__(self, rows: _Rows) -> None:
        super().__init__()
        self._rows = rows

    def __iter__(self) -> Iterator[gb.MiniBatch]:
        for ids in self._rows.wanted:
            minibatch = gb.MiniBatch()
            minibatch.input_nodes = ids
            yield minibatch


def _use(rows: torch.Tensor, work: Workload) -> None:
    """A loss whose gradient depends on the rows, beside a device that is busy for a while."""
    if work.busy_ms:
        time.sleep(work.busy_ms / 1e3)
    rows.backward(rows.detach() * 0.01)
