"""Rows between ranks, without any host: right values, and what happens when a rank goes wrong."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import queue
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from featsync.errors import PeerError, PeerTimeoutError
from featsync.transports import TRANSPORTS
from support.exchange import Reader, tables_of
from support.processes import open_descriptors, wait_until
from support.ranks import run_ranks

pytestmark = pytest.mark.multirank


def read_at_their_own_pace(rank, num_ranks):
    """Each rank as many minibatches as it likes, announced as far ahead as it likes."""
    sent = {}
    for how in ("runs", "mixed"):
        engine, tables = tables_of(rank, num_ranks, how)
        for transport in TRANSPORTS:
            before = engine.served.rows_sent
            dist.barrier()  # nobody asks before everybody has looked
            reader = Reader(tables, transport)
            num_minibatches, ahead = 4 + 3 * rank, 1 + 2 * rank
            for batch in range(num_minibatches + ahead):
                if batch < num_minibatches:
                    reader.announce(batch, seed=100 * rank + batch)
                if batch >= ahead:
                    sent[how, transport] = sent.get((how, transport), 0) + reader.fetch(
                        batch - ahead, every=1 + batch % 3
                    )
            reader.rows.close()
            dist.barrier()
            sent[how, transport] = (sent[how, transport], engine.served.rows_sent - before)
    return sent


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_rows_arrive_and_as_many_are_sent_as_are_received(num_ranks):
    results = run_ranks(read_at_their_own_pace, num_ranks, num_ranks, timeout_s=90)

    for how in ("runs", "mixed"):
        received, read = (sum(part) for part in zip(*(r[how, "p2p"] for r in results), strict=True))
        assert received == read > 0
        # Out of this machine's memory each rank reads all rows itself.
        assert all(r[how, "shared_memory"] == (0, 0) for r in results)


def read_in_threads(rank, num_ranks):
    """Several loaders at once over one engine: rows do not get mixed up."""
    import threading

    _, tables = tables_of(rank, num_ranks, "mixed")
    failures = []

    def work(number):
        try:
            reader = Reader(tables, "p2p")
            for batch in range(30):
                reader.announce(batch, seed=1000 * rank + 100 * number + batch, num_rows=50)
                reader.fetch(batch)
            reader.rows.close()
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [repr(failure) for failure in failures]


def test_loaders_of_several_threads_share_an_engine():
    assert run_ranks(read_in_threads, 2, 2, timeout_s=60) == [[], []]


# One rank goes wrong


def victim_and_witness(rank, store_file, reports, what):
    """Rank 1 stops serving in some way; rank 0 says what it saw, and how long it took."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store_file}", rank=rank, world_size=2,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    _, tables = tables_of(rank, 2, "mixed", timeout=3.0)
    reader = Reader(tables, "p2p")
    reader.announce(0, seed=rank)
    reader.fetch(0)
    dist.barrier()
    if rank == 1:
        # It must not touch the queue: killed in the middle, it would keep its lock for ever.
        time.sleep(60)
        return
    reader.announce(1, seed=1)
    reports.put(("ready", None))
    while not Path(f"{store_file}.{what}").exists():
        time.sleep(0.01)
    start = time.monotonic()
    try:
        for batch in range(1, 200):
            reader.announce(batch + 1, seed=batch)
            reader.fetch(batch)
            time.sleep(0.01)
        seen = None
    except PeerError as error:
        seen = (type(error), error.peer, str(error))
    reports.put(("seen", (seen, time.monotonic() - start)))


def watch(what, act):
    """Start two ranks, do something to rank 1, and tell what rank 0 saw."""
    context = mp.get_context("spawn")
    reports, found = context.Queue(), {}
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        ranks = [
            context.Process(target=victim_and_witness, args=(rank, store, reports, what))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        try:
            while "seen" not in found:
                try:
                    name, value = reports.get(timeout=40)
                except queue.Empty:
                    pytest.fail(f"rank 0 saw nothing; so far {found}")
                found[name] = value
                if name == "ready":
                    act(ranks[1].pid)
                    Path(f"{store}.{what}").touch()
            ranks[0].join(20)
            assert ranks[0].exitcode == 0
        finally:
            for process in ranks:
                process.kill()
                process.join()
    return found["seen"]


def test_a_killed_rank_is_named_at_once():
    (kind, peer, words), seconds = watch("killed", lambda pid: os.kill(pid, signal.SIGKILL))

    assert (kind, peer) == (PeerError, "rank 1")
    assert "rank 1 has ended, and with it went the rows that it held" in words
    assert seconds < 10


def test_a_rank_that_gives_no_sign_of_life_is_named_after_the_timeout():
    (kind, peer, words), seconds = watch("stopped", lambda pid: os.kill(pid, signal.SIGSTOP))

    assert (kind, peer) == (PeerTimeoutError, "rank 1")
    assert "rank 0 waited 3 s for rows of rank 1, which gave no sign of life" in words
    assert seconds < 30


def tables_that_nobody_wants_any_more(rank, num_ranks):
    """A part is kept until the last rank has dropped the table."""
    engine, kept = tables_of(rank, num_ranks, "mixed")
    counts = []
    for turn in range(3):
        _, tables = tables_of(rank, num_ranks, "mixed")
        reader = Reader(tables, "p2p")
        if turn == 1 and rank == 1:
            dist.barrier()  # rank 0 has dropped its tables by now
        reader.announce(0, seed=rank)
        reader.fetch(0)
        reader.rows.close()
        del reader, tables
        gc.collect()
        if turn == 1 and rank == 0:
            dist.barrier()
        dist.barrier()
        assert wait_until(lambda: len(engine.served.tables) == len(kept))
        counts.append(open_descriptors())
    return counts


def test_tables_are_let_go_when_no_rank_wants_them_any_more():
    for counts in run_ranks(tables_that_nobody_wants_any_more, 2, 2, timeout_s=60):
        assert counts[-1] <= counts[0]


def nothing_is_left(rank, num_ranks):
    """Threads, descriptors and segments after many iterations are those after the first."""
    _, tables = tables_of(rank, num_ranks, "mixed")
    counts = []
    for turn in range(12):
        reader = Reader(tables, "p2p")
        for batch in range(4):
            reader.announce(batch, seed=batch)
        for batch in range(4 if turn % 2 else 2):  # left early every other time
            reader.fetch(batch)
        reader.rows.close()
        dist.barrier()
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    engine = next(iter(tables.values())).parts.engine
    wait_until(lambda: not engine.served.num_announced)
    return counts[1], counts[-1], engine.served.num_announced


def test_iterations_leave_nothing_behind_even_when_left_early():
    for first, last, announced in run_ranks(nothing_is_left, 2, 2, timeout_s=60):
        assert last <= first
        assert announced == 0
