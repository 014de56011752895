"""Run one function on several ranks, each a process, and fail as one test."""

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

_HOST = "127.0.0.1"


def run_ranks(
    body: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Call ``body(rank, *args)`` on gloo ranks and return what each returned, in order.

    A rank that raises, dies or hangs fails the caller with that rank's own traceback or exit
    code, and all ranks are ended. ``body`` must be importable by name, results must pickle.

    Args:
        body: Runs on every rank with a default process group.
        world_size: How many ranks.
        args: Handed to ``body`` after the rank.
        timeout_s: Seconds from the start until everything has to be over.
    """
    context = mp.get_context("spawn")
    reports = context.Queue()
    # Held here, at a port that the system chooses: no two tests can want the same one. (A store
    # in a file becomes slower with every question.)
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    ranks = [
        context.Process(
            target=_rank_main,
            args=(reports, body, rank, world_size, store.port, timeout_s, args),
            name=f"rank {rank}",
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        return _results(ranks, reports, timeout_s)
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join()
            process.close()
        reports.close()


def _results(ranks: list[Any], reports: Any, timeout_s: float) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        try:
            rank, failure, result = reports.get(timeout=0.1)
        except queue.Empty:
            _check_alive(ranks, results, deadline, timeout_s)
            continue
        if failure is not None:
            raise AssertionError(f"rank {rank} failed:\n{failure}")
        results[rank] = result
    # The last thing a rank does is to leave; one that cannot is a failure as well.
    for rank, process in enumerate(ranks):
        process.join(max(0.1, deadline - time.monotonic()))
        if process.exitcode != 0:
            state = "is still running" if process.exitcode is None else "ended"
            raise AssertionError(
                f"rank {rank} reported and then {state} (exit code {process.exitcode})"
            )
    return [results[rank] for rank in range(len(ranks))]


def _check_alive(
    ranks: list[Any], results: dict[int, Any], deadline: float, timeout_s: float
) -> None:
    pending = [rank for rank in range(len(ranks)) if rank not in results]
    dead = {r: ranks[r].exitcode for r in pending if ranks[r].exitcode not in (None, 0)}
    if dead:
        raise AssertionError(f"ranks died, exit codes {dead}")
    if time.monotonic() > deadline:
        raise AssertionError(f"ranks {pending} still running after {timeout_s} s")


def _rank_main(
    reports: Any,
    body: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    timeout_s: float,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)  # ranks share the few cores of a test machine
    try:
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore(_HOST, port, is_master=False),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = body(rank, *args)
        dist.barrier()
        # The group holds the GIL while it waits for its threads, one of which may still need it to
        # let go of the barrier's tensor (torch 2.2): it gets the time.
        time.sleep(0.05)
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - whatever it was, the parent must hear of it
        reports.put((rank, traceback.format_exc(), None))
    else:
        reports.put((rank, None, result))
