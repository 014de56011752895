"""The stages among others: worker cuts, other fetchers, other builds of DGL: cases 5, 6 and 10."""

from __future__ import annotations

import os

import dgl.graphbolt as gb
import pytest
import torch

from featsync.errors import ConfigError
from support.epochs import epoch, ring_seeds
from support.graphs import (
    assert_as_stock,
    planned,
    planned_loader,
    ring_batches,
    ring_store,
    seeds_of,
    stock_loader,
)
from support.loader_workers import end_loader_workers, note_process

pytestmark = pytest.mark.dgl


# Case 5: workers silently off


@pytest.mark.parametrize("num_workers", [1, 2])
def test_loader_workers_sample_and_the_planner_sees_all_minibatches_in_order(num_workers):
    """Case 5: stock's worker cut is found, and both stages stand behind it."""
    store = ring_store()
    planned_pipe = planned(ring_batches(10).transform(note_process), store, ["x"], lookahead=3)
    loader = gb.DataLoader(planned_pipe.transform(note_delivery), num_workers=num_workers)
    stock = stock_loader(ring_batches(10), store, ["x"], num_workers=num_workers)
    stock_seeds = [seeds_of(minibatch) for minibatch in stock]
    end_loader_workers()

    for _ in range(2):
        minibatches = list(loader)

        samplers = {minibatch.sampled_in for minibatch in minibatches}
        assert len(samplers) == num_workers
        assert os.getpid() not in samplers
        assert {minibatch.delivered_in for minibatch in minibatches} == {os.getpid()}
        assert [seeds_of(m) for m in minibatches] == stock_seeds
        assert sorted(seed for m in minibatches for seed in seeds_of(m)) == list(range(20))


def note_delivery(minibatch):
    minibatch.delivered_in = os.getpid()
    return minibatch


# Case 6: two feature stages


@pytest.mark.parametrize("num_workers", [0, 2])
def test_fetch_feature_before_the_stages_adds_its_features(num_workers):
    """Case 6: the union, where stock throws the first stage's features away."""
    store = ring_store()
    pipe = planned(ring_batches(10).fetch_feature(store, ["x"]), store, None, ["w"])

    for minibatch in gb.DataLoader(pipe, num_workers=num_workers):
        assert_as_stock(minibatch, store, ["x"], ["w"])


def test_fetch_feature_behind_the_stages_adds_its_features():
    """Case 6: for other features, other types, and one feature twice."""
    store = ring_store()
    pipe = planned(ring_batches(10), store, ["x"], ["w"]).fetch_feature(store, ["x"], None)

    for minibatch in gb.DataLoader(pipe):
        assert_as_stock(minibatch, store, ["x"], ["w"])


def test_two_pairs_of_stages_give_the_union():
    """Case 6: a second Planner and Syncer, which find a cut upstream already."""
    store = ring_store()
    pipe = planned(planned(ring_batches(10), store, ["x"]), store, None, ["w"], lookahead=3)

    for minibatch in gb.DataLoader(pipe, num_workers=2):
        assert_as_stock(minibatch, store, ["x"], ["w"])


def test_fetch_feature_behind_the_stages_is_refused_with_loader_workers():
    """Case 6: stock would nest workers in workers."""
    store = ring_store()
    pipe = planned(ring_batches(10), store, ["x"]).fetch_feature(store, None, ["w"])

    with pytest.raises(ConfigError, match=r"Put that fetch_feature\s+before plan_feature"):
        list(gb.DataLoader(pipe, num_workers=2))


# Case 10: CPU build of DGL where a GPU is present


def test_a_gpu_beside_a_dgl_without_cuda_is_explained_and_then_works(monkeypatch):
    """Case 10: the stock loader fails for want of set_max_uva_threads unless told otherwise."""
    if hasattr(torch.ops.graphbolt, "set_max_uva_threads"):
        pytest.skip("this DGL was built with CUDA")
    store = ring_store()

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.warns(UserWarning, match=r"overlap_feature_fetch=False\) works"):
            pipe = planned(ring_batches(10), store, ["x"], ["w"])
        loader = gb.DataLoader(pipe, overlap_feature_fetch=False)

    assert epoch(loader, store) == ring_seeds()


def test_store_keys_may_be_unknown():
    """A store that does not tell its keys is taken at its word."""

    class Duck:
        def __init__(self, store):
            self._store = store
            self.reads = 0

        def read(self, domain, type_name, name, ids=None):
            self.reads += 1
            return self._store.read(domain, type_name, name, ids)

    store = ring_store()
    duck = Duck(store)

    assert epoch(planned_loader(ring_batches(10), duck, ["x"], ["w"]), store) == ring_seeds()

    assert duck.reads == 30
