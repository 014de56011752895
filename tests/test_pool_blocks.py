"""Which block a pool takes, which it keeps, and that steady state allocates nothing."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featsync.errors import CapacityError
from featsync.pool import Pool, private_block
from support.memory import counted_pool


def test_a_returned_block_is_used_again():
    pool, memory = counted_pool()
    first = pool.take((100,), torch.float32)
    address = first.data_ptr()
    del first

    again = pool.take((100,), torch.float32)

    assert again.data_ptr() == address
    assert len(memory.sizes) == 1


def test_a_block_serves_other_shapes_and_dtypes_of_its_size():
    pool, memory = counted_pool()
    for shape, dtype in [((8, 8), torch.float32), ((64,), torch.int32), ((16,), torch.complex128)]:
        pool.take(shape, dtype)

    assert len(memory.sizes) == 1


def test_a_batch_that_is_an_eighth_larger_needs_no_new_block():
    pool, memory = counted_pool()
    pool.take((800,), torch.uint8)
    pool.take((900,), torch.uint8)
    assert memory.sizes == [900]

    pool.take((901,), torch.uint8)
    assert memory.sizes == [900, 1013]


def test_the_smallest_block_that_suffices_is_taken():
    pool = Pool()
    held = [pool.take((size,), torch.uint8) for size in (5000, 500, 50)]
    addresses = [tensor.data_ptr() for tensor in held]
    held.clear()

    assert pool.take((400,), torch.uint8).data_ptr() == addresses[1]
    assert pool.take((40,), torch.uint8).data_ptr() == addresses[2]
    assert pool.take((4000,), torch.uint8).data_ptr() == addresses[0]


@pytest.mark.parametrize("spare", [0, 1, 3])
def test_no_more_than_the_spare_blocks_are_kept_and_the_largest_are(spare):
    pool, memory = counted_pool(spare=spare)
    held = [pool.take((size,), torch.uint8) for size in (800, 1600, 2400, 3200, 4000)]
    held.clear()

    pool.take((0,), torch.uint8)
    pool.take((4100,), torch.uint8)  # the largest serves it, and comes back
    kept = pool.free_blocks - 1

    assert kept == spare
    pool.take((4500,), torch.uint8)
    assert memory.sizes[5:] == []


def test_when_no_block_is_large_enough_the_smallest_makes_room():
    pool, memory = counted_pool()
    held = [pool.take((size,), torch.uint8) for size in (100, 200, 300)]
    held.clear()

    pool.take((1000,), torch.uint8)

    assert pool.free_blocks == 3
    pool.take((190,), torch.uint8)
    assert memory.sizes == [112, 225, 337, 1125]


def test_memory_that_is_not_there_is_the_allocators_own_error_and_the_pool_goes_on():
    def refuse_large(num_bytes):
        if num_bytes > 1000:
            raise CapacityError("no room")
        return private_block(num_bytes)

    pool = Pool(allocate=refuse_large)
    pool.take((10,), torch.uint8)

    with pytest.raises(CapacityError, match="no room"):
        pool.take((2000,), torch.uint8)

    assert len(pool.take((20,), torch.uint8)) == 20


@given(
    sizes=st.lists(st.integers(1, 100_000), min_size=1, max_size=12),
    held_at_once=st.integers(1, 3),
)
def test_invariant_steady_state_allocates_nothing(sizes, held_at_once):
    pool, memory = counted_pool()
    held = deque(maxlen=held_at_once)

    for _ in range(12):  # each round of one allocation or more enlarges one of a few blocks
        for size in sizes:
            held.append(pool.take((size,), torch.uint8))
    warm = len(memory.sizes)
    for _ in range(5):
        for size in sizes:
            held.append(pool.take((size,), torch.uint8))

    assert len(memory.sizes) == warm
