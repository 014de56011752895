"""Who takes the minibatches: what they hold, other loops inside theirs, and long use."""

from __future__ import annotations

import dgl.graphbolt as gb
import numpy as np
import pytest
import torch

import featsync
from featsync.device import open_device
from featsync.workers import WORKERS
from support.graphs import (
    assert_as_stock,
    assert_same,
    expected,
    planned,
    planned_loader,
    ring_batches,
    ring_store,
    seeds_of,
    served,
)
from support.processes import assert_no_more_handles_than, open_handles, shared_memory_names

pytestmark = pytest.mark.dgl


# Consumers
def test_copy_to_behind_the_stages_delivers_the_right_static_values():
    """It reads two minibatches ahead, on another thread."""
    store = ring_store()
    for worker in WORKERS:
        pipe = planned(ring_batches(10), served(worker, store), ["x"], ["w"], worker=worker)
        loader = gb.DataLoader(pipe.copy_to(torch.device("cpu")))
        for _ in range(2):
            seeds = []
            for minibatch in loader:
                assert_as_stock(minibatch, store, ["x"], ["w"])
                seeds.append(seeds_of(minibatch))
            assert seeds == [[i, i + 1] for i in range(0, 20, 2)]


HOLDS = {
    "tensor": lambda tensor: tensor,
    "view": lambda tensor: tensor[1:, 1:],
    "array": lambda tensor: tensor.numpy(),
    "autograd": lambda tensor: (tensor * torch.ones(3, requires_grad=True)).grad_fn,
}


@pytest.mark.parametrize("holds", HOLDS)
@pytest.mark.parametrize("worker", WORKERS)
def test_what_the_user_still_holds_is_never_overwritten(worker, holds):
    """Over many minibatches whose memory would fit, held as tensor, view, array or saved tensor."""
    table = torch.arange(60.0).reshape(20, 3)
    store = served(worker, ring_store(x=table))
    loader = planned_loader(ring_batches(30), store, ["x"], worker=worker, device_cache=4)
    held = []

    for i, minibatch in enumerate(loader):
        if i % 3 == 1:
            rows = minibatch.node_features["x"]
            held.append((HOLDS[holds](rows), table[minibatch.input_nodes]))
            del rows
        for thing, wanted in held:
            assert np.array_equal(look(thing), look_wanted(holds, wanted))

    assert len(held) == 10


def look(thing):
    if isinstance(thing, np.ndarray):
        return thing
    if isinstance(thing, torch.Tensor):
        return thing.numpy()
    return thing._saved_self.numpy()


def look_wanted(holds, wanted):
    return wanted[1:, 1:].numpy() if holds == "view" else wanted.numpy()


@pytest.mark.parametrize("worker", WORKERS)
def test_memory_that_nobody_holds_is_used_again(worker, monkeypatch):
    """In steady state nothing is allocated: a handful of blocks serves all minibatches."""
    allocated = []
    store = served(worker, ring_store())
    loader = planned_loader(ring_batches(40), store, ["x"], worker=worker)
    example = WORKERS[worker](open_device(None), 10.0)
    example.close()
    made_by, allocate = type(example), type(example).allocate

    def counted(self, num_bytes):
        allocated.append(num_bytes)
        return allocate(self, num_bytes)

    monkeypatch.setattr(made_by, "allocate", counted)
    for _ in loader:
        pass

    assert 0 < len(allocated) <= 5


@pytest.mark.parametrize("device_cache", [0, 4])
@pytest.mark.parametrize("worker", WORKERS)
def test_a_validation_loop_nested_in_a_training_loop_disturbs_neither(worker, device_cache):
    """Both on the same features and the same cache, at several steps."""
    store = served(worker, ring_store())
    settings = {"worker": worker, "device_cache": device_cache}
    training = planned_loader(ring_batches(10), store, ["x"], ["w"], **settings)
    validation = planned_loader(ring_batches(6), store, ["x"], ["w"], **settings)

    for _ in range(2):
        seeds = []
        for i, minibatch in enumerate(training):
            seeds.append(seeds_of(minibatch))
            if i in (0, 4, 9):
                inner = 0
                for other in validation:
                    assert_as_stock(other, store, ["x"], ["w"])
                    inner += 1
                    if i == 4 and inner == 3:
                        break
                assert inner == (3 if i == 4 else 6)
            assert_as_stock(minibatch, store, ["x"], ["w"])
        assert seeds == [[i, i + 1] for i in range(0, 20, 2)]


def test_a_nested_loop_reads_from_home_while_another_drives_the_cache_and_drives_it_afterwards():
    store = ring_store()
    training = planned_loader(ring_batches(10), store, ["x"], device_cache=1.0)
    validation = planned_loader(ring_batches(10), store, ["x"], device_cache=1.0)
    list(training)
    counts = featsync.stats(validation)

    for _ in training:
        list(validation)
        break
    assert counts.hit_rate == 0
    assert counts.rows > 0

    counts.reset()
    list(validation)
    assert counts.hit_rate == 1.0


def test_two_loaders_side_by_side_deliver_as_if_alone():
    store = ring_store()
    loaders = [
        planned_loader(ring_batches(10), store, ["x"], ["w"], device_cache=4) for _ in range(2)
    ]

    for _ in range(2):
        for pair in zip(*loaders, strict=True):
            for minibatch in pair:
                assert_as_stock(minibatch, store, ["x"], ["w"])
            assert seeds_of(pair[0]) == seeds_of(pair[1])


def test_features_take_part_in_autograd():
    loader = planned_loader(ring_batches(4), ring_store(), ["x"])
    layer = torch.nn.Linear(1, 1)

    losses = [layer(minibatch.node_features["x"]).square().sum() for minibatch in loader]
    torch.stack(losses).sum().backward()

    tables = [expected(m, ring_store(), ["x"])[0]["x"] for m in ring_batches(4)]
    again = torch.nn.Linear(1, 1)
    again.load_state_dict(layer.state_dict())
    torch.stack([again(rows).square().sum() for rows in tables]).sum().backward()
    assert_same(layer.weight.grad, again.weight.grad)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("worker", WORKERS)
def test_twenty_epochs_with_breaks_leave_no_thread_descriptor_or_shared_memory(worker, num_workers):
    before_all = shared_memory_names()
    store = served(worker, ring_store())
    loader = planned_loader(
        ring_batches(6), store, ["x"], num_workers=num_workers, worker=worker, device_cache=4
    )

    def some_epochs(count):
        for number in range(count):
            for i, _ in enumerate(loader):
                if number % 3 == i:
                    break

    some_epochs(8)
    before = open_handles()
    some_epochs(12)

    assert_no_more_handles_than(before)
    assert shared_memory_names() <= before_all


@pytest.mark.parametrize("worker", WORKERS)
def test_loaders_that_are_gone_leave_no_thread_and_no_descriptor(worker):
    store = served(worker, ring_store())

    def use_and_drop():
        list(planned_loader(ring_batches(3), store, ["x"], worker=worker))

    before = open_handles()
    for _ in range(3):
        use_and_drop()

    assert_no_more_handles_than(before)
