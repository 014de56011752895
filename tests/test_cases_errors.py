"""Errors reach the user as they are: case 8."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch

from featsync.errors import FeatureError
from featsync.workers import WORKERS
from support.graphs import (
    HandMade,
    OwnRead,
    assert_as_stock,
    planned_loader,
    ring_batches,
    ring_store,
    seeds_of,
    served,
    store_of,
)

pytestmark = pytest.mark.dgl


def until_error(loader, store, error, match):
    """Seeds of the minibatches, all of them right, that come before the error."""
    seeds = []

    def epoch():
        for minibatch in loader:
            assert_as_stock(minibatch, store, ["x"])
            seeds.append(seeds_of(minibatch))

    with pytest.raises(error, match=match):
        epoch()
    return seeds


# Case 8: errors reach the user


class FailsAt:
    """A transform that raises at the minibatch of one seed, while it is armed."""

    def __init__(self, seed):
        self.seed = seed
        self.is_armed = True

    def __call__(self, minibatch):
        if self.is_armed and self.seed in minibatch.seed_nodes:
            raise ArithmeticError(f"seed {self.seed} is cursed")
        return minibatch


@pytest.mark.parametrize("worker", WORKERS)
def test_an_error_upstream_comes_in_its_turn_and_the_next_epoch_is_whole(worker):
    """Case 8: it is raised as it was, after the minibatches before it, none of them twice."""
    fails = FailsAt(12)
    store = served(worker, ring_store())
    source = ring_batches(10).transform(fails)
    loader = planned_loader(source, store, ["x"], worker=worker, lookahead=4)

    for _ in range(2):
        seeds = until_error(loader, store, ArithmeticError, "seed 12 is cursed")
        assert seeds == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]

    fails.is_armed = False
    assert [seeds_of(minibatch) for minibatch in loader] == [[i, i + 1] for i in range(0, 20, 2)]


def test_an_error_in_a_loader_worker_keeps_its_type():
    """Case 8: with two workers, minibatches of both come before it, each once."""
    store = ring_store()
    source = ring_batches(10).transform(FailsAt(6))
    loader = planned_loader(source, store, ["x"], num_workers=2)

    first = until_error(loader, store, ArithmeticError, "seed 6 is cursed")
    again = until_error(loader, store, ArithmeticError, "seed 6 is cursed")

    assert first == again
    assert len({tuple(seeds) for seeds in first}) == len(first) > 0


def die_at_seed_6(minibatch):
    if 6 in minibatch.seed_nodes:
        os._exit(9)
    return minibatch


@pytest.mark.timeout(60)
def test_a_loader_worker_that_dies_is_an_error_now_and_in_the_next_epoch():
    """Case 8: exit code 9; no old minibatch comes, and nobody waits."""
    store = ring_store()
    loader = planned_loader(ring_batches(10).transform(die_at_seed_6), store, ["x"], num_workers=2)

    first = until_error(loader, store, RuntimeError, "exited unexpectedly")
    again = until_error(loader, store, RuntimeError, "exited unexpectedly")

    for seeds in (first, again):
        assert [6, 7] not in seeds
        assert len({tuple(pair) for pair in seeds}) == len(seeds)


class CursedError(Exception):
    """An error that can be watched."""


@pytest.mark.parametrize("lookahead", [1, 4])
@pytest.mark.parametrize("worker", WORKERS)
def test_an_error_that_was_handled_is_gone_without_the_garbage_collector(worker, lookahead):
    """Case 8: what it holds can be what others wait for.

    Where a loader worker dies while the trainer takes a tensor from another one, the error's
    frames hold that connection. Until it closes, the other worker waits, and with it the trainer in
    its next epoch.
    """
    seen = []

    def curse(minibatch):
        if 6 in minibatch.seed_nodes:
            error = CursedError("of seed 6")
            seen.append(weakref.ref(error))
            try:
                raise error
            finally:
                del error
        return minibatch

    store = served(worker, ring_store())
    loader = planned_loader(
        ring_batches(10).transform(curse), store, ["x"], worker=worker, lookahead=lookahead
    )
    gc.disable()
    try:
        until_error(loader, store, CursedError, "of seed 6")
        (error,) = seen
        assert error() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("worker", WORKERS)
def test_a_row_outside_the_table_comes_in_its_turn_and_the_next_epoch_starts_anew(worker):
    """Case 8: a table of 10 rows for 20 nodes."""
    store = served(worker, ring_store(x=torch.arange(10.0).reshape(10, 1)))
    good, bad = torch.tensor([3, 9]), torch.tensor([4, 13])
    loader = planned_loader(HandMade([good, good, bad, good]), store, ["x"], worker=worker)

    for _ in range(2):
        delivered = []
        with pytest.raises(FeatureError, match="id 13 is outside its table of 10 rows"):
            delivered.extend(minibatch.node_features["x"].tolist() for minibatch in loader)
        # list.extend keeps what came before the error.
        assert delivered == [[[3.0], [9.0]]] * 2


@pytest.mark.parametrize("worker", [name for name in WORKERS if name != "process"])
def test_the_error_of_a_features_own_read_keeps_its_type(worker):
    """Case 8: raised on the worker's thread, seen in the loop."""
    store = store_of({("node", None, "x"): OwnRead(torch.arange(20.0).reshape(20, 1))})
    ids = [torch.tensor([1, 2]), torch.tensor([17]), torch.tensor([3])]
    loader = planned_loader(HandMade(ids), store, ["x"], worker=worker)
    delivered = []

    with pytest.raises(ArithmeticError, match="17 cannot be read"):
        delivered.extend(minibatch.node_features["x"].tolist() for minibatch in loader)

    assert delivered == [[[1.0], [2.0]]]
