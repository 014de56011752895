"""A rank may exit while another is still at work, whatever kind of tables they have: case 22."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import featsync
from featsync.transports import TRANSPORTS
from support.epochs import epoch, split_batches
from support.graphs import assert_as_stock, planned_loader, ring_store
from support.parts import partitioned
from support.processes import wait_until

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]


def join_group(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )


def read_on(rank, folder, loader):
    """Rank 0 to its end; rank 1 slowly, and not before rank 0 has left."""
    for minibatch in loader:
        assert_as_stock(minibatch, ring_store(), ["x"], ["w"])
        if rank == 1:
            assert wait_until((folder / "left").exists, 30)
            time.sleep(0.2)


def leave_shared_tables(rank, folder):
    """Rank 1 needs nobody."""
    join_group(rank, folder)
    shared = featsync.share(ring_store() if rank == 0 else None)
    for store, worker in ((ring_store(), "thread"), (shared, "thread"), (shared, "process")):
        loader = planned_loader(split_batches(16), store, ["x"], ["w"], worker=worker, lookahead=4)
        assert len(epoch(loader, ring_store())) == 4
    read_on(rank, folder, planned_loader(split_batches(16), shared, ["x"], ["w"], lookahead=4))
    if rank == 0:
        (folder / "left").touch()


def leave_partitioned_tables(rank, folder, transport):
    """Rank 1 still needs the rows of rank 0, which lingers, its group destroyed."""
    join_group(rank, folder)
    store = partitioned(ring_store(), "owners")
    settings = {"lookahead": 4, "transport": transport}
    read_on(rank, folder, planned_loader(split_batches(16), store, ["x"], ["w"], **settings))
    if rank == 0:
        dist.destroy_process_group()
        (folder / "left").touch()


def test_a_rank_may_exit_while_another_is_still_at_work(tmp_path):
    """Case 22: under mp.spawn both exit with 0, which it checks."""
    torch.multiprocessing.spawn(leave_shared_tables, (tmp_path,), nprocs=2)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_serves_its_rows_until_the_others_are_done(tmp_path, transport):
    """Case 22: both exit with 0, which spawn checks."""
    torch.multiprocessing.spawn(leave_partitioned_tables, (tmp_path, transport), nprocs=2)
