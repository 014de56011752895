"""Worker processes of loaders: how they are started, and that none stays."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


def end_loader_workers() -> None:
    """End the worker processes of all loaders of this process.

    They stay while their loader does. Stock loaders are parts of cycles, and ended by the garbage
    collector each worker takes 5 seconds: its queue has lost its thread by then.
    """
    if mp.active_children():
        for thing in gc.get_objects():
            if type(thing) is _MultiProcessingDataLoaderIter:
                thing._shutdown_workers()


@contextmanager
def forked_workers() -> Iterator[None]:
    """Fork loader workers also on ranks that were spawned.

    There they are spawned too unless told otherwise, and each imports everything anew, which takes
    seconds. Under torchrun they are forked.
    """
    method = mp.get_start_method(allow_none=True)
    mp.set_start_method("fork", force=True)
    try:
        yield
    finally:
        mp.set_start_method(method, force=True)


def note_process(minibatch: Any) -> Any:
    """A transform that notes which process samples, and whether it is a loader's worker."""
    minibatch.sampled_in = os.getpid()
    minibatch.is_in_worker = get_worker_info() is not None
    return minibatch
