"""Staging and streams: in which order and whose, with CUDA's twin, and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager

import pytest
import torch

from featsync.device import (
    CpuStreams,
    StagedDevice,
    open_device,
)
from featsync.move import Call, Gather
from featsync.pool import Pool, private_block
from support.moves import gather
from support.strategies import table_of
from support.tensors import same_bits

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
