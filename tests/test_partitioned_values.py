"""Rows of partitioned tables arrive as from stock, whatever they are: cases 12, 14 and 15.

Each function before the test is a fact, see `support.facts`.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import featsync
from support.epochs import epoch
from support.facts import Launch, name_of
from support.graphs import (
    HETERO_EDGES,
    HETERO_NODES,
    HandMade,
    assert_as_stock,
    assert_same,
    hetero3,
    hetero_store,
    planned_loader,
    ring_batches,
    ring_store,
    seed_batches,
    store_of,
)
from support.parts import (
    NOTHING,
    PARTITIONS,
    WAYS,
    part_of,
    partition_of,
    partitioned,
    settings_of_ways,
)
from support.tensors import DTYPES, awkward_rows

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]


def rows_are_as_in_stock_on_a_homogeneous_graph(rank):
    for how, settings in settings_of_ways():
        store = partitioned(ring_store(), how)
        loader = planned_loader(ring_batches(10), store, ["x"], ["w"], **settings)
        for _ in range(2):
            assert epoch(loader, ring_store())


def rows_are_as_in_stock_on_a_heterogeneous_graph(rank):
    for how, settings in settings_of_ways():
        store = partitioned(hetero_store(), how)
        source = seed_batches({"item": torch.arange(6), "user": torch.arange(4)})
        source = source.sample_neighbor(hetero3(), [2, 2])
        loader = planned_loader(source, store, HETERO_NODES, HETERO_EDGES, **settings)
        for _ in range(2):
            for minibatch in loader:
                assert_as_stock(minibatch, hetero_store(), HETERO_NODES, HETERO_EDGES)


def every_dtype_arrives_bit_for_bit(rank):
    """Case 12: NaN payloads and -0.0 included; rows of no elements and of several axes."""
    tables = {str(dtype): awkward_rows(dtype) for dtype in DTYPES}
    tables |= {"empty": torch.empty(20, 0), "deep": torch.arange(120.0).reshape(20, 2, 3)}
    stock = store_of({("node", None, name): table for name, table in tables.items()})
    for how, transport in itertools.product(PARTITIONS, WAYS):
        store = partitioned(stock, how)
        for dtype in (torch.int32, torch.int64):
            ids = torch.randperm(20, generator=torch.Generator().manual_seed(rank)).to(dtype)
            batches = HandMade([ids, ids[:9], ids[5:], ids.flip(0)])
            for cache in (0, 8):
                loader = planned_loader(
                    batches, store, list(tables), transport=transport, device_cache=cache
                )
                for minibatch in loader:
                    assert_as_stock(minibatch, stock, list(tables))


def parts_may_have_strides_of_their_own(rank):
    """Case 14: a rank brings a slice, a transposed or an expanded tensor."""
    base, column = torch.arange(160.0).reshape(20, 8), torch.arange(20.0).reshape(20, 1)
    layouts = {
        "slice": (base, lambda part: torch.stack([part, -part], 2)[:, :, 0]),
        "transposed": (base, lambda part: part.t().contiguous().t()),
        "expanded": (column.expand(20, 4), lambda part: part[:, :1].expand(-1, 4)),
    }
    world = dist.get_world_size()
    stock = store_of({("node", None, name): whole for name, (whole, _) in layouts.items()})
    ids = torch.randperm(20, generator=torch.Generator().manual_seed(rank))
    for how, transport in itertools.product(PARTITIONS, WAYS):
        partition = partition_of(how, 20, world)
        parts = {
            name: lay_out(part_of(whole, partition, rank, world))
            for name, (whole, lay_out) in layouts.items()
        }
        assert not any(part.is_contiguous() for part in parts.values() if len(part) > 1)
        features = {
            ("node", None, name): featsync.PartitionedFeature(part, partition)
            for name, part in parts.items()
        }
        loader = planned_loader(
            HandMade([ids, ids[:9], ids.flip(0)]), store_of(features), list(layouts),
            transport=transport,
        )  # fmt: skip
        for minibatch in loader:
            assert_as_stock(minibatch, stock, list(layouts))


def zero_rows_on_one_rank_are_delivered_as_such(rank):
    """Case 15: (0, d), right dtype and device; and nobody waits."""
    some = torch.tensor([3, 9])
    wanted = [some, some, NOTHING] if rank == 0 else [NOTHING, some, NOTHING]
    stock = ring_store(torch.ones(20, 3, dtype=torch.float16))
    for how, transport in itertools.product(PARTITIONS, WAYS):
        loader = planned_loader(
            HandMade(wanted), partitioned(stock, how), ["x"], transport=transport
        )
        for minibatch in loader:
            assert_as_stock(minibatch, stock, ["x"])


def parts_in_files_stay_there(rank):
    """Each rank maps its own part only; those of ranks on the same machine are mapped as well."""
    x = torch.arange(60.0).reshape(20, 3)
    world = dist.get_world_size()
    for how, transport in itertools.product(PARTITIONS, WAYS):
        partition = partition_of(how, 20, world)
        part = part_of(x, partition, rank, world)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "part"
            path.write_bytes(part.numpy().tobytes())
            mapped = torch.from_file(
                str(path), shared=True, size=part.numel(), dtype=part.dtype
            ) if part.numel() else part  # fmt: skip
            feature = featsync.PartitionedFeature(mapped.reshape(part.shape), partition)
            store = store_of({("node", None, "x"): feature})
            loader = planned_loader(
                HandMade([torch.randperm(20) for _ in range(4)]), store, ["x"], transport=transport
            )
            for minibatch in loader:
                assert_as_stock(minibatch, ring_store(x), ["x"])
            dist.barrier()


def parts_without_rows_and_conjugated_ones_are_no_files(rank):
    """What lies in no file as it is has to be handed over in some other way, or not at all."""
    world = dist.get_world_size()
    for _ in range(20):  # whoever is late must not find them gone
        feature = featsync.PartitionedFeature(torch.empty(0, 3), [0] * (world + 1))
        assert_same(feature.read(), torch.empty(0, 3))
    x = torch.randn(20, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    even = [20 * i // world for i in range(world + 1)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part"
        path.write_bytes(part_of(x, even, rank, world).numpy().tobytes())
        num_rows = even[rank + 1] - even[rank]
        mapped = torch.from_file(str(path), shared=True, size=3 * num_rows, dtype=x.dtype)
        feature = featsync.PartitionedFeature(mapped.view(num_rows, 3).conj(), even)
        assert_same(feature.read(), x.conj().resolve_conj())
        dist.barrier()


LAUNCH = Launch(
    2,
    [
        rows_are_as_in_stock_on_a_homogeneous_graph,
        rows_are_as_in_stock_on_a_heterogeneous_graph,
        every_dtype_arrives_bit_for_bit,
        parts_may_have_strides_of_their_own,
        zero_rows_on_one_rank_are_delivered_as_such,
        parts_in_files_stay_there,
        parts_without_rows_and_conjugated_ones_are_no_files,
    ],
)


@pytest.mark.parametrize("fact", LAUNCH.facts, ids=name_of)
def test_partitioned_tables(fact):
    LAUNCH.check(fact)
