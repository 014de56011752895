"""Rows of minibatches on their way, and what of a loader outlives its iterations."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from featsync.counts import Stats
from featsync.device import Device
from featsync.dynamic.clock import FeatureClock
from featsync.plan import FeatureKey, Want
from featsync.pool import Pool
from featsync.workers import Ticket, Worker

__all__ = ["Flight", "Mover", "Rows"]

Rows = tuple[torch.Tensor, ...]


@dataclass
class Flight:
    """The rows of one minibatch on their way.

    Attributes:
        wants: What the minibatch wants.
        rows: Per feature the tensors to deliver, one for each of the want's ids; complete once the
            tickets were waited for.
        whole: Per feature all its rows in one tensor, of which ``rows`` are views.
        tickets: What to wait for: the fetch, and later the keep that reads these rows.
    """

    wants: Mapping[FeatureKey, Want]
    rows: dict[FeatureKey, Rows] = field(default_factory=dict)
    whole: dict[FeatureKey, torch.Tensor] = field(default_factory=dict)
    tickets: list[Ticket] = field(default_factory=list)

    def wait(self) -> None:
        """Block until all tickets are done.

        Raises:
            Exception: What the first of them that failed raised.
        """
        for ticket in self.tickets:
            ticket.wait()


class Mover:
    """What outlives a session of one loader: workers, device, warm memory, counts.

    Args:
        device: Where rows are delivered.
        worker: Who moves them.
        stats: Where to count.
        caller: Who runs what has to run in this process, and moves all rows of a feature of which
            other ranks bring some; ``None``: ``worker`` does.
    """

    def __init__(
        self, device: Device, worker: Worker, stats: Stats, caller: Worker | None = None
    ) -> None:
        self.device = device
        self.worker = worker
        self.caller = caller or worker
        self.stats = stats
        # Features that the loader's iterations updated: it does so in the next ones as well.
        self.trained: weakref.WeakSet[FeatureClock] = weakref.WeakSet()
        self._pools: dict[FeatureKey, Pool] = {}

    def empty(self, key: FeatureKey, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory for rows of one feature."""
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = Pool(allocate=self.worker.allocate)
        return self.device.empty(pool, shape, dtype)
