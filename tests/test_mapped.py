"""Tables mapped from files are told from private memory, and mapped again without a copy."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from featsync.errors import ConfigError, PeerError
from featsync.mapped import extent_of, file_of, map_tensor, open_npy
from featsync.segment import Segment


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "a table with spaces.npy"
    np.save(path, np.arange(3000, dtype=np.float32).reshape(1000, 3))
    return path


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_mapped_tensor_and_its_views_name_file_and_offset(table, mode):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, on arrays that cannot be written
        tensor = torch.from_numpy(np.load(table, mmap_mode=mode))

    whole, part = file_of(tensor), file_of(tensor[500:, 1:])

    assert whole is not None
    assert whole.path == str(table)
    assert whole.is_writable == (mode == "r+")
    assert not whole.is_deleted
    raw = table.read_bytes()
    assert np.frombuffer(raw, np.float32, 1, whole.offset)[0] == 0
    assert part.offset == whole.offset + (500 * 3 + 1) * 4
    assert part.identity == whole.identity


def test_private_memory_is_no_files(table):
    assert file_of(torch.arange(10)) is None
    assert file_of(torch.zeros(0, 4)) is None
    assert file_of(torch.zeros(10_000_000)) is None
    assert file_of(torch.from_numpy(np.load(table, mmap_mode="c"))) is None  # writes stay private


def test_shared_memory_is_a_file_without_a_name():
    segment = Segment.create(1 << 16)

    found = file_of(torch.from_numpy(segment.array[4096:]))

    assert found is not None
    assert found.is_deleted
    assert found.offset == 4096
    assert found.identity[1] == segment.handle.identity[1]


def test_extent_covers_strides_and_expanded_rows():
    base = torch.zeros(6, 4)

    assert extent_of(base[:, ::2])[1] == (5 * 4 + 2 + 1) * 4
    assert extent_of(base.t())[1] == 6 * 4 * 4
    assert extent_of(base[:1].expand(9, 4))[1] == 4 * 4
    assert extent_of(torch.zeros(0, 4))[1] == 0


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.filterwarnings("error")
def test_npy_is_mapped_as_it_lies(tmp_path, order):
    values = np.asarray(np.random.default_rng(1).normal(size=(50, 7)), order=order)
    np.save(tmp_path / "x.npy", values)
    (tmp_path / "x.npy").chmod(0o444)

    tensor = open_npy(tmp_path / "x.npy")

    assert torch.equal(tensor, torch.tensor(values))
    assert tensor.stride() == ((7, 1) if order == "C" else (1, 50))
    assert file_of(tensor).path == str(tmp_path / "x.npy")
    assert not file_of(tensor).is_writable


def test_a_large_npy_is_not_loaded(tmp_path):
    path = tmp_path / "large.npy"
    header = np.lib.format.open_memmap(path, "w+", np.float32, (100_000_000, 4))  # sparse file
    header[-1] = 5
    header.flush()
    del header
    code = (
        "import sys, resource, torch; from featsync.mapped import open_npy\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"t = open_npy({str(path)!r}); assert t[-1].tolist() == [5.0] * 4 and t.shape[0] == 10**8\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )

    assert int(result.stdout) < 20_000  # KiB, of 1.6 GB


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_a_part_of_a_file_is_mapped_again_as_it_was(tmp_path, order, mode):
    path = tmp_path / "x.npy"
    np.save(path, np.asarray(np.arange(60_000).reshape(20_000, 3), order=order))
    first = open_npy(path) if mode == "r" else torch.from_numpy(np.load(path, mmap_mode="r+"))
    part = first[3000:15_000:2, 1:]

    again = map_tensor(file_of(part), tuple(part.shape), part.stride(), part.dtype)

    assert torch.equal(again, part)
    assert again.stride() == part.stride()
    assert again.data_ptr() != part.data_ptr()
    if mode == "r+":
        part[0, 0] = -1
        assert again[0, 0] == -1


def test_a_replaced_file_is_noticed(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.zeros(1000))
    found = file_of(open_npy(path)) or pytest.fail("not mapped")
    keep = open_npy(path)
    np.save(tmp_path / "y.npy", np.ones(1000))
    (tmp_path / "y.npy").rename(path)

    with pytest.raises(PeerError, match="no longer the file that the table was mapped from"):
        found.open()
    assert file_of(keep).is_deleted
    path.unlink()
    with pytest.raises(PeerError, match="cannot be mapped here: No such file"):
        found.open()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "No such file"),
        (b"", "No data left in file|cannot be mapped"),
        (b"no header", "cannot be mapped as a .npy file"),
    ],
)
def test_what_cannot_be_mapped_is_said(tmp_path, content, text):
    path = tmp_path / "x.npy"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match=text):
        open_npy(path)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_a_file_without_rows_is_mapped_too(tmp_path, shape):
    np.save(tmp_path / "x.npy", np.zeros(shape, np.float32))

    tensor = open_npy(tmp_path / "x.npy")

    assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.float32)


def test_dtypes_that_torch_lacks_are_named(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(4, dtype=">f4"))

    with pytest.raises(ConfigError, match="holds >f4"):
        open_npy(tmp_path / "x.npy")
