"""Gathering rows, on the CPU and through staging: the right rows, or an error that names the id."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featsync.device import (
    CpuDevice,
    CpuStreams,
    StagedDevice,
)
from featsync.errors import FeatureError
from featsync.move import Call, Gather
from featsync.pool import Pool
from support.moves import gather
from support.strategies import dtypes, ids_of, row_shapes, table_of
from support.tensors import DTYPES, same_bits

CPU = torch.device("cpu")


DEVICES = {
    "cpu": CpuDevice,
    "staged": lambda: StagedDevice(CPU, CpuStreams()),
}


@pytest.fixture(params=DEVICES.values(), ids=DEVICES)
def device(request):
    return request.param()


@pytest.mark.parametrize("name", DEVICES)
@given(
    data=st.data(),
    num_rows=st.integers(1, 20),
    row_shape=row_shapes,
    dtype=dtypes,
    is_strided=st.booleans(),
)
def test_invariant_a_gather_is_plain_indexing(name, data, num_rows, row_shape, dtype, is_strided):
    device = DEVICES[name]()
    source = table_of(num_rows, row_shape, dtype)
    if is_strided:
        source = torch.stack([source, source.flip(0)], dim=1)[:, 0]
    rows = data.draw(ids_of(num_rows))
    places = data.draw(st.permutations(range(len(rows) + 2)))[: len(rows)]
    whole = torch.zeros(len(rows), *row_shape, dtype=dtype)
    parts = torch.zeros(len(rows) + 2, *row_shape, dtype=dtype)
    wanted = parts.clone()
    wanted[places] = source[rows.long()]

    device.execute([gather(source, rows, whole), gather(source, rows, parts, places)])

    assert same_bits(whole, source[rows.long()])
    assert same_bits(parts, wanted)


@pytest.mark.parametrize("positions", [None, [4, 0, 2]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("row_shape", [(), (1,), (3,), (2, 2)])
@pytest.mark.parametrize(
    ("rows", "bad"), [([0, 6, 1], 6), ([5, -1, 99], -1), ([2**31 - 1] * 3, 2**31 - 1)]
)
def test_an_id_outside_the_table_is_named(device, rows, bad, dtype, row_shape, positions):
    source = table_of(6, row_shape, torch.float32)
    target = torch.zeros(3 if positions is None else 5, *row_shape)

    with pytest.raises(FeatureError) as caught:
        device.execute([gather(source, torch.tensor(rows, dtype=dtype), target, positions)])

    assert str(caught.value) == (
        f"feature node/None/feat: id {bad} is outside its table of 6 rows (allowed 0 to 5): "
        "table and graph do not match"
    )
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_id_outside_the_table_is_named_for_every_dtype(device, dtype):
    source = table_of(6, (3,), dtype)

    with pytest.raises(FeatureError, match="id 6 is outside its table of 6 rows"):
        device.execute([gather(source, torch.tensor([6]), torch.empty(1, 3, dtype=dtype))])


def test_an_error_that_is_not_about_ids_stays_what_it_is(device):
    source = torch.zeros(6, 3)

    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        CpuDevice().execute(
            [gather(source, torch.tensor([0]), torch.empty(1, 3, dtype=torch.int64))]
        )


@pytest.mark.parametrize("positions", [None, []])
def test_no_rows_are_no_work(device, positions):
    target = torch.zeros(0 if positions is None else 4, 3)

    device.execute(
        [gather(torch.ones(6, 3), torch.tensor([], dtype=torch.int64), target, positions)]
    )

    assert not target.any()


def test_rows_of_an_empty_table_are_named(device):
    with pytest.raises(FeatureError, match="id 0 is outside its table of 0 rows"):
        device.execute([gather(torch.ones(0, 3), torch.tensor([0]), torch.zeros(1, 3))])


def test_moves_are_carried_out_in_order(device):
    source = torch.arange(6.0).view(6, 1)
    slots = torch.zeros(2, 1)
    target = torch.zeros(2, 1)
    seen = []

    device.execute(
        [
            gather(source, torch.tensor([4, 5]), slots, [1, 0]),
            Call("node/None/other", lambda: seen.append(slots.tolist())),
            gather(slots, torch.tensor([1, 0]), target),
        ]
    )

    assert seen == [[[5.0], [4.0]]]
    assert target.tolist() == [[4.0], [5.0]]


def test_rows_beside_the_positions_are_not_touched(device):
    target = torch.full((5, 2), -1.0)

    device.execute([gather(torch.ones(6, 2), torch.tensor([1, 2]), target, [3, 0])])

    assert target[[1, 2, 4]].eq(-1).all()
    assert target[[0, 3]].eq(1).all()


def test_on_the_cpu_rows_are_delivered_in_the_pools_memory():
    pool = Pool()
    device = CpuDevice()

    rows = device.empty(pool, (3, 2), torch.float32)
    device.hand_over([rows])
    del rows

    assert pool.free_blocks == 1
    assert device.torch_device == CPU


def test_rows_with_positions_pass_through_warm_memory():
    device = CpuDevice()
    source, target = torch.ones(50, 8), torch.zeros(50, 8)

    for size in (10, 3, 11, 5):
        rows = torch.arange(size)
        device.execute([Gather("feat", source, rows, target, rows)])

    assert device._scratch.free_blocks == 1
