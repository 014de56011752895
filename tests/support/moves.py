"""Moves of rows, and a worker to carry them out."""

from __future__ import annotations

import torch

from featsync.device import CpuDevice
from featsync.move import Gather
from featsync.pool import Pool
from featsync.table import TensorTable
from featsync.workers import WORKERS
from support.sessions import TIMEOUT_S, in_shared_memory
from support.strategies import NODE, table_of


def gather(source, rows, target, positions=None):
    """A gather of the rows of one feature, to these positions of the target."""
    places = None if positions is None else torch.tensor(positions, dtype=torch.int64)
    return Gather(str(NODE), source, rows, target, places)


class Bench:
    """A worker, a table that every kind of worker can read, and memory that it can fill."""

    def __init__(self, name, timeout=TIMEOUT_S):
        self.worker = WORKERS[name](CpuDevice(), timeout)
        self.source, self.segment = in_shared_memory(table_of(100, (3,), torch.float32))
        self.worker.admit(TensorTable(NODE, lambda: self.source, self.segment))
        self.pool = Pool(allocate=self.worker.allocate)

    def empty(self, num_rows):
        return self.pool.take((num_rows, 3), torch.float32)

    def gather(self, *rows, target=None, positions=None, source=None):
        target = self.empty(len(rows)) if target is None else target
        source = self.source if source is None else source
        return gather(source, torch.tensor(rows), target, positions)

    def expected(self, *rows):
        return self.source[list(rows)].tolist()
