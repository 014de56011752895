"""Warm memory: who holds a block, when it returns, and that steady state allocates nothing."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featsync.errors import CapacityError
from featsync.pool import Pool, bytes_of, private_block, tensor_in
from support.strategies import DTYPES

LIMIT_S = 20.0


class CountedMemory:
    """Makes blocks and counts them."""

    def __init__(self):
        self.sizes = []

    def __call__(self, num_bytes):
        self.sizes.append(num_bytes)
        return private_block(num_bytes)


@pytest.fixture
def memory():
    return CountedMemory()


@pytest.fixture
def pool(memory):
    return Pool(allocate=memory)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4), (1, 1)])
def test_gives_the_shape_and_dtype_that_were_asked(pool, dtype, shape):
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
def test_no_rows_take_no_block(pool, memory, shape):
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
def test_a_block_stays_with_whoever_holds_it_and_returns_afterwards(pool, memory, hold):
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


def test_a_held_view_keeps_its_values_while_others_write(pool):
    tensor = pool.take((8, 8), torch.float32)
    tensor.copy_(torch.arange(64.0).view(8, 8))
    column = tensor[:, 3]
    del tensor

    for _ in range(10):
        pool.take((8, 8), torch.float32).fill_(-1.0)

    assert column.tolist() == [3.0 + 8 * row for row in range(8)]


def test_backward_sees_the_values_of_its_forward(pool):
    rows = pool.take((4,), torch.float32)
    rows.copy_(torch.arange(4.0))
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * rows).sum()
    del rows

    for _ in range(10):
        pool.take((4,), torch.float32).fill_(-1.0)
    loss.backward()

    assert weight.grad.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_block_in_a_reference_cycle_returns_when_it_is_collected(pool):
    cycle = {"rows": pool.take((4,), torch.float32)}
    cycle["self"] = cycle
    del cycle

    gc.collect()

    assert pool.free_blocks == 1


def test_a_returned_block_is_used_again(pool, memory):
    first = pool.take((100,), torch.float32)
    address = first.data_ptr()
    del first

    again = pool.take((100,), torch.float32)

    assert again.data_ptr() == address
    assert len(memory.sizes) == 1


def test_a_block_serves_other_shapes_and_dtypes_of_its_size(pool, memory):
    for shape, dtype in [((8, 8), torch.float32), ((64,), torch.int32), ((16,), torch.complex128)]:
        pool.take(shape, dtype)

    assert len(memory.sizes) == 1


def test_a_batch_that_is_an_eighth_larger_needs_no_new_block(pool, memory):
    pool.take((800,), torch.uint8)
    pool.take((900,), torch.uint8)
    assert memory.sizes == [900]

    pool.take((901,), torch.uint8)
    assert memory.sizes == [900, 1013]


def test_the_smallest_block_that_suffices_is_taken(pool):
    held = [pool.take((size,), torch.uint8) for size in (5000, 500, 50)]
    addresses = [tensor.data_ptr() for tensor in held]
    held.clear()

    assert pool.take((400,), torch.uint8).data_ptr() == addresses[1]
    assert pool.take((40,), torch.uint8).data_ptr() == addresses[2]
    assert pool.take((4000,), torch.uint8).data_ptr() == addresses[0]


@pytest.mark.parametrize("spare", [0, 1, 3])
def test_no_more_than_the_spare_blocks_are_kept_and_the_largest_are(memory, spare):
    pool = Pool(spare, memory)
    held = [pool.take((size,), torch.uint8) for size in (800, 1600, 2400, 3200, 4000)]
    held.clear()

    pool.take((0,), torch.uint8)
    pool.take((4100,), torch.uint8)  # the largest serves it, and comes back
    kept = pool.free_blocks - 1

    assert kept == spare
    pool.take((4500,), torch.uint8)
    assert memory.sizes[5:] == []


def test_when_no_block_is_large_enough_the_smallest_makes_room(pool, memory):
    held = [pool.take((size,), torch.uint8) for size in (100, 200, 300)]
    held.clear()

    pool.take((1000,), torch.uint8)

    assert pool.free_blocks == 3
    pool.take((190,), torch.uint8)
    assert memory.sizes == [112, 225, 337, 1125]


def test_the_pool_may_die_before_its_tensors(memory):
    pool = Pool(allocate=memory)
    tensor = pool.take((10,), torch.int64).fill_(7)
    del pool
    gc.collect()

    assert tensor.tolist() == [7] * 10


def test_memory_that_is_not_there_is_the_allocators_own_error_and_the_pool_goes_on(memory):
    def refuse_large(num_bytes):
        if num_bytes > 1000:
            raise CapacityError("no room")
        return memory(num_bytes)

    pool = Pool(allocate=refuse_large)
    pool.take((10,), torch.uint8)

    with pytest.raises(CapacityError, match="no room"):
        pool.take((2000,), torch.uint8)

    assert len(pool.take((20,), torch.uint8)) == 20


@pytest.mark.parametrize(
    "resize",
    [
        lambda tensor: tensor.resize_(100),
        lambda tensor: tensor.untyped_storage().resize_(400),
        lambda tensor: torch.index_select(torch.zeros(9), 0, torch.arange(9), out=tensor),
    ],
    ids=["resize_", "storage.resize_", "out="],
)
def test_a_delivered_tensor_cannot_be_enlarged(pool, resize):
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


@given(
    sizes=st.lists(st.integers(1, 100_000), min_size=1, max_size=12),
    held_at_once=st.integers(1, 3),
)
def test_invariant_steady_state_allocates_nothing(sizes, held_at_once):
    memory = CountedMemory()
    pool = Pool(allocate=memory)
    held = deque(maxlen=held_at_once)

    for _ in range(12):  # each round of one allocation or more enlarges one of a few blocks
        for size in sizes:
            held.append(pool.take((size,), torch.uint8))
    warm = len(memory.sizes)
    for _ in range(5):
        for size in sizes:
            held.append(pool.take((size,), torch.uint8))

    assert len(memory.sizes) == warm


def test_many_threads_drop_tensors_while_one_takes(memory):
    pool = Pool(allocate=memory)
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
