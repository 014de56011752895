"""Warm memory: who holds a block, and when it returns."""

from __future__ import annotations

import gc
import threading
import weakref
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featsync.pool import Pool, bytes_of, private_block, tensor_in
from support.memory import counted_pool
from support.tensors import DTYPES

LIMIT_S = 20.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (1, 1)])
def test_gives_the_shape_and_dtype_that_were_asked(dtype, shape):
    pool = Pool()
    tensor = pool.take(shape, dtype)

    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    assert not tensor.requires_grad
    tensor.fill_(1)
    assert bool((tensor == 1).all())


@pytest.mark.parametrize("num_bytes", [1, 64, 1000, 100_003])
def test_private_blocks_start_on_a_cache_line(num_bytes):
    blocks = [private_block(num_bytes) for _ in range(5)]

    assert {len(block) for block in blocks} == {num_bytes}
    assert {block.ctypes.data % 64 for block in blocks} == {0}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_in_a_block_keeps_the_block(dtype):
    block = private_block(bytes_of((4, 3), dtype))
    memory = weakref.ref(block.base)
    address = block.ctypes.data

    tensor = tensor_in(block, (4, 3), dtype).fill_(1)
    view = tensor[1:]
    del block, tensor

    assert memory() is not None
    assert view.data_ptr() == address + bytes_of((3,), dtype)
    assert view.shape == (3, 3)
    assert bool((view == 1).all())
    del view
    assert memory() is None


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_no_rows_take_no_block(shape):
    pool, memory = counted_pool()
    tensor = pool.take(shape, torch.float32)

    assert tensor.shape == shape
    del tensor
    assert memory.sizes == []
    assert pool.free_blocks == 0


def saved_for_backward(tensor):
    weight = torch.ones(tensor.shape, requires_grad=True)
    return weight * tensor  # the graph needs the tensor for the gradient of the weight


HOLDERS = {
    "the tensor": lambda tensor: tensor,
    "a view": lambda tensor: tensor[1:, :2],
    "a view of a view": lambda tensor: tensor.view(-1)[4:].view(3, -1)[1],
    "a part of a split": lambda tensor: torch.split(tensor, [2, 2])[1],
    "an alias without history": lambda tensor: tensor.detach(),
    "an alias of another dtype": lambda tensor: tensor.view(torch.int32),
    "a numpy array": lambda tensor: tensor.numpy(),
    "a view of a numpy array": lambda tensor: tensor.numpy()[2:].T,
    "a buffer": lambda tensor: memoryview(tensor.numpy()),
    "its storage": lambda tensor: tensor.untyped_storage(),
    "an autograd graph": saved_for_backward,
    "a leaf that needs a gradient": lambda tensor: tensor.requires_grad_(),
    "a graph over a leaf": lambda tensor: tensor.requires_grad_().sum(),
    "a module": lambda tensor: torch.nn.Parameter(tensor),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_a_block_stays_with_whoever_holds_it_and_returns_afterwards(hold):
    pool, memory = counted_pool()
    tensor = pool.take((4, 4), torch.float32)
    tensor.fill_(1.0)
    holder = hold(tensor)

    del tensor
    other = pool.take((4, 4), torch.float32)
    assert len(memory.sizes) == 2, "the block was handed out while it was held"
    del other
    assert pool.free_blocks == 1

    del holder
    assert pool.free_blocks == 2


def test_a_held_view_keeps_its_values_while_others_write():
    pool = Pool()
    tensor = pool.take((8, 8), torch.float32)
    tensor.copy_(torch.arange(64.0).view(8, 8))
    column = tensor[:, 3]
    del tensor

    for _ in range(10):
        pool.take((8, 8), torch.float32).fill_(-1.0)

    assert column.tolist() == [3.0 + 8 * row for row in range(8)]


def test_backward_sees_the_values_of_its_forward():
    pool = Pool()
    rows = pool.take((4,), torch.float32)
    rows.copy_(torch.arange(4.0))
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * rows).sum()
    del rows

    for _ in range(10):
        pool.take((4,), torch.float32).fill_(-1.0)
    loss.backward()

    assert weight.grad.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_block_in_a_reference_cycle_returns_when_it_is_collected():
    pool = Pool()
    cycle = {"rows": pool.take((4,), torch.float32)}
    cycle["self"] = cycle
    del cycle

    gc.collect()

    assert pool.free_blocks == 1


def test_the_pool_may_die_before_its_tensors():
    pool = Pool()
    tensor = pool.take((10,), torch.int64).fill_(7)
    del pool
    gc.collect()

    assert tensor.tolist() == [7] * 10


@pytest.mark.parametrize(
    "resize",
    [
        lambda tensor: tensor.resize_(100),
        lambda tensor: tensor.untyped_storage().resize_(400),
        lambda tensor: torch.index_select(torch.zeros(9), 0, torch.arange(9), out=tensor),
    ],
    ids=["resize_", "storage.resize_", "out="],
)
def test_a_delivered_tensor_cannot_be_enlarged(resize):
    pool = Pool()
    tensor = pool.take((4,), torch.float32)

    with pytest.raises(RuntimeError, match="resiz"):
        resize(tensor)


steps = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "drop", "keep a view"]),
        st.integers(1, 400),
        st.integers(0, 9),
    ),
    max_size=60,
)


@given(steps=steps, spare=st.integers(0, 4))
def test_invariant_memory_that_is_held_is_never_handed_out_twice(steps, spare):
    pool = Pool(spare)
    held = []
    for stamp, (action, size, index) in enumerate(steps):
        if action == "take":
            held.append((pool.take((size,), torch.int32).fill_(stamp), stamp))
        elif held and action == "drop":
            held.pop(index % len(held))
        elif held:
            tensor, its_stamp = held.pop(index % len(held))
            held.append((tensor[len(tensor) // 2 :], its_stamp))
            del tensor
        for tensor, its_stamp in held:
            assert bool((tensor == its_stamp).all())


def test_many_threads_drop_tensors_while_one_takes():
    pool = Pool()
    consumers, failures = [], []
    queues = [SimpleQueue() for _ in range(6)]

    def consume(queue):
        while (item := queue.get(timeout=LIMIT_S)) is not None:
            tensor, stamp = item
            if not bool((tensor == stamp).all()):
                failures.append(stamp)
            del item, tensor

    for queue in queues:
        consumers.append(threading.Thread(target=consume, args=(queue,)))
        consumers[-1].start()
    generator = np.random.default_rng(1)
    for stamp, size in enumerate(generator.integers(1, 2000, 6000).tolist()):
        queues[stamp % len(queues)].put((pool.take((size,), torch.int32).fill_(stamp), stamp))
    for queue in queues:
        queue.put(None)
    for consumer in consumers:
        consumer.join(LIMIT_S)

    assert not any(consumer.is_alive() for consumer in consumers)
    assert failures == []
    pool.take((1,), torch.int32)
    assert pool.free_blocks <= 4
