"""A rank whose own minibatch fails while rows change: its error, and the others go on."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import featsync
from featsync.dynamic.merge import MERGES, Merge
from support.facts import Launch, name_of
from support.graphs import HandMade, OwnRead, planned, store_of

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]


class Slow(Merge):
    """Leaves others the time to take a share."""

    def apply(self, table, rounds, numbers):
        time.sleep(0.02)
        MERGES["sum"].apply(table, rounds, numbers)


HALVES = torch.arange(40).chunk(2)


def an_error_of_another_feature_holds_nobody_up(rank):
    """It comes while rows that this rank was to merge later still wait; it then does other work."""
    for worker in ("thread", "inline"):
        feature = featsync.DynamicFeature(torch.zeros(40, 2), "sum", timeout=5.0)
        feature.featsync_clock.commits.merge = Slow()
        store = store_of(
            {("node", None, "x"): feature, ("node", None, "y"): OwnRead(torch.zeros(40, 1))}
        )
        # The even ones have 17; rank 0 wants its y there from the fourth on.
        wants = [HALVES[1 - step % 2] for step in range(10)]
        if rank == 0:
            wants[4] = torch.tensor([17, 30])
            wants = [ids if step == 4 else ids[ids != 17] for step, ids in enumerate(wants)]
        keys = ["x", "y"] if rank == 0 else ["x"]
        start = time.monotonic()
        steps = iter(planned(HandMade(wants), store, keys, timeout=5.0, worker=worker))
        count = 0
        try:
            for _ in steps:
                feature.update(torch.ones(40, 2) + feature.read())
                count += 1
        except ArithmeticError:
            assert rank == 0
            assert count == 4
        else:
            assert (rank, count) == (1, 10)
        dist.barrier()
        assert time.monotonic() - start < 10
        assert feature.read().eq(4 * 2 + 6).all()


FACTS = [an_error_of_another_feature_holds_nobody_up]
LAUNCH = Launch(2, FACTS, timeout_s=50)


@pytest.mark.parametrize("fact", FACTS, ids=name_of)
def test_own_errors(fact):
    LAUNCH.check(fact)
