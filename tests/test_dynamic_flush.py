"""Rows that change, written to a file: the old one or the new one, whatever happens."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import featsync
from featsync.errors import ConfigError, PeerError
from featsync.mapped import open_npy
from support.deaths import quick_processes
from support.facts import Launch, name_of
from support.graphs import HandMade, planned, store_of
from support.tensors import DTYPES, awkward_rows, same_bits

pytestmark = pytest.mark.dgl


def loaded(path):
    return torch.from_numpy(np.load(path))


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_dtype_come_back_bit_for_bit(tmp_path, dtype):
    """NumPy has no bfloat16: refused, by name, and nothing is written."""
    feature = featsync.DynamicFeature(awkward_rows(dtype))
    path = tmp_path / "rows.npy"
    if dtype == torch.bfloat16:
        with pytest.raises(ConfigError, match=r"flush: .*bfloat16"):
            feature.flush(path)
        assert names_in(tmp_path) == []
        return
    feature.flush(str(path))
    assert same_bits(loaded(path), awkward_rows(dtype))
    assert names_in(tmp_path) == ["rows.npy"]


def mapped(folder, rows=20):
    path = folder / "x.npy"
    np.save(path, np.arange(3.0 * rows, dtype=np.float32).reshape(rows, 3))
    return path


def test_without_a_path_rows_go_back_to_the_file_that_they_were_mapped_from(tmp_path):
    path = mapped(tmp_path)
    path.chmod(0o644)
    feature = featsync.DynamicFeature(open_npy(path))
    feature.update(torch.full((20, 3), 7.0))
    assert loaded(path)[0, 0] == 0
    feature.flush()
    assert loaded(path).eq(7).all()
    assert path.stat().st_mode & 0o777 == 0o644  # whoever could read it still can
    again = featsync.DynamicFeature(open_npy(path))
    assert same_bits(again.read(), feature.read())
    feature.update(torch.full((20, 3), 8.0))
    feature.flush()  # again and again
    assert loaded(path).eq(8).all()
    assert names_in(tmp_path) == ["x.npy"]


def test_a_new_file_may_be_read_by_whom_the_user_lets(tmp_path):
    before = os.umask(0o027)
    try:
        featsync.DynamicFeature(torch.zeros(4, 1)).flush(tmp_path / "new.npy")
    finally:
        os.umask(before)
    assert (tmp_path / "new.npy").stat().st_mode & 0o777 == 0o640


def square(folder):
    np.save(folder / "x.npy", np.arange(9.0).reshape(3, 3))
    return open_npy(folder / "x.npy")


def test_a_table_that_was_turned_is_not_written_back(tmp_path):
    feature = featsync.DynamicFeature(square(tmp_path).t())
    with pytest.raises(ConfigError, match="Give a path"):
        feature.flush()


def test_a_file_in_fortran_order_is_written_back(tmp_path):
    np.save(tmp_path / "x.npy", np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    feature = featsync.DynamicFeature(open_npy(tmp_path / "x.npy"))
    feature.flush()
    assert same_bits(loaded(tmp_path / "x.npy"), torch.arange(6.0).double().reshape(2, 3))


@pytest.mark.parametrize(
    "rows_of",
    [
        lambda table: table.clone(),
        lambda table: table[5:],
        lambda table: table[:, :2],
        lambda table: table[::2],
        lambda table: table.view(torch.int32),
    ],
    ids=["a copy", "some rows", "some columns", "every other row", "another dtype"],
)
def test_without_a_path_rows_that_are_not_a_whole_file_are_an_error(tmp_path, rows_of):
    """Else the file would lose what was never read from it."""
    path = mapped(tmp_path)
    before = path.read_bytes()
    feature = featsync.DynamicFeature(rows_of(open_npy(path)))
    with pytest.raises(ConfigError, match=r"not mapped from .*\.npy file.* Give a path"):
        feature.flush()
    assert path.read_bytes() == before
    feature.flush(tmp_path / "other.npy")
    assert same_bits(loaded(tmp_path / "other.npy"), feature.read())


def test_a_file_that_is_not_npy_is_not_written_back(tmp_path):
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(240))
    memory = np.memmap(path, np.float32, "r+", shape=(20, 3))
    feature = featsync.DynamicFeature(torch.from_numpy(memory))
    with pytest.raises(ConfigError, match=r"flush: .*not mapped from .*\.npy file"):
        feature.flush()
    assert path.read_bytes() == bytes(240)


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    feature = featsync.DynamicFeature(torch.zeros(4, 1))
    with pytest.raises(OSError, match="No such file"):
        feature.flush(tmp_path / "none" / "x.npy")
    assert names_in(tmp_path) == []


def fail(*args):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("where", ["save", "fsync", "replace"])
def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, where):
    path = mapped(tmp_path)
    before = path.read_bytes()
    feature = featsync.DynamicFeature(open_npy(path))
    feature.update(torch.ones(20, 3))
    owner, name = {"save": (np, "save"), "fsync": (os, "fsync"), "replace": (Path, "replace")}[
        where
    ]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(OSError, match="No space left"):
            feature.flush()
    assert path.read_bytes() == before
    assert names_in(tmp_path) == ["x.npy"]
    feature.flush()
    assert loaded(path).eq(1).all()


def flush_and_die(path, where):
    """Flush in a process that is killed on the way."""
    feature = featsync.DynamicFeature(open_npy(path))
    feature.update(torch.ones(20, 3))

    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    def save_half(file, array):
        file.write(b"\x93NUMPY" + bytes(70))
        file.flush()
        die()

    def replace(self, target):
        os.replace(self, target)  # noqa: PTH105 - Path's own is patched
        die()

    if where == "before":
        np.save = die
    elif where == "in save":
        np.save = save_half
    elif where == "before it is on the disk":
        os.fsync = die
    elif where == "before the rename":
        Path.replace = die
    else:
        Path.replace = replace
    feature.flush()


KILLS = ["before", "in save", "before it is on the disk", "before the rename", "after the rename"]


@pytest.mark.parametrize("where", KILLS)
def test_a_killed_flush_leaves_the_old_file_or_the_new_one(tmp_path, where):
    path = mapped(tmp_path)
    before = loaded(path)
    process = quick_processes().Process(target=flush_and_die, args=(path, where))
    process.start()
    process.join(60)
    assert process.exitcode == -9
    wanted = torch.ones(20, 3) if where == "after the rename" else before
    assert same_bits(loaded(path), wanted)


def a_flush_writes_once_what_all_ranks_wrote(rank):
    """Inside a loop it writes the last committed step; all come back when the file is there."""
    folder = Path(shared_folder())
    feature = featsync.DynamicFeature(torch.zeros(20, 2), "sum", timeout=20.0)
    store = store_of({("node", None, "x"): feature})
    for step, _ in enumerate(planned(HandMade([torch.arange(20)] * 3), store, ["x"])):
        feature.update(feature.read() + 1)
        feature.flush(folder / f"{step}.npy")
        assert loaded(folder / f"{step}.npy").eq(2 * step).all()
    dist.barrier()
    feature.flush(folder / "end.npy")
    assert loaded(folder / "end.npy").eq(6).all()
    assert len(names_in(folder)) == 4


def a_flush_that_fails_on_the_first_rank_is_told_to_all(rank):
    folder = Path(shared_folder())
    feature = featsync.DynamicFeature(torch.zeros(4, 1), timeout=20.0)
    with pytest.raises(OSError if rank == 0 else PeerError, match="No such file"):
        feature.flush(folder / "none" / "x.npy")
    with pytest.raises(ConfigError if rank == 0 else PeerError, match="Give a path"):
        feature.flush()
    half = featsync.DynamicFeature(torch.zeros(4, 1, dtype=torch.bfloat16), timeout=20.0)
    with pytest.raises(ConfigError if rank == 0 else PeerError, match="bfloat16"):
        half.flush(folder / "x.npy")
    feature.flush(folder / "x.npy")
    assert names_in(folder) == ["x.npy"]


def only_the_first_rank_needs_the_file(rank):
    """Its values are everybody's, and so is its file."""
    folder = Path(shared_folder())
    path = folder / "x.npy"
    if rank == 0:
        mapped(folder)
    dist.barrier()
    rows = open_npy(path) if rank == 0 else torch.zeros(20, 3)
    feature = featsync.DynamicFeature(rows, timeout=20.0)
    assert same_bits(feature.read(), loaded(path))
    dist.barrier()
    if rank == 1:
        feature.update(torch.full((20, 3), 5.0))
    dist.barrier()
    feature.flush()
    assert loaded(path).eq(5).all()


def shared_folder():
    """A folder that all ranks use, made by the first; goes with its process."""
    made = [tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None]
    KEPT.extend(made)
    name = [made[0].name if made[0] else None]
    dist.broadcast_object_list(name, 0)
    return name[0]


KEPT = []
FACTS = [
    a_flush_writes_once_what_all_ranks_wrote,
    a_flush_that_fails_on_the_first_rank_is_told_to_all,
    only_the_first_rank_needs_the_file,
]
LAUNCH = Launch(2, FACTS, timeout_s=60)


@pytest.mark.multirank
@pytest.mark.parametrize("fact", FACTS, ids=name_of)
def test_a_flush_is_collective(fact):
    LAUNCH.check(fact)
