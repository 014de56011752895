"""Values arrive bit for bit, whatever they are and wherever they lie: cases 12 to 16, one rank."""

from __future__ import annotations

from pathlib import Path

import dgl.graphbolt as gb
import numpy as np
import pytest
import torch

import featsync
from featsync.mapped import file_of
from featsync.retention import RETENTION
from featsync.workers import WORKERS
from support.folders import homogeneous_folder
from support.graphs import (
    HandMade,
    assert_as_stock,
    assert_same,
    planned_loader,
    served,
    store_of,
)
from support.tensors import DTYPES, awkward_rows

pytestmark = pytest.mark.dgl


@pytest.mark.parametrize("transport", ["auto", "shared_memory", "p2p"])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("device_cache", [0, 8])
@pytest.mark.parametrize("worker", WORKERS)
def test_every_dtype_arrives_bit_for_bit(worker, device_cache, ids_dtype, transport):
    """Case 12: NaN payloads and -0.0 included; from the table and from the cache."""
    tables = {str(dtype).removeprefix("torch."): awkward_rows(dtype) for dtype in DTYPES}
    stock = store_of({("node", None, name): table for name, table in tables.items()})
    ids = torch.randperm(20, generator=torch.Generator().manual_seed(1)).to(ids_dtype)
    loader = planned_loader(
        HandMade([ids, ids[:9], ids[5:], ids.flip(0)]),
        served(worker, stock),
        list(tables),
        worker=worker,
        transport=transport,
        device_cache=device_cache,
    )

    for _ in range(2):
        for minibatch in loader:
            assert_as_stock(minibatch, stock, list(tables))
    assert (featsync.stats(loader).hit_rate > 0) == (device_cache > 0)


@pytest.mark.parametrize("device_cache", [0, 4, 0.5, "64B"])
@pytest.mark.parametrize("worker", WORKERS)
def test_every_shape_arrives_as_from_stock(worker, device_cache):
    """Case 13: rows of one element, of none, of several axes, and a table of no rows."""
    shapes = {"one": (10, 1), "none": (10, 0), "ghost": (0, 4), "two axes": (10, 2, 3)}
    stock = store_of({("node", t, "f"): awkward_rows(torch.int32, s) for t, s in shapes.items()})
    keys = {type_: ["f"] for type_ in shapes}
    some, few = torch.tensor([3, 9, 0, 5]), torch.tensor([9, 1])
    empty = torch.tensor([], dtype=torch.int64)
    batches = [
        {type_: empty if type_ == "ghost" else ids for type_ in shapes} for ids in (some, few, some)
    ]
    loader = planned_loader(
        HandMade(batches), served(worker, stock), keys, worker=worker, device_cache=device_cache
    )

    for _ in range(2):
        minibatches = list(loader)
        assert len(minibatches) == 3
        for minibatch in minibatches:
            assert_as_stock(minibatch, stock, keys)
            assert minibatch.node_features["ghost", "f"].shape == (0, 4)


class Strided(gb.Feature):
    """A feature that keeps the strides of its tensor."""

    def __init__(self, tensor):
        super().__init__()
        self.tensor = tensor

    def read(self, ids=None):
        return self.tensor if ids is None else torch.index_select(self.tensor, 0, ids)

    def size(self):
        return self.tensor.shape[1:]


class StridedAndOpen(Strided):
    """The same, and featsync may read its tensor without it."""

    @property
    def featsync_tensor(self):
        return self.tensor


STRIDED = {
    "columns": torch.arange(160.0).reshape(20, 8)[:, ::2],
    "transposed": torch.arange(80.0).reshape(4, 20).t(),
    "rows": torch.arange(160.0).reshape(40, 4)[::2],
    "expanded": torch.arange(20.0).reshape(20, 1).expand(20, 4),
    "one row": torch.arange(4.0).reshape(1, 4).expand(20, 4),
}


@pytest.mark.parametrize("device_cache", [0, 8])
@pytest.mark.parametrize("kind", [Strided, StridedAndOpen])
@pytest.mark.parametrize("worker", ["inline", "thread"])
def test_tables_that_are_not_contiguous_arrive_as_from_stock(worker, kind, device_cache):
    """Case 14: a custom feature that keeps strides, read by itself or by the worker."""
    store = store_of({("node", None, name): kind(table) for name, table in STRIDED.items()})
    ids = [torch.tensor([3, 9, 0, 5]), torch.tensor([9, 19]), torch.tensor([3, 9, 1])]
    loader = planned_loader(
        HandMade(ids), store, list(STRIDED), worker=worker, device_cache=device_cache
    )

    for _ in range(2):
        for minibatch in loader:
            assert_as_stock(minibatch, store, list(STRIDED))
            for name, table in STRIDED.items():
                assert torch.equal(minibatch.node_features[name], table[minibatch.input_nodes])


def test_sharing_a_table_that_is_not_contiguous_keeps_its_values():
    """Case 14, for the process worker: shared tables are contiguous copies."""
    store = store_of({("node", None, n): StridedAndOpen(t) for n, t in STRIDED.items()})
    ids = [torch.tensor([3, 9, 0, 5]), torch.tensor([9, 19])]
    loader = planned_loader(HandMade(ids), featsync.share(store), list(STRIDED), worker="process")

    for minibatch in loader:
        for name, table in STRIDED.items():
            assert torch.equal(minibatch.node_features[name], table[minibatch.input_nodes])


@pytest.mark.parametrize("retention", RETENTION)
@pytest.mark.parametrize("worker", WORKERS)
def test_a_minibatch_that_wants_no_rows_gets_none_of_the_right_kind(worker, retention):
    """Case 15, on one rank: between others, first, last, and alone."""
    stock = store_of({("node", None, "x"): awkward_rows(torch.float16)})
    some, empty = torch.tensor([3, 9]), torch.tensor([], dtype=torch.int64)
    store = served(worker, stock)
    loader = planned_loader(
        HandMade([empty, some, empty, empty, some, empty]),
        store,
        ["x"],
        worker=worker,
        retention=retention,
        device_cache=3,
    )

    for _ in range(2):
        for minibatch in loader:
            assert_as_stock(minibatch, stock, ["x"])
    (minibatch,) = list(planned_loader(HandMade([empty]), store, ["x"], worker=worker))
    assert_same(minibatch.node_features["x"], torch.empty(0, 3, dtype=torch.float16))


# Case 16: on-disk tables


@pytest.mark.parametrize("fortran", [False, True], ids=["C order", "Fortran order"])
@pytest.mark.parametrize("worker", WORKERS)
def test_a_dataset_on_disk_is_read_without_write_access(worker, fortran, tmp_path):
    """Case 16: ``in_memory: false``; stock maps for writing and copies what is in Fortran order."""
    folder = homogeneous_folder(tmp_path, fortran=fortran)
    table = torch.from_numpy(np.ascontiguousarray(np.load(folder / "mapped.npy")))
    config = {
        "dataset": {"path": str(folder)},
        "batch_size": 32,
        "stages": [
            {"sample_neighbor": {"fanouts": [3, 3]}},
            {"plan_feature": {"node_feature_keys": ["mapped"], "device_cache": 20}},
            {"sync_feature": {"worker": worker}},
        ],
    }
    list(featsync.build(config))  # GraphBolt preprocesses the folder, which writes to it
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)

    loader = featsync.build(config)

    for _ in range(2):
        for minibatch in loader:
            assert_same(minibatch.node_features["mapped"], table[minibatch.input_nodes])
    mapped = [line for line in maps() if line.endswith("/mapped.npy")]
    assert mapped
    assert all(line.split()[1] == "r--s" for line in mapped)


def maps():
    return Path("/proc/self/maps").read_text().splitlines()


def resident_bytes(path):
    """How much of a mapped file lies in this process's memory."""
    total, is_its = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if begins_mapping(line):
            is_its = line.endswith(str(path))
        elif is_its and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def begins_mapping(line):
    """Whether a line of smaps begins a new mapping: ``start-end rwxp …``."""
    return "-" in line.split(" ", 1)[0]


@pytest.mark.parametrize("device_cache", [0, 100])
def test_a_mapped_table_is_read_where_it_lies(device_cache, tmp_path):
    """Case 16: a table of 64 MiB, of which a few rows are wanted, is not loaded whole."""
    path = tmp_path / "table.npy"
    rows = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(2**18, 64))
    ids = torch.randint(0, 2**18, (3, 20), generator=torch.Generator().manual_seed(3))
    rows[ids.reshape(-1).numpy()] = np.arange(60, dtype=np.float32)[:, None] + np.zeros(64)
    rows.flush()
    del rows
    stock = store_of({("node", None, "x"): torch.from_numpy(np.load(path, mmap_mode="r+"))})
    loader = planned_loader(HandMade(list(ids)), stock, ["x"], device_cache=device_cache)

    for _ in range(2):
        for minibatch in loader:
            assert_as_stock(minibatch, stock, ["x"])

    assert file_of(stock.read("node", None, "x")).path == str(path)
    assert 0 < resident_bytes(path) < 2**24


def test_a_mapped_table_serves_the_process_worker_without_sharing(tmp_path):
    """Case 16: stock's own mapped feature."""
    np.save(tmp_path / "x.npy", np.arange(60, dtype=np.float64).reshape(20, 3))
    spec = gb.OnDiskFeatureData(
        domain="node", name="x", format="numpy", path=str(tmp_path / "x.npy"), in_memory=False
    )
    stock = gb.TorchBasedFeatureStore([spec])
    ids = [torch.tensor([3, 9]), torch.tensor([19, 0, 3])]
    loader = planned_loader(HandMade(ids), stock, ["x"], worker="process", device_cache=2)

    for _ in range(2):
        for minibatch in loader:
            assert_as_stock(minibatch, stock, ["x"])
