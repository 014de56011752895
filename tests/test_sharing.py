"""One copy of each table per machine; every rank hears of what is wrong; nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from featsync import sharing
from featsync.device import CpuDevice
from featsync.errors import CapacityError, ConfigError, PeerError
from featsync.mapped import file_of, open_npy
from featsync.move import Gather
from featsync.plan import FeatureKey
from featsync.sharing import share_tensors
from featsync.workers.process import ProcessWorker
from featsync.world import World
from support.ranks import run_ranks

FEAT = FeatureKey("node", None, "feat")
AGE = FeatureKey("node", "paper", "age")
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def random_bytes_tensor(dtype, shape, seed=0):
    """A tensor of random bits: NaN payloads and -0.0 included."""
    item = torch.empty(0, dtype=dtype).element_size()
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, item), dtype=np.uint8)
    bits = bits & 1 if dtype == torch.bool else bits
    return (
        torch.from_numpy(bits).view(dtype).view(shape)
        if bits.size
        else torch.empty(shape, dtype=dtype)
    )


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def tables_of_all_kinds():
    shapes = [(10, 1), (10, 0), (0, 4), (10, 2, 3), (10,)]
    tables = {
        FeatureKey("node", str(dtype), str(shape)): random_bytes_tensor(dtype, shape)
        for dtype in DTYPES
        for shape in shapes
    }
    base = random_bytes_tensor(torch.float32, (20, 8))
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
    world = World.join(timeout=30)
    tables = tables_of_all_kinds()
    fds = len(list(Path("/proc/self/fd").iterdir()))
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
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= fds

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


def shared_run(rank, num_steps):
    """A small run with shared tables and a mover process; prints whom to kill."""
    world = World.join(timeout=60)
    table = torch.arange(4000.0).view(1000, 4)
    shared = share_tensors({FEAT: table} if rank == 0 else None, world)[FEAT]
    worker = ProcessWorker(CpuDevice(), 30.0)
    rows = torch.arange(0, 1000, 3)
    out = torch.from_numpy(worker.allocate(len(rows) * 16)).view(torch.float32).view(-1, 4)
    for step in range(num_steps):
        out.zero_()
        worker.submit([Gather("x", shared.tensor, rows, out)]).wait()
        assert torch.equal(out, table[rows])
        if step == 0:
            sys.stdout.write(f"running {os.getpid()} {worker.pid}\n")
            sys.stdout.flush()
        time.sleep(0.001)
    worker.close()
    world.exchange("end", None)
    return "ended"


def start_run(num_steps):
    folder = Path(__file__).parent
    code = f"import test_sharing as t; print(t.run_ranks(t.shared_run, 2, {num_steps}))"
    paths = [str(folder), str(folder.parent)]
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.multirank
def test_killed_runs_leave_nothing_and_the_next_ones_work():
    before = set(Path("/dev/shm").iterdir())
    killed = start_run(num_steps=10**9)
    pids = [killed.pid]
    for _ in range(2):
        pids += map(int, killed.stdout.readline().split()[1:])
    killed.stdout.close()

    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    killed.wait()
    following = [start_run(num_steps=50) for _ in range(2)]  # at once, side by side
    outputs = [process.communicate(timeout=120)[0] for process in following]

    for process, output in zip(following, outputs, strict=True):
        assert process.returncode == 0
        assert output.splitlines()[-1] == "['ended', 'ended']"
        pids += [int(word) for line in output.splitlines()[:2] for word in line.split()[1:]]
    assert len(pids) == 13
    assert wait_until(lambda: not any(map(is_running, pids)))
    assert wait_until(lambda: set(Path("/dev/shm").iterdir()) <= before)


@pytest.mark.multirank
def test_a_mover_does_not_outlive_its_killed_trainer():
    run = start_run(num_steps=10**9)
    ranks = [tuple(map(int, run.stdout.readline().split()[1:])) for _ in range(2)]
    run.stdout.close()

    try:
        trainer, mover = ranks[0]
        os.kill(trainer, signal.SIGKILL)  # only the trainer: its mover has to notice

        assert wait_until(lambda: not is_running(mover), 5.0)
    finally:
        run.wait(30)
    assert wait_until(lambda: not any(is_running(pid) for pair in ranks for pid in pair))
