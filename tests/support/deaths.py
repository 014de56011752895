"""Ranks of which one dies, and what the others say about it."""

from __future__ import annotations

import multiprocessing as mp
import queue
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

VICTIM = 1
_HOST = "127.0.0.1"


def quick_processes() -> Any:
    """Processes that begin with the packages imported; their kind of `multiprocessing` context."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["featsync", "torch.distributed"])
    return context


def survivors(
    body: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    exit_code: int = -9,
    timeout_s: float = 40.0,
) -> list[Any]:
    """Call ``body(rank, *args)`` on gloo ranks; rank 1 has to die in it.

    Args:
        body: Importable by name; its results pickle.
        num_ranks: How many.
        args: Handed on.
        exit_code: That the victim ends with.
        timeout_s: Seconds until all others have ended well.

    Returns:
        What the others returned, in order.
    """
    context = quick_processes()
    reports = context.Queue()
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    ranks = [
        context.Process(target=_rank_main, args=(reports, body, rank, num_ranks, store.port, args))
        for rank in range(num_ranks)
    ]
    deadline = time.monotonic() + timeout_s
    for process in ranks:
        process.start()
    results: dict[int, Any] = {}
    try:
        while len(results) < num_ranks - 1:
            try:
                rank, failure, result = reports.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"after {timeout_s} s only {list(results)} reported") from None
            assert failure is None, f"rank {rank} failed:\n{failure}"
            results[rank] = result
        for rank, process in enumerate(ranks):
            process.join(max(0.1, deadline - time.monotonic()))
            assert process.exitcode == (exit_code if rank == VICTIM else 0), f"rank {rank}"
    finally:
        for process in ranks:
            process.kill()
            process.join()
        reports.close()
    return [results[rank] for rank in sorted(results)]


def _rank_main(
    reports: Any,
    body: Callable[..., Any],
    rank: int,
    num_ranks: int,
    port: int,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore(_HOST, port, is_master=False),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=60),
        )
        result = body(rank, *args)
    except BaseException:  # noqa: BLE001 - whatever it was, the parent must hear of it
        reports.put((rank, traceback.format_exc(), None))
    else:
        # The victim never comes here: killed in the middle, it would keep the queue's lock.
        reports.put((rank, None, result))
