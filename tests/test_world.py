"""Ranks meet through the store, know who shares a machine, and name whoever does not come."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from featsync.errors import ConfigError, PeerTimeoutError
from featsync.hosts import Nonce, is_reached
from featsync.world import World
from support.ranks import run_ranks


def test_a_process_without_a_group_is_a_world_of_one():
    world = World.join()

    assert (world.rank, world.size, world.host_of_rank) == (0, 1, (0,))
    assert world.ranks_of_host == world.first_ranks == (0,)
    assert world.is_first_of_host
    assert world.exchange("compare", {"a": 1}) == [{"a": 1}]


def in_threads(size, body):
    """Run ``body(world)`` on ``size`` worlds of one store, each in a thread of this process."""
    store = dist.HashStore()
    results, errors = [None] * size, [None] * size

    def one(rank):
        try:
            results[rank] = body(World(rank, range(10, 10 + size), store, 20.0))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            errors[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return store, results, errors


def test_values_come_in_the_order_of_ranks_and_leave_nothing_in_the_store():
    def body(world):
        return [world.exchange(f"round {i}", (i, world.rank)) for i in range(20)]

    store, results, errors = in_threads(3, body)

    assert errors == [None] * 3
    assert results == [[[(i, rank) for rank in range(3)] for i in range(20)]] * 3
    assert store.num_keys() == 0


def test_ranks_that_come_for_different_purposes_are_all_told():
    def body(world):
        world.exchange("share tables" if world.rank else "start an epoch", None)

    _, _, errors = in_threads(2, body)

    for error in errors:
        assert isinstance(error, ConfigError)
        assert "rank 0 (global rank 10): start an epoch" in str(error)
        assert "rank 1 (global rank 11): share tables" in str(error)


def test_a_rank_that_does_not_come_is_named_in_time():
    def body(world):
        if world.rank == 1:
            return None
        start = time.monotonic()
        with pytest.raises(PeerTimeoutError) as caught:
            world.exchange("share tables", None, timeout=0.3)
        return time.monotonic() - start, str(caught.value), caught.value.peer

    _, results, errors = in_threads(3, body)

    assert errors == [None] * 3
    for rank in (0, 2):
        seconds, text, peer = results[rank]
        assert seconds < 3
        assert (
            f"rank {rank} (global rank {10 + rank}) waited 0.3 s for rank 1 (global rank 11)"
            in text
        )
        assert "to share tables" in text
        assert peer == "rank 1 (global rank 11)"


def test_a_pipe_where_another_machine_has_a_nonce_is_not_read():
    """Machines number their processes alike: what is behind the same number here is not ours."""
    reading, writing = os.pipe()
    try:
        os.write(writing, bytes(16))

        assert not is_reached(Nonce(os.getpid(), writing, bytes(16)))
        assert not is_reached(Nonce(os.getpid(), reading, bytes(16)))
        assert os.read(reading, 100) == bytes(16)
        assert not is_reached(
            Nonce(os.getpid(), reading, bytes(16))
        )  # empty by now: a read would wait
    finally:
        os.close(reading)
        os.close(writing)


def world_facts(rank):
    everybody = World.join(timeout=100)
    again = World.join(timeout=100)
    facts = {
        "rank": (everybody.rank, everybody.size, everybody.first_ranks),
        "host": (everybody.host_of_rank, everybody.ranks_of_host, everybody.is_first_of_host),
        # Two worlds of one group, used crosswise, do not meet.
        "worlds": (again.exchange("a", ("again", rank)), everybody.exchange("a", ("first", rank))),
    }
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(ConfigError, match="global rank 1 is no member"):
            World.join(group)
        alone = World.join(dist.new_group([1], use_local_synchronization=True))
        facts["sub"] = (alone.rank, alone.size, alone.exchange("b", 7))
    else:
        sub = World.join(group, timeout=100)
        facts["sub"] = (sub.rank, sub.size, sub.exchange("b", rank), sub.name(1))
        if rank == 2:
            time.sleep(0.8)
        else:
            with pytest.raises(PeerTimeoutError, match=r"rank 1 \(global rank 2\) to wait"):
                sub.exchange("wait", None, timeout=0.4)
    return facts


@pytest.mark.multirank
def test_three_real_ranks_and_a_sub_group():
    facts = run_ranks(world_facts, 3)

    for rank, found in enumerate(facts):
        assert found["rank"] == (rank, 3, (0,))
        assert found["host"] == ((0, 0, 0), (0, 1, 2), rank == 0)
        assert found["worlds"] == (
            [("again", r) for r in range(3)],
            [("first", r) for r in range(3)],
        )
    assert facts[0]["sub"] == (0, 2, [0, 2], "rank 1 (global rank 2)")
    assert facts[1]["sub"] == (0, 1, [7])
    assert facts[2]["sub"] == (1, 2, [0, 2], "rank 1 (global rank 2)")


def test_the_store_is_asked_with_the_interpreter_locked():
    """Python's debugging allocator aborts where a binding makes objects without holding the GIL.

    ``compare_set`` of torch 2.2 does, which corrupts memory once other threads run.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(
        [*command, "-k", "order_of_ranks or different_purposes"],
        env={**os.environ, "PYTHONMALLOC": "debug"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
