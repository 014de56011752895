"""A rank dies while rows change: the others hear of it in seconds, and no row is half of a step."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

import featsync
from featsync.dynamic.merge import MERGES, Merge
from featsync.errors import PeerError
from support.deaths import VICTIM, survivors
from support.graphs import HandMade, planned, store_of

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]

NUM_ROWS, LAST_STEP = 40, 4
GARBAGE = 1e30


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Dies(Merge):
    """Merges half of what it is given, and dies.

    Args:
        later: Whether to die with rows that the next step does not want, which a worker merges.
    """

    def __init__(self, later):
        self.later, self.is_armed = later, False

    def apply(self, table, rounds, numbers):
        is_later = threading.current_thread() is not threading.main_thread()
        if self.is_armed and is_later == self.later and rounds and len(rounds[0].rows):
            table[int(rounds[0].rows[0])] = GARBAGE
            die()
        MERGES["sum"].apply(table, rounds, numbers)


class Slow(Merge):
    """Leaves others the time to take a share."""

    def apply(self, table, rounds, numbers):
        time.sleep(0.02)
        MERGES["sum"].apply(table, rounds, numbers)


def in_user_code(clock):
    time.sleep(0.3)  # its worker has merged what was left for later
    die()


def by_leaving(clock):
    time.sleep(0.3)
    os._exit(7)


def with_the_lock(clock):
    with clock.rows.part.lock.hold(5):
        die()


def in_a_read(clock):
    with clock.commits.hold():
        die()


def in_an_update(clock):
    append = clock.commits.areas.append

    def dies(step, rows, *others):
        append(step, rows[:3], *[o[:3] if isinstance(o, torch.Tensor) else o for o in others])
        die()

    clock.commits.areas.append = dies


def in_a_merge(clock):
    clock.commits.merge.is_armed = True


def seen_by(use):
    """What a call gives: values of rows, or the peer and the words of its error."""
    try:
        return "rows", sorted(set(use().flatten().tolist()))
    except PeerError as error:
        return error.peer, str(error)


def trained_until_one_dies(rank, how, later, staleness):
    """Says how many steps went well, what ended the loop after how long, and what reads give."""
    feature = featsync.DynamicFeature(torch.zeros(NUM_ROWS, 2), "sum", timeout=5.0)
    clock = feature.featsync_clock
    clock.commits.merge = Dies(later) if rank == VICTIM else Slow()
    rows = torch.arange(NUM_ROWS)
    wants = [rows.chunk(2)[step % 2] for step in range(60)]  # half is merged beside the next step
    store = store_of({("node", None, "x"): feature})
    steps, error, start = 0, None, 0.0
    try:
        for minibatch in planned(HandMade(wants), store, ["x"], timeout=5.0, staleness=staleness):
            found = minibatch.node_features["x"]
            assert found.eq(found[0, 0]).all()
            if staleness == 0:
                size = torch.distributed.get_world_size()
                assert found[0, 0] == steps * size
            if rank == VICTIM and steps == LAST_STEP:
                how(clock)
            start = time.monotonic()
            feature.update(feature.read() + 1, minibatch=minibatch)
            steps += 1
    except PeerError as caught:
        error = caught.peer, str(caught)
    seconds = time.monotonic() - start
    later_reads = [seen_by(feature.read), seen_by(lambda: feature.read(rows[3:5]))]
    return steps, error, seconds, later_reads


@pytest.mark.parametrize(
    ("how", "later", "num_ranks", "staleness"),
    [
        (in_a_merge, False, 2, 0),
        (in_a_merge, True, 2, 0),
        (in_a_merge, False, 3, 0),
        (in_a_merge, True, 3, 0),
        (in_a_merge, False, 2, 2),
    ],
)
def test_who_dies_in_a_merge_takes_the_table_along(how, later, num_ranks, staleness):
    for steps, error, seconds, reads in survivors(
        trained_until_one_dies, num_ranks, how, later, staleness
    ):
        assert steps >= LAST_STEP - staleness
        assert error is not None
        assert error[0] == "rank 1"
        assert "rank 1 has ended" in error[1]
        assert seconds < 10
        # Some of its share's rows are of the step and some are not: nobody may read them.
        assert [peer for peer, _ in reads] == ["rank 1", "rank 1"]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_who_dies_with_the_lock_takes_the_table_along(num_ranks):
    for steps, error, seconds, reads in survivors(
        trained_until_one_dies, num_ranks, with_the_lock, False, 0
    ):
        assert steps >= LAST_STEP
        assert error is not None
        assert error[0] == "rank 1"
        assert "rank 1 ended while it held the lock of a dynamic feature" in error[1]
        assert seconds < 10
        assert [peer for peer, _ in reads] == ["rank 1", "rank 1"]


@pytest.mark.parametrize(
    ("how", "exit_code"), [(in_user_code, -9), (by_leaving, 7), (in_an_update, -9)]
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_who_dies_between_commits_leaves_a_whole_step(how, exit_code, num_ranks):
    """Others wait for it to end its step; what it had not published is not in the table."""
    for steps, error, seconds, reads in survivors(
        trained_until_one_dies, num_ranks, how, False, 0, exit_code=exit_code
    ):
        assert steps == LAST_STEP + 1
        assert error is not None
        assert error[0] == "rank 1"
        assert seconds < 10
        assert reads == [("rows", [float(LAST_STEP * num_ranks)])] * 2


def test_who_dies_in_a_read_leaves_a_whole_step():
    for staleness in (0, 2):
        for steps, error, seconds, reads in survivors(
            trained_until_one_dies, 2, in_a_read, False, staleness
        ):
            assert steps >= LAST_STEP - staleness
            assert error is not None
            assert error[0] == "rank 1"
            assert seconds < 10
            for peer, found in reads:
                assert peer == "rank 1" or len(found) == 1
