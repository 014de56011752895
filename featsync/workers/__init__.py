"""How moves are carried out: the table of names, and the contract behind it."""

from __future__ import annotations

from collections.abc import Callable

from featsync.device import Device
from featsync.workers.contract import Ticket, Worker
from featsync.workers.inline import InlineWorker
from featsync.workers.process import ProcessWorker
from featsync.workers.thread import ThreadWorker


def _inline(device: Device, _timeout: float) -> Worker:
    return InlineWorker(device)  # waits for nobody


WORKERS: dict[str, Callable[[Device, float], Worker]] = {
    "inline": _inline,
    "thread": ThreadWorker,
    "process": ProcessWorker,
}
"""Name to what makes one, from the device to deliver to and seconds without a sign of life."""

__all__ = ["WORKERS", "Ticket", "Worker"]
