"""Worker `process` moves rows as torch does, and says what it cannot do."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from featsync.device import CpuDevice
from featsync.errors import ConfigError, FeatureError, PlanError
from featsync.mapped import open_npy
from featsync.move import Call, Gather
from featsync.plan import FeatureKey
from featsync.sharing import share_tensors
from featsync.table import ForeignTable, TensorTable
from featsync.workers.process import ProcessWorker
from featsync.world import World
from support.tensors import DTYPES, bits, random_bits

KEY = FeatureKey("node", None, "feat")
WHAT = str(KEY)


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
        shared(worker, random_bits(dtype, shape, seed))
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
