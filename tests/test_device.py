"""Gathering rows: on the CPU, and through staging and streams with CUDA's twin."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featsync.device import (
    CpuDevice,
    CpuStreams,
    CudaStreams,
    StagedDevice,
    check_device,
    free_bytes,
    open_device,
)
from featsync.errors import ConfigError, FeatureError
from featsync.move import Call, Gather
from featsync.pool import Pool, private_block
from support.sessions import same_bits
from support.strategies import DTYPES, dtypes, ids_of, row_shapes, table_of

CPU = torch.device("cpu")


class RecordingStreams(CpuStreams):
    """CUDA's twin, which writes down what it is asked."""

    def __init__(self):
        self.calls = []
        self.is_side = False

    @contextmanager
    def side(self):
        self.calls.append("side")
        self.is_side = True
        yield
        self.is_side = False
        self.calls.append("end of side")

    def synchronize(self):
        self.calls.append("synchronize")

    def used_here(self, tensor):
        assert not self.is_side, "the consumer's stream is not the side stream"
        self.calls.append(tensor)

    def staging_block(self, num_bytes):
        self.calls.append(num_bytes)
        return private_block(num_bytes)


DEVICES = {
    "cpu": CpuDevice,
    "staged": lambda: StagedDevice(CPU, CpuStreams()),
}


@pytest.fixture(params=DEVICES.values(), ids=DEVICES)
def device(request):
    return request.param()


def gather(source, rows, target, positions=None):
    positions = None if positions is None else torch.tensor(positions, dtype=torch.int64)
    return Gather("node/None/feat", source, rows, target, positions)


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


def test_accelerator_memory_comes_from_the_side_stream_and_not_from_the_pool():
    streams = RecordingStreams()
    pool = Pool(allocate=lambda num_bytes: pytest.fail("the pool was asked"))

    rows = StagedDevice(CPU, streams).empty(pool, (3, 2), torch.bfloat16)

    assert rows.shape == (3, 2)
    assert rows.dtype == torch.bfloat16
    assert streams.calls == ["side", "end of side"]


def test_moves_are_queued_on_the_side_stream_and_waited_for_there():
    streams = RecordingStreams()
    device = StagedDevice(CPU, streams)
    seen = []

    device.execute(
        [
            gather(torch.ones(6, 2), torch.tensor([1]), torch.zeros(1, 2)),
            Call("other", lambda: seen.append(streams.is_side)),
        ]
    )

    assert seen == [True]
    assert streams.calls == ["side", 8 + 1, "synchronize", "end of side"]


def test_staging_is_not_reused_before_the_copies_are_done():
    class LateStreams(RecordingStreams):
        def synchronize(self):
            assert device._staging.free_blocks == 0, "a block is back while it is copied from"

    device = StagedDevice(CPU, LateStreams())
    source, target = torch.ones(6, 2), torch.zeros(1, 2)

    device.execute([gather(source, torch.tensor([row]), target) for row in range(3)])

    assert device._staging.free_blocks == 3


@pytest.mark.parametrize("num_moves", [1, 3, 12])
def test_staging_is_warm_after_the_first_minibatch(num_moves):
    streams = RecordingStreams()
    device = StagedDevice(CPU, streams)
    source, target = torch.ones(6, 2), torch.zeros(1, 2)
    moves = [
        Gather(f"feature {number}", source, torch.tensor([1]), target)
        for number in range(num_moves)
    ]

    device.execute(moves)
    streams.calls.clear()
    for _ in range(4):
        device.execute(moves)

    assert [call for call in streams.calls if isinstance(call, int)] == []


def test_the_consumers_stream_becomes_an_owner_of_what_it_gets():
    streams = RecordingStreams()
    rows = [torch.zeros(1), torch.zeros(2)]

    StagedDevice(CPU, streams).hand_over(rows)

    assert len(streams.calls) == 2
    assert all(a is b for a, b in zip(streams.calls, rows, strict=True))


def test_cudas_twin_does_everything_at_once():
    streams = CpuStreams()

    with streams.side():
        streams.synchronize()
        streams.used_here(torch.zeros(1))

    assert streams.staging_block(10).nbytes == 10


class FarTensor(torch.Tensor):
    """A tensor that says it lies on an accelerator, and computes on the CPU."""

    @property
    def device(self):
        return torch.device("cuda", 0)

    def to(self, *_args, **_kwargs):
        return self


def far(tensor):
    return tensor.as_subclass(FarTensor)


@pytest.mark.parametrize("positions", [None, torch.tensor([2, 0])])
def test_rows_that_lie_on_the_device_already_are_gathered_there(positions):
    streams = RecordingStreams()
    source = table_of(6, (2,), torch.float32)
    target = torch.zeros(2 if positions is None else 3, 2)
    rows = torch.tensor([5, 1])
    places = None if positions is None else far(positions)

    StagedDevice(CPU, streams).execute(
        [Gather("feat", far(source), far(rows), far(target), places)]
    )

    assert target[slice(None) if positions is None else positions].tolist() == (
        source[rows].tolist()
    )
    assert not any(isinstance(call, int) for call in streams.calls), "no staging is needed"


@pytest.mark.parametrize("name", [None, "cpu", "cpu:0", CPU])
def test_without_an_accelerator_rows_are_delivered_on_the_cpu(name):
    check_device(name)

    assert isinstance(open_device(name), CpuDevice)


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", 3.5, ["cpu"]])
def test_what_is_no_device_is_refused(name):
    with pytest.raises(ConfigError) as caught:
        check_device(name)

    assert str(caught.value) == (
        f"sync_feature.device = {name!r} is not a device; it can be cpu, cuda or cuda:N"
    )


@pytest.mark.parametrize("name", ["meta", "mps", torch.device("xpu")])
def test_a_kind_of_device_that_rows_are_not_delivered_on_is_refused(name):
    kind = torch.device(name).type

    with pytest.raises(ConfigError) as caught:
        open_device(name)

    assert str(caught.value) == (
        f"sync_feature.device = {name!r}: rows are delivered on cpu or cuda, not {kind}"
    )


@pytest.mark.parametrize(
    ("name", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), (torch.device("cuda:3"), 2)]
)
def test_a_cuda_device_that_is_not_there_is_refused(monkeypatch, name, count):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    with pytest.raises(ConfigError) as caught:
        open_device(name)

    assert str(caught.value) == (
        f"sync_feature.device = {name!r} is not there: torch {torch.__version__} sees {count} "
        "CUDA devices. Leave device out to deliver on the CPU."
    )


class FakeStream:
    def __init__(self, device):
        self.device = device
        self.is_through = False

    def synchronize(self):
        self.is_through = True


def test_cuda_is_asked_through_torch(monkeypatch):
    """What `CudaStreams` asks of torch; what CUDA does with it needs a GPU, below."""
    recorded = []

    class Delivered:
        device = "the device of the rows"

        def record_stream(self, stream):
            recorded.append(stream)

    def pinned(num_bytes, *, dtype, pin_memory):
        assert pin_memory
        return torch.zeros(num_bytes, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: ("on", stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("current of", device))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (123, 456))
    device = open_device("cuda:1")
    streams = device._streams

    what, side = streams.side()
    streams.synchronize()
    streams.used_here(Delivered())
    monkeypatch.setattr(torch, "empty", pinned)
    block = streams.staging_block(10)

    assert isinstance(device, StagedDevice)
    assert isinstance(streams, CudaStreams)
    assert device.torch_device == side.device == torch.device("cuda:1")
    assert (what, side.is_through) == ("on", True)
    assert recorded == [("current of", "the device of the rows")]
    assert (block.dtype, block.shape) == ("uint8", (10,))
    assert free_bytes(device) == 123


def test_free_memory_is_what_the_system_says():
    with open("/proc/meminfo", encoding="ascii") as table:  # noqa: PTH123 - a table, not a file
        total = int(table.readline().split()[1]) * 1024

    assert 0 < free_bytes(CpuDevice()) <= total


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64], ids=str)
def test_rows_reach_a_gpu_from_home_and_from_its_slots(dtype):
    device = open_device("cuda")
    source = table_of(1000, (16,), dtype)
    slots = torch.zeros(10, 16, dtype=dtype, device="cuda")
    whole = device.empty(Pool(), (6, 16), dtype)
    rows = torch.tensor([999, 0, 5])

    device.execute(
        [
            gather(source, rows, slots, [9, 3, 1]),
            gather(source, rows, whole, [0, 2, 4]),
            gather(slots, torch.tensor([9, 3, 1]), whole, [1, 3, 5]),
        ]
    )
    device.hand_over([whole])

    assert same_bits(whole[0::2].cpu(), source[rows])
    assert same_bits(whole[1::2].cpu(), source[rows])


@pytest.mark.gpu
def test_memory_on_a_gpu_is_flat_over_minibatches():
    device = open_device("cuda")
    source = table_of(10_000, (64,), torch.float32)
    reserved: Sequence[int] = []

    for _ in range(40):
        whole = device.empty(Pool(), (5000, 64), torch.float32)
        device.execute([gather(source, torch.arange(5000), whole)])
        device.hand_over([whole])
        del whole
        torch.cuda.synchronize()
        reserved.append(torch.cuda.memory_reserved())

    assert reserved[-1] == reserved[5]
