"""Which device rows are delivered on, and what is refused."""

from __future__ import annotations

import pytest
import torch

from featsync.device import (
    CpuDevice,
    CudaStreams,
    StagedDevice,
    check_device,
    free_bytes,
    open_device,
)
from featsync.errors import ConfigError

CPU = torch.device("cpu")


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
