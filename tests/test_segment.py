"""Shared memory without a name: who keeps it, who can attach, and what is left behind."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from featsync.errors import CapacityError, PeerError
from featsync.segment import Segment, SegmentHandle, SegmentRegistry
from support.processes import in_small_shm, open_descriptors


def address(array):
    return array.__array_interface__["data"][0]


def test_new_memory_is_zero_writable_on_a_page_and_has_no_name():
    before = set(Path("/dev/shm").iterdir())

    segment = Segment.create(10_001)

    assert segment.array.shape == (10_001,)
    assert segment.array.dtype == np.uint8
    assert address(segment.array) % 4096 == 0
    assert not segment.array.any()
    segment.array[:] = 7
    assert set(Path("/dev/shm").iterdir()) == before
    assert os.pread(segment.fd, 3, 9_998) == b"\7\7\7"
    assert repr(segment) == f"Segment(10,001 bytes, fd {segment.fd})"


def test_zero_bytes_are_allowed():
    segment = Segment.create(0)

    assert segment.array.shape == (0,)
    assert Segment.open(segment.handle).num_bytes == 0


def test_memory_and_descriptor_live_as_long_as_a_tensor_views_them():
    before = open_descriptors()
    segment = Segment.create(4096)
    handle = segment.handle
    tensor = torch.from_numpy(segment.array).view(torch.int64)[10:]
    del segment
    gc.collect()

    tensor[0] = 5
    assert Segment.open(handle).array[80] == 5

    del tensor
    assert open_descriptors() == before
    with pytest.raises(PeerError, match="cannot attach 4,096 bytes of shared memory of process"):
        Segment.open(handle)


def test_a_thousand_segments_leak_no_descriptor():
    before = open_descriptors()

    for _ in range(1000):
        Segment.create(100)

    assert open_descriptors() == before


def test_an_unrelated_process_attaches_late():
    segment = Segment.create(1 << 20)
    segment.array[:] = 9
    code = """
        import pickle, sys
        from featsync.segment import Segment
        segment = Segment.open(pickle.load(sys.stdin.buffer))
        print(int(segment.array.min()))
        segment.array[5] = 77
        reader = Segment.open(segment.handle, writable=False)
        try:
            reader.array[5] = 1
        except ValueError:
            print("read only", reader.array[5])
    """

    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        input=pickle.dumps(segment.handle),
        capture_output=True,
        timeout=60,
        check=True,
    )

    assert result.stdout.decode().splitlines() == ["9", "read only 77"]
    assert segment.array[5] == 77


def test_a_descriptor_that_is_another_file_by_now_is_refused(tmp_path):
    before = open_descriptors()
    other = Segment.create(100)
    stale = SegmentHandle(os.getpid(), other.fd, 50, (1, 2))

    with pytest.raises(PeerError, match="no longer the shared memory of 50 bytes") as caught:
        Segment.open(stale)

    assert caught.value.peer == f"process {os.getpid()}"
    del other
    assert open_descriptors() == before


def test_a_sent_descriptor_is_mapped_and_checked_for_size():
    segment = Segment.create(5000)
    segment.array[-1] = 3
    left, right = socket.socketpair()
    socket.send_fds(left, [b"x"], [segment.fd])
    _, (fd,), _, _ = socket.recv_fds(right, 1, 1)
    left.close()
    right.close()

    received = Segment.from_fd(fd, 5000, writable=False)

    assert received.array[-1] == 3
    assert not received.array.flags.writeable
    with pytest.raises(CapacityError, match="5,001 bytes was announced, but its file has 5,000"):
        Segment.from_fd(os.dup(segment.fd), 5001, writable=True)


def test_more_than_there_is_is_refused_with_numbers_and_remedy():
    before = open_descriptors()

    with pytest.raises(CapacityError) as caught:
        Segment.create(1 << 50)

    text = str(caught.value)
    assert f"{1 << 50:,} bytes is not to be had" in text
    assert "bytes are free of" in text
    assert "--shm-size" in text
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("code", "reason"),
    [(errno.ENOENT, "No such file"), (errno.EOPNOTSUPP, "not supported"), (errno.EACCES, "denied")],
)
def test_a_missing_dev_shm_is_explained(monkeypatch, code, reason):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("featsync.segment.os.open", refuse)

    with pytest.raises(CapacityError, match=f"needs /dev/shm, and .* {reason}.*--shm-size=8g"):
        Segment.create(1)


def test_a_small_dev_shm_is_an_error_before_anything_is_written():
    code = """
        import os, torch
        from featsync.errors import CapacityError
        from featsync.plan import FeatureKey
        from featsync.segment import Segment
        from featsync.sharing import share_tensors
        from featsync.world import World
        world, key = World.join(), FeatureKey("node", None, "feat")
        try:
            share_tensors({key: torch.zeros(100_000, 64)}, world, 10.0)
        except CapacityError as error:
            print(error)
        segment = Segment.create(7 << 20)  # what fits still fits, to the last byte
        segment.array[:] = 1
        print(int(segment.array.sum()), os.listdir("/dev/shm"))
    """

    result = in_small_shm(code)

    assert result.returncode == 0, (result.returncode, result.stderr)
    error, fits = result.stdout.splitlines()
    assert "25,600,000 bytes is not to be had" in error
    assert "8,388,608 bytes are free of 8,388,608" in error
    assert fits == f"{7 << 20} []"


def test_the_registry_finds_memory_by_address_and_forgets_it_when_nobody_looks():
    registry = SegmentRegistry()
    block, other = registry.allocate(10_000), registry.allocate(500)
    tensor = torch.from_numpy(block).view(torch.int32)[100:]
    start = address(block)

    place = registry.find(tensor.data_ptr(), 4 * len(tensor))
    assert place is not None
    assert (place.number, place.num_bytes, place.offset) == (0, 10_000, 400)
    assert registry.find(start, 10_001) is None
    assert registry.find(address(np.zeros(5)), 5) is None
    assert registry.numbers() == {0, 1}

    del block
    assert registry.numbers() == {0, 1}  # the tensor still looks
    del tensor
    assert registry.find(start, 1) is None
    assert registry.numbers() == {1}
    assert len(other) == 500


def test_a_segment_from_elsewhere_is_added_once():
    registry = SegmentRegistry()
    segment = Segment.create(100)

    assert registry.add(segment) == registry.add(segment) == 0
    assert registry.find(address(segment.array) + 60, 40).offset == 60


def test_the_registry_does_not_grow():
    registry = SegmentRegistry()
    before = open_descriptors()

    for _ in range(500):
        registry.allocate(4096)

    assert registry.numbers() == frozenset()
    assert open_descriptors() == before
