"""One copy of each table per machine; every rank hears of what is wrong."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from featsync import sharing
from featsync.errors import CapacityError, ConfigError, PeerError
from featsync.mapped import file_of, open_npy
from featsync.plan import FeatureKey
from featsync.sharing import share_tensors
from featsync.world import World
from support.processes import open_descriptors
from support.ranks import run_ranks
from support.tensors import DTYPES, bits, random_bits

FEAT = FeatureKey("node", None, "feat")
AGE = FeatureKey("node", "paper", "age")


def tables_of_all_kinds():
    shapes = [(10, 1), (10, 0), (0, 4), (10, 2, 3), (10,)]
    tables = {
        FeatureKey("node", str(dtype), str(shape)): random_bits(dtype, shape)
        for dtype in DTYPES
        for shape in shapes
    }
    base = random_bits(torch.float32, (20, 8))
    tables[FeatureKey("node", "strided", "columns")] = base[:, ::2]
    tables[FeatureKey("node", "strided", "transposed")] = base.t()
    tables[FeatureKey("node", "strided", "expanded")] = base[:, :1].expand(20, 4)
    return tables


def test_a_single_rank_moves_its_tables_into_shared_memory():
    tables = tables_of_all_kinds()

    shared = share_tensors(tables, World.join())

    assert list(shared) == list(tables)
    for key, table in tables.items():
        part = shared[key]
        assert (part.tensor.shape, part.tensor.dtype) == (table.shape, table.dtype)
        assert part.tensor.is_contiguous()
        assert torch.equal(bits(part.tensor), bits(table))
        assert part.segment is not None
        assert part.segment.num_bytes == table.numel() * table.element_size()


def test_a_table_is_filled_in_portions(monkeypatch):
    monkeypatch.setattr(sharing, "_PORTION_BYTES", 100)
    table = torch.arange(1001).view(143, 7)

    shared = share_tensors({FEAT: table, AGE: table.t()}, World.join())

    assert torch.equal(shared[FEAT].tensor, table)
    assert torch.equal(shared[AGE].tensor, table.t())


def test_mapped_tables_stay_in_their_files(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(600.0).reshape(100, 6))
    table = open_npy(tmp_path / "x.npy")

    shared = share_tensors({FEAT: table[10:], AGE: table * 1}, World.join())

    assert shared[FEAT].segment is None
    assert shared[FEAT].tensor.data_ptr() == table[10:].data_ptr()
    assert shared[AGE].segment is not None


@pytest.mark.parametrize(
    "table", [torch.zeros(3, 3).to_sparse(), torch.zeros(3, device="meta")], ids=["sparse", "meta"]
)
def test_what_is_no_dense_cpu_tensor_is_refused(table):
    with pytest.raises(
        ConfigError, match=r"feature node/None/feat is torch.* on .*dense tensor on"
    ):
        share_tensors({FEAT: table}, World.join())


def test_sharing_needs_no_second_copy():
    code = """
import torch
from pathlib import Path
from featsync.plan import FeatureKey
from featsync.sharing import share_tensors
from featsync.world import World
def private_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
import threading
base = torch.ones(500_000, 128)
share_tensors({FeatureKey("node", None, "warm"): torch.ones(300, 70).t()}, World.join())
before = private_kib()
peak, stop = [0], threading.Event()
def watch():
    while not stop.wait(0.002):
        peak[0] = max(peak[0], private_kib())
thread = threading.Thread(target=watch)
thread.start()
shared = share_tensors({FeatureKey("node", None, "x"): base[:, ::2]}, World.join())
stop.set()
thread.join()
print(peak[0] - before)
"""

    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )

    assert int(result.stdout) < 20_000  # KiB, of 128 MB


def in_threads(tables_of_rank, host_of_rank):
    """Share from worlds in threads of this process, with machines as told."""
    store = dist.HashStore()
    outcomes = [None] * len(host_of_rank)

    def one(rank):
        world = World(rank, range(len(host_of_rank)), store, 20.0)
        world._host_of_rank = host_of_rank
        try:
            outcomes[rank] = share_tensors(tables_of_rank[rank], world)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            outcomes[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(host_of_rank))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_each_machine_has_its_copy():
    values = torch.arange(12.0).view(4, 3)

    outcomes = in_threads([{FEAT: values}, None, {FEAT: values + 0}, None], (0, 0, 1, 1))

    identities = [outcome[FEAT].segment.handle.identity for outcome in outcomes]
    assert identities[0] == identities[1] != identities[2] == identities[3]
    for outcome in outcomes:
        assert torch.equal(outcome[FEAT].tensor, values)


def test_ranks_that_disagree_are_all_told_who_has_what():
    outcomes = in_threads(
        [
            {FEAT: torch.zeros(10, 4), AGE: torch.zeros(10)},
            {FEAT: torch.zeros(12, 4), AGE: torch.zeros(10)},
            {FEAT: torch.zeros(10, 4)},
            None,
        ],
        (0, 0, 0, 0),
    )

    for outcome in outcomes:
        assert isinstance(outcome, ConfigError)
        text = str(outcome)
        assert (
            "node/None/feat: (10, 4) float32 on rank 0, rank 2, (12, 4) float32 on rank 1" in text
        )
        assert "node/paper/age: (10,) float32 on rank 0, rank 1, nothing on rank 2" in text


def test_a_dtype_is_part_of_what_ranks_agree_on():
    outcomes = in_threads([{FEAT: torch.zeros(2, 1)}, {FEAT: torch.zeros(2, 1).half()}], (0, 1))

    for outcome in outcomes:
        assert "(2, 1) float32 on rank 0, (2, 1) float16 on rank 1" in str(outcome)


def test_a_first_rank_without_tables_is_named_to_all():
    outcomes = in_threads([{FEAT: torch.zeros(1)}, None, None], (0, 0, 1))

    for outcome in outcomes:
        assert isinstance(outcome, ConfigError)
        assert "rank 2 gave no tables, but is the first rank of its machine" in str(outcome)
        assert "(rank 0, rank 2)" in str(outcome)


def test_a_rank_that_could_not_read_its_tables_says_so_to_the_others():
    broken = ConfigError("feature node/None/feat has its own read()")

    outcomes = in_threads([{FEAT: torch.zeros(1)}, broken], (0, 0))

    assert isinstance(outcomes[0], PeerError)
    assert "rank 1 could not describe the tables to share: feature node/None/feat has" in str(
        outcomes[0]
    )
    assert outcomes[1] is broken


def sharing_facts(rank, folder):
    """What ranks of one machine see of each other's tables; raises where it is wrong."""
    world = World.join(timeout=100)
    tables = tables_of_all_kinds()
    fds = open_descriptors()
    files = {
        FeatureKey("node", None, "read"): open_npy(f"{folder}/c.npy")[5:],
        FeatureKey("node", None, "fortran"): torch.from_numpy(
            np.load(f"{folder}/f.npy", mmap_mode="r+")
        ),
    }

    shared = share_tensors({**tables, **files} if rank == 0 else None, world)
    for key, table in tables.items():
        assert torch.equal(bits(shared[key].tensor), bits(table)), key
        assert shared[key].tensor.dtype == table.dtype
    for key, table in files.items():
        part = shared[key].tensor
        assert shared[key].segment is None
        assert torch.equal(part, table)
        assert part.stride() == table.stride()
        assert file_of(part) == file_of(table)

    world.exchange("compare", None)

    # One copy: what one rank writes the other reads.
    target = shared[FeatureKey("node", "torch.float32", "(10, 2, 3)")].tensor
    if rank == 1:
        target.fill_(4)
    world.exchange("write", None)
    assert target.eq(4).all()
    world.exchange("read", None)

    # The first rank lets go; the other's tensors live on.
    kept = target[2:] if rank == 1 else None
    del shared, target, files, part, table
    gc.collect()
    world.exchange("let go", None)
    assert kept is None or kept.eq(4).all()
    del kept
    assert open_descriptors() <= fds

    return refusal_facts(rank, world)


def refusal_facts(rank, world):
    """What goes wrong on one rank reaches the other at once, and the world still works after."""
    start = time.monotonic()
    huge = {FEAT: torch.zeros(1).expand(1 << 45)}  # what no machine has
    with pytest.raises(CapacityError if rank == 0 else PeerError) as caught:
        share_tensors(huge if rank == 0 else None, world)
    assert "bytes is not to be had" in str(caught.value)
    if rank == 1:
        assert str(caught.value).startswith("rank 0 could not make room for shared tables: ")
        assert caught.value.peer == "rank 0"
    with pytest.raises(ConfigError, match=r"\(3,\) float32 on rank 0, \(4,\) float32 on rank 1"):
        share_tensors({FEAT: torch.zeros(3 + rank)}, world)
    with pytest.raises(ConfigError, match="rank 0 gave no tables"):
        share_tensors(None, world)
    again = share_tensors({FEAT: torch.ones(5)} if rank == 0 else None, world)
    assert again[FEAT].tensor.sum() == 5
    return time.monotonic() - start


@pytest.mark.multirank
def test_two_ranks_share(tmp_path):
    np.save(tmp_path / "c.npy", np.arange(300, dtype=np.int32).reshape(60, 5))
    np.save(tmp_path / "f.npy", np.asfortranarray(np.random.default_rng(3).normal(size=(64, 3))))

    seconds = run_ranks(sharing_facts, 2, str(tmp_path))

    assert max(seconds) < 10
