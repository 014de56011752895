"""What partitioned tables exchange, and which version of it: cases 19 and 20, by each transport.

Each function before the tests is a fact, see `support.facts`.
"""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist

import featsync
from featsync.device import CpuDevice
from featsync.partitioned_table import PartitionedTable
from featsync.plan import FeatureKey, Fetch, Want
from featsync.remote_rows import Delivery, RemoteRows
from featsync.routes import route_of
from support.facts import Launch, name_of
from support.graphs import HandMade, assert_as_stock, assert_same, planned_loader, store_of
from support.parts import (
    NOTHING,
    PARTITIONS,
    WAYS,
    part_of,
    partition_of,
)

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]

X, Y = ("node", None, "x"), ("node", None, "y")
LIMIT_S = 30.0


def messages_of_all_sizes_between_changing_ranks_are_not_mixed_up(rank):
    """Case 19: 0, 1 and 17 rows; ranks that need nothing; features named in another order.

    Rank 2 wants nothing of the first minibatch; later only ranks 0 and 2 want rows, of each other.
    """
    tables = {X: torch.arange(60.0).reshape(60, 1), Y: torch.arange(300).reshape(60, 5)}
    stock, ids = store_of(tables), torch.arange(60)
    names = [["x", "y"], ["y", "x"], ["x", "y"]][rank]
    for partition in ([0, 20, 40, 60], ids % 3):
        store = store_of(
            {
                key: featsync.PartitionedFeature(part_of(table, partition, rank, 3), partition)
                for key, table in tables.items()
            }
        )
        zero, one, two = (part_of(ids, partition, owner, 3) for owner in range(3))
        wanted = [
            [one[:1], two[:17], NOTHING],
            [two[:17], NOTHING, zero[:1]],
            [two[-1:], NOTHING, zero[:17]],
            [NOTHING, NOTHING, zero[-17:]],
            [two.flip(0), NOTHING, NOTHING],
            [two[:1], NOTHING, zero[:1]],
        ]
        batches = HandMade([of_rank[rank] for of_rank in wanted])
        for transport, lookahead in itertools.product(WAYS, (1, 4)):
            loader = planned_loader(batches, store, names, transport=transport, lookahead=lookahead)
            for _ in range(2):
                minibatches = list(loader)
                assert len(minibatches) == len(wanted)
                for minibatch in minibatches:
                    assert_as_stock(minibatch, stock, names)


def rows_are_those_of_the_moment_when_they_were_sent(rank):
    """Case 20: the owner overwrites its part as soon as it has sent them; rows of 1 MB."""
    bounds, width, key = [0, 10, 20], 250_000, FeatureKey(*X)
    column = torch.arange(20.0).reshape(20, 1)
    feature = featsync.PartitionedFeature(
        part_of(column, bounds, rank, 2).expand(-1, width), bounds
    )
    table = PartitionedTable(key, feature.featsync_parts)
    before = feature.traffic
    dist.barrier()
    if rank == 0:
        deadline = time.monotonic() + LIMIT_S
        while _rows_sent(feature, before) < 10 * width * 4:
            assert time.monotonic() < deadline
        table.parts.readable[0].fill_(-1)
    else:
        rows = RemoteRows({key: table}, {key: route_of(table, "p2p")})
        target = torch.zeros(10, width)
        rows.announce(0, {key: Want((torch.arange(10),))})
        order, take = rows.fetch(0, {key: Delivery(Fetch(10), target)})
        CpuDevice().execute(order)
        time.sleep(0.5)
        CpuDevice().execute(take)
        rows.close()
        assert torch.equal(target, column[:10].expand(-1, width))
    dist.barrier()
    assert feature.read(torch.tensor([3]))[0, 0] == -1  # it is that part which was overwritten


def _rows_sent(feature, before):
    sent = (feature.traffic - before).sent
    return sent["rows"].num_bytes if "rows" in sent else 0


def what_owner_and_reader_do_with_their_tensors_changes_no_row(rank):
    """Case 20: the part that was given, and rows that were delivered, are overwritten."""
    x = torch.arange(60.0).reshape(20, 3)
    stock, world = store_of({X: x}), dist.get_world_size()
    ids = [torch.randperm(20, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    for how, transport in itertools.product(PARTITIONS, WAYS):
        partition = partition_of(how, 20, world)
        mine = part_of(x, partition, rank, world).clone()
        store = store_of({X: featsync.PartitionedFeature(mine, partition)})
        mine.fill_(-1)
        held = []
        for minibatch in planned_loader(HandMade(ids), store, ["x"], transport=transport):
            assert_as_stock(minibatch, stock, ["x"])
            rows = minibatch.node_features["x"]
            if len(held) < 3:
                held.append((rows, x[minibatch.input_nodes]))
            else:
                rows.fill_(-2)
        for rows, wanted in held:
            assert_same(rows, wanted)


LAUNCHES = [
    Launch(
        2,
        [
            rows_are_those_of_the_moment_when_they_were_sent,
            what_owner_and_reader_do_with_their_tensors_changes_no_row,
        ],
    ),
    Launch(
        3,
        [
            messages_of_all_sizes_between_changing_ranks_are_not_mixed_up,
            what_owner_and_reader_do_with_their_tensors_changes_no_row,
        ],
    ),
]


@pytest.mark.parametrize(
    ("launch", "fact"),
    [(launch, fact) for launch in LAUNCHES for fact in launch.facts],
    ids=name_of,
)
def test_partitioned_tables(launch, fact):
    launch.check(fact)
