"""The mover process moves rows as torch does, says what it cannot do, and ends when it should."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featsync import mover
from featsync.device import CpuDevice
from featsync.errors import ConfigError, FeatureError, PeerError, PeerTimeoutError, PlanError
from featsync.mapped import open_npy
from featsync.move import Call, Gather
from featsync.plan import FeatureKey
from featsync.pool import Pool
from featsync.sharing import share_tensors
from featsync.table import ForeignTable, TensorTable
from featsync.workers.process import ProcessWorker
from featsync.world import World

KEY = FeatureKey("node", None, "feat")
WHAT = str(KEY)
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
    torch.complex128,
]


@pytest.fixture(scope="module")
def worker():
    worker = ProcessWorker(CpuDevice(), 30.0)
    yield worker
    worker.close()


def shared(worker, tensor):
    """Copy a tensor into a block of the worker."""
    if tensor.numel() == 0:
        return tensor
    block = worker.allocate(tensor.numel() * tensor.element_size())
    return torch.from_numpy(block).view(tensor.dtype).view(tensor.shape).copy_(tensor)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


def random_bits(seed, shape, dtype):
    item = torch.empty(0, dtype=dtype).element_size()
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, item), dtype=np.uint8)
    raw = raw & 1 if dtype == torch.bool else raw
    return (
        torch.from_numpy(raw).view(dtype).view(shape)
        if raw.size
        else torch.empty(shape, dtype=dtype)
    )


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def open_descriptors():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


# Values ------------------------------------------------------------------------------------------


VIEWS = {
    "whole": lambda base: base,
    "every other column": lambda base: base[:, ::2],
    "some columns": lambda base: base[:, 1:],
    "every other row": lambda base: base[1::2],
    "transposed": lambda base: base.transpose(0, 1),
    "one row, expanded": lambda base: base[:1].expand_as(base),
    "one column, expanded": lambda base: base[:, :1].expand_as(base),
}


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_gather_equals_torch(worker, data):
    seed = data.draw(st.integers(0, 2**32 - 1))
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.sampled_from([(40, 6), (7, 300), (50, 2, 3), (3, 1), (30, 5, 1)]))
    source = VIEWS[data.draw(st.sampled_from(sorted(VIEWS)))](
        shared(worker, random_bits(seed, shape, dtype))
    )
    num_rows = data.draw(st.integers(0, 200))
    index_dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, max(1, len(source)), (num_rows,), generator=generator).to(index_dtype)
    rows = rows if len(source) else rows[:0]
    spare = data.draw(st.integers(0, 20))
    target = shared(worker, torch.zeros(len(rows) + spare, *source.shape[1:], dtype=dtype))
    positions = None
    if data.draw(st.booleans()):
        positions = torch.randperm(len(target), generator=generator)[: len(rows)]
    else:
        target = target[: len(rows)]
    expected = target.clone()
    expected[slice(None) if positions is None else positions] = source[rows.long()]

    worker.submit([Gather(WHAT, source, rows, target, positions)]).wait()

    assert torch.equal(bits(target), bits(expected))


def test_large_rows_and_many_chunks_equal_torch(worker):
    source = shared(worker, torch.randn(300, 5000))
    rows = torch.randint(0, 300, (1000,))
    ordered, scattered, strided = (
        shared(worker, torch.zeros(1000, 5000 if i < 2 else 2500)) for i in range(3)
    )
    positions = torch.randperm(1000)

    ticket = worker.submit(
        [
            Gather(WHAT, source, rows, ordered),
            Gather(WHAT, source, rows, scattered, positions),
            Gather(WHAT, source[:, ::2], rows, strided),
        ]
    )
    ticket.wait()

    assert torch.equal(ordered, source[rows])
    assert torch.equal(scattered[positions], source[rows])
    assert torch.equal(strided, source[rows][:, ::2])
    assert 0 < ticket.seconds < 10


@pytest.mark.parametrize("shape", [(10, 0), (0, 4), (10, 2, 0)])
def test_tables_without_bytes_are_served(worker, shape):
    source = torch.empty(shape)
    rows = torch.arange(min(3, shape[0]))

    worker.submit([Gather(WHAT, source, rows, torch.empty(len(rows), *shape[1:]))]).wait()

    target = shared(worker, torch.empty(1, *shape[1:]))
    with pytest.raises(FeatureError, match=f"id 10 is outside its table of {shape[0]} rows"):
        worker.submit([Gather(WHAT, source, torch.tensor([10]), target)]).wait()


def test_lists_are_carried_out_in_the_order_of_submission(worker):
    source = shared(worker, torch.arange(500).view(500, 1))
    first, second = (shared(worker, torch.zeros(1, 1, dtype=torch.long)) for _ in range(2))

    tickets = []
    for value in range(500):  # each reads what the one before it wrote
        tickets.append(worker.submit([Gather(WHAT, source, torch.tensor([value]), first)]))
        tickets.append(worker.submit([Gather(WHAT, first, torch.tensor([0]), second)]))
    tickets[-1].wait()

    assert second.item() == 499
    for ticket in tickets:
        ticket.wait()


def test_a_list_may_be_longer_than_a_message_and_may_be_empty(worker):
    source = shared(worker, torch.arange(300).view(300, 1))
    targets = shared(worker, torch.zeros(300, 1, dtype=torch.long))

    worker.submit([]).wait()
    worker.submit(
        [Gather(WHAT, source, torch.tensor([i]), targets[i : i + 1]) for i in range(300)]
    ).wait()

    assert torch.equal(targets, source)


def test_mapped_files_and_shared_tables_are_read_where_they_lie(worker, tmp_path):
    values = np.random.default_rng(5).normal(size=(200, 7))
    np.save(tmp_path / "c.npy", values)
    np.save(tmp_path / "f.npy", np.asfortranarray(values))
    (tmp_path / "c.npy").chmod(0o444)
    sources = [
        open_npy(tmp_path / "c.npy"),
        open_npy(tmp_path / "f.npy"),
        torch.from_numpy(np.load(tmp_path / "c.npy", mmap_mode="r+"))[20:, 2:],
        share_tensors({KEY: torch.tensor(values)}, World.join())[
            KEY
        ].tensor,  # nobody told the worker
    ]
    rows = torch.randint(0, 180, (500,))

    for source in sources:
        target = shared(worker, torch.zeros(500, source.shape[1], dtype=torch.float64))
        worker.submit([Gather(WHAT, source, rows, target)]).wait()
        assert torch.equal(target, source[rows])


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [-1, 20, 2**31 - 1, -(2**31)])
def test_an_id_outside_the_table_is_named_and_later_lists_still_work(worker, bad, index_dtype):
    source = shared(worker, torch.randn(20, 3))
    target = shared(worker, torch.zeros(4, 3))
    rows = torch.tensor([1, 2, bad, 3], dtype=index_dtype)

    failing = worker.submit([Gather(WHAT, source, rows, target)])
    good = worker.submit([Gather(WHAT, source, rows.clamp(0, 19), target)])
    good.wait()

    assert torch.equal(target, source[rows.long().clamp(0, 19)])
    for _ in range(2):
        with pytest.raises(FeatureError) as caught:
            failing.wait()
        assert str(caught.value) == (
            f"feature node/None/feat: id {bad} is outside its table of 20 rows (allowed 0 to 19): "
            "table and graph do not match"
        )


def test_a_position_outside_the_target_is_a_fault_of_the_plan(worker):
    source = shared(worker, torch.randn(5, 3))
    target = shared(worker, torch.zeros(4, 3))

    ticket = worker.submit(
        [Gather(WHAT, source, torch.tensor([0, 1]), target, torch.tensor([0, 4]))]
    )

    with pytest.raises(PlanError, match="position 4 is outside the 4 rows to fill"):
        ticket.wait()


def test_private_memory_and_foreign_reads_are_refused_by_name(worker):
    source, target = shared(worker, torch.randn(5, 3)), shared(worker, torch.zeros(2, 3))
    rows = torch.tensor([0, 1])
    remedy = r'featsync\.share\(store\).*worker="thread"'

    with pytest.raises(ConfigError, match=f"feature {WHAT}: .* its table lies .*{remedy}"):
        worker.submit([Gather(WHAT, source.clone(), rows, target)])
    with pytest.raises(
        ConfigError, match=f"feature {WHAT}: .*to be delivered in memory .*{remedy}"
    ):
        worker.submit([Gather(WHAT, source, rows, torch.zeros(2, 3))])
    with pytest.raises(ConfigError, match=f'feature {WHAT}: .*own read.*Use worker="thread"'):
        worker.submit([Call(WHAT, lambda: None)])
    with pytest.raises(ConfigError, match=r"holds torch.float32, to be delivered as torch.float64"):
        worker.submit([Gather(WHAT, source, rows, target.double())])
    conjugated = Gather(WHAT, torch.zeros(5, 3).cfloat().conj(), rows, torch.zeros(2, 3).cfloat())
    with pytest.raises(ConfigError, match=r"conjugated or negated lazily"):
        worker.submit([conjugated])

    worker.submit([Gather(WHAT, source, rows, target)]).wait()
    assert torch.equal(target, source[:2])


def test_tables_are_admitted_or_refused_before_the_first_minibatch(worker):
    part = share_tensors({KEY: torch.randn(5, 3)}, World.join())[KEY]

    worker.admit(TensorTable(KEY, lambda: part.tensor, part.segment))
    worker.admit(TensorTable(KEY, lambda: torch.empty(0, 3)))
    with pytest.raises(ConfigError, match=f"feature {WHAT}: .* its table lies in memory of this"):
        worker.admit(TensorTable(KEY, lambda: torch.randn(5, 3)))
    with pytest.raises(ConfigError, match=f"feature {WHAT}: .*own read"):
        worker.admit(ForeignTable(KEY, lambda ids: ids))


def test_rows_are_delivered_on_the_cpu_only():
    device = SimpleNamespace(torch_device=torch.device("cuda:0"))

    with pytest.raises(ConfigError, match="delivers on the CPU, not on cuda:0"):
        ProcessWorker(device, 1.0)


# The process -------------------------------------------------------------------------------------


def test_the_mover_is_small_and_knows_no_torch(worker):
    worker.submit([]).wait()

    libraries = Path(f"/proc/{worker.pid}/maps").read_text()
    status = Path(f"/proc/{worker.pid}/status").read_text().split()

    assert "numpy" in libraries
    assert "libtorch" not in libraries
    assert int(status[status.index("RssAnon:") + 1]) < 40_000  # KiB
    assert int(status[status.index("Threads:") + 1]) == 1


def test_an_interrupt_is_the_trainers_business(worker):
    os.kill(worker.pid, signal.SIGINT)

    worker.submit([]).wait()

    assert is_running(worker.pid)


def test_a_thousand_batches_of_fresh_blocks_do_not_grow():
    worker = ProcessWorker(CpuDevice(), 30.0)
    source = shared(worker, torch.randn(100, 16))
    pool = Pool(allocate=worker.allocate)

    def state():
        fds = open_descriptors(), len(list(Path(f"/proc/{worker.pid}/fd").iterdir()))
        return *fds, len(Path(f"/proc/{worker.pid}/maps").read_text().splitlines())

    for step in range(1100):
        num_rows = 10 + step % 7
        rows = torch.arange(num_rows)
        pooled = pool.take((num_rows, 16), torch.float32)
        fresh = shared(worker, torch.zeros(num_rows, 16))
        worker.submit([Gather(WHAT, source, rows, t) for t in (pooled, fresh)]).wait()
        assert torch.equal(pooled, source[:num_rows])
        assert torch.equal(fresh, pooled)
        del pooled, fresh
        if step == 100:
            before = state()

    worker.submit([]).wait()
    assert all(now <= then + 3 for now, then in zip(state(), before, strict=True))
    worker.close()


def test_a_killed_mover_is_named_within_a_second():
    worker = ProcessWorker(CpuDevice(), 30.0)
    source, target = shared(worker, torch.randn(50, 8)), shared(worker, torch.zeros(9, 8))
    move = Gather(WHAT, source, torch.arange(9), target)
    worker.submit([move]).wait()
    os.kill(worker.pid, signal.SIGSTOP)
    pending = worker.submit([move])
    start = time.monotonic()
    os.kill(worker.pid, signal.SIGKILL)

    for ticket in (pending, worker.submit([move]), pending):
        with pytest.raises(PeerError, match="exit code -9, killed by SIGKILL") as caught:
            ticket.wait()
        assert caught.value.peer == f"mover process {worker.pid}"

    assert time.monotonic() - start < 1
    worker.close()


def test_a_mover_that_gives_no_sign_is_named_in_time():
    worker = ProcessWorker(CpuDevice(), 0.7)
    worker.submit([]).wait()
    os.kill(worker.pid, signal.SIGSTOP)
    start = time.monotonic()

    with pytest.raises(PeerTimeoutError, match=r"no sign of life for 0\.7 s"):
        worker.submit([]).wait()

    assert 0.6 < time.monotonic() - start < 3
    pid = worker.pid
    worker.close()  # also ends a stopped process
    assert not is_running(pid)


def test_closing_leaves_no_process_and_no_descriptor():
    before = open_descriptors()
    worker = ProcessWorker(CpuDevice(), 30.0)
    source, target = shared(worker, torch.randn(50, 8)), shared(worker, torch.zeros(9, 8))
    pending = worker.submit([Gather(WHAT, source, torch.arange(9), target)])
    pid = worker.pid

    worker.close()
    worker.close()

    assert not Path(f"/proc/{pid}").exists()  # not even a zombie
    for ticket in (pending, worker.submit([])):
        with pytest.raises(PeerError, match="was closed"):
            ticket.wait()
    del worker, source, target, pending, ticket
    assert open_descriptors() == before


def test_a_dropped_worker_ends_its_process():
    before = open_descriptors()
    worker = ProcessWorker(CpuDevice(), 30.0)
    worker.submit([]).wait()
    pid = worker.pid

    del worker
    gc.collect()

    assert not Path(f"/proc/{pid}").exists()
    assert open_descriptors() == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_end_its_parents_mover():
    worker = ProcessWorker(CpuDevice(), 30.0)
    pid = worker.pid
    child = os.fork()
    if child == 0:  # what a loader worker does with what it inherits
        worker.close()
        os._exit(0)
    os.waitpid(child, 0)

    worker.submit([]).wait()

    # The other way round: while the child lives, closing still ends the process.
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    worker.close()
    assert not is_running(pid)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.parametrize(
    "ending", ["pass", "sys.exit(3)", "raise KeyError", "os.kill(os.getpid(), 9)"]
)
def test_the_mover_ends_with_the_interpreter_however_that_ends(ending):
    code = f"""
        import os, sys, time
        from featsync.device import CpuDevice
        from featsync.workers.process import ProcessWorker
        worker = ProcessWorker(CpuDevice(), 30.0)
        worker.submit([]).wait()
        if os.fork() == 0:  # as a loader worker that holds on to what it inherited
            os.close(1)
            time.sleep(4)
            os._exit(0)
        print(worker.pid, flush=True)
        {ending}
    """

    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=60,
    )

    assert result.returncode == {"p": 0, "s": 3, "r": 1, "o": -9}[ending[0]]
    assert wait_until(lambda: not is_running(int(result.stdout)), 3.0)


# The copying itself, in this process --------------------------------------------------------------


def test_signs_are_given_between_chunks(monkeypatch):
    monkeypatch.setattr(mover, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(mover, "_SCRATCH_BYTES", 32)
    source = np.arange(40.0).view("V8")
    rows = np.arange(40)[::-1].copy()
    signs = []
    ordered, scattered = np.zeros(40).view("V8"), np.zeros(40).view("V8")

    mover.gather(source, rows, ordered, None, lambda: signs.append(1))
    mover.gather(source, rows, scattered, rows, lambda: signs.append(2))

    assert signs == [1] * 5 + [2] * 10
    assert np.array_equal(ordered.view(float), np.arange(40.0)[::-1])
    assert np.array_equal(scattered.view(float), np.arange(40.0))


@pytest.mark.parametrize("item", ["i4", "i8"])
def test_outside_is_below_zero_or_past_the_end(item):
    mover.check_inside("rows", np.array([0, 4], item), 5)
    mover.check_inside("rows", np.array([], item), 0)
    for bad in (-1, 5):
        with pytest.raises(mover.OutsideError) as caught:
            mover.check_inside("rows", np.array([0, bad], item), 5)
        assert (caught.value.kind, caught.value.row, caught.value.size) == ("rows", bad, 5)
