"""How GraphBolt 2.1 iterates, leaves and reads ahead, where featsync leans on it."""

from __future__ import annotations

import sys
import threading
import weakref

import dgl.graphbolt as gb
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterDataPipe
from torch.utils.data.dataloader import _BaseDataLoaderIter

from support.graphs import (
    Counted,
    HandMade,
    ring_batches,
    ring_store,
    seeds_of,
    stock_loader,
)

pytestmark = pytest.mark.dgl


# Iterating and leaving
def loaders_iterators():
    """The iterators of loaders that are asking for something now, outermost last."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, _BaseDataLoaderIter) and owner not in found:
            found.append(owner)
        frame = frame.f_back
    return found


class SeesItsCaller(IterDataPipe):
    """Notes whether the loader's iterator is on the stack when a stage is first asked."""

    def __init__(self, datapipe):
        super().__init__()
        self.datapipe = datapipe
        self.seen = []

    def __iter__(self):
        found = loaders_iterators()
        self.seen.append(len(found))
        weakref.finalize(found.pop(), self.seen.append, "left").atexit = False
        yield from self.datapipe


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loaders_iterator_is_on_the_stack_when_a_stage_behind_the_cut_begins(num_workers):
    stage = SeesItsCaller(ring_batches(10).fetch_feature(ring_store()))
    loader = gb.DataLoader(stage, num_workers=num_workers)

    for _ in loader:
        assert stage.seen == [1]
        break

    assert stage.seen == [1, "left"]
    for _ in loader:
        pass
    assert stage.seen == [1, "left", 1, "left"]


def test_an_error_in_the_loop_body_ends_the_iterator_once_it_was_handled():
    stage = SeesItsCaller(ring_batches(10).fetch_feature(ring_store()))
    loader = gb.DataLoader(stage)

    try:
        for _ in loader:
            raise KeyError("of the loop body")
    except KeyError:
        pass

    assert stage.seen == [1, "left"]


class Suspended(IterDataPipe):
    """Notes when its generator ends."""

    def __init__(self, datapipe):
        super().__init__()
        self.datapipe = datapipe
        self.ended = 0

    def __iter__(self):
        try:
            yield from self.datapipe
        finally:
            self.ended += 1


def test_leaving_a_loop_is_invisible_to_a_stage_until_the_next_iter():
    stage = Suspended(ring_batches(10))
    loader = gb.DataLoader(stage)

    for _ in loader:
        break

    assert stage.ended == 0
    next(iter(loader))
    assert stage.ended == 1


def test_a_source_is_pulled_one_minibatch_at_a_time_by_the_thread_that_asks():
    source = Counted(ring_batches(10))
    loader = stock_loader(source, ring_store(), ["x"])

    for i, _ in enumerate(loader):
        assert source.pulled == i + 1


def test_copy_to_reads_ahead_on_another_thread():
    """Everything before it, an own stage too; at most 2 in its buffer, 1 in hand, 1 delivered."""
    stage = Counted(ring_batches(10).fetch_feature(ring_store(), ["x"]))
    loader = gb.DataLoader(stage.copy_to(torch.device("cpu")))

    seeds = []
    for i, minibatch in enumerate(loader):
        seeds.append(seeds_of(minibatch))
        assert stage.pulled <= i + 4

    assert seeds == [[i, i + 1] for i in range(0, 20, 2)]
    assert threading.get_ident() not in stage.threads
    assert len(stage.threads) == 1


def test_iterating_a_loader_is_collective_where_there_is_a_process_group(monkeypatch):
    """So a validation loop on one rank alone cannot use one: torch makes a group at ``iter()``."""
    made = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "new_group", lambda backend: made.append(backend))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)

    list(gb.DataLoader(HandMade([torch.tensor([1])]).fetch_feature(ring_store(), ["x"])))

    assert made == ["gloo", "gloo"]  # of the loader, and of the one inside its worker cut


def test_a_cpu_build_lacks_what_the_loader_calls_where_a_gpu_is(monkeypatch):
    if hasattr(torch.ops.graphbolt, "set_max_uva_threads"):
        pytest.skip("this DGL was built with CUDA")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    with pytest.raises(AttributeError, match="set_max_uva_threads"):
        stock_loader(ring_batches(2), ring_store(), ["x"])
