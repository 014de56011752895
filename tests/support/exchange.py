"""Tables that are split over ranks, and who reads them, without any host."""

from __future__ import annotations

import numpy as np
import torch

from featsync.device import CpuDevice
from featsync.exchange.engines import engine_of
from featsync.partition import as_partition
from featsync.partitioned_table import PartitionedTable
from featsync.parts import bring_together
from featsync.plan import FeatureKey, Fetch, Want
from featsync.remote_rows import Delivery, RemoteRows
from featsync.routes import route_of

NUM_ROWS = 500
KEYS = [FeatureKey("node", None, name) for name in ("wide", "narrow")]


def whole_tables():
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(NUM_ROWS, 40, generator=generator)
    return {KEYS[0]: wide, KEYS[1]: torch.arange(NUM_ROWS, dtype=torch.int16)}


def tables_of(rank, num_ranks, how, timeout=20.0):
    engine = engine_of(None, timeout)
    tables = {}
    for key, whole in whole_tables().items():
        owners = np.random.default_rng(len(key.name)).integers(0, num_ranks, NUM_ROWS)
        partition = torch.from_numpy(np.sort(owners) if how == "runs" else owners)
        own = torch.from_numpy(as_partition(partition, num_ranks).rows_of(rank))
        tables[key] = PartitionedTable(key, bring_together(whole[own], partition, engine, timeout))
    return engine, tables


def gather(finder, *args):
    """Have rows found, and read; say how they are arranged."""
    masks, reads = finder.find(*args)
    for read in reads:
        read.carry_out()
    return masks


class Reader:
    """Announces and fetches minibatches of random ids, and compares."""

    def __init__(self, tables, transport):
        routes = {key: route_of(table, transport) for key, table in tables.items()}
        self.rows = RemoteRows(tables, routes)
        self.wanted = {}

    def announce(self, batch, seed, num_rows=300):
        generator = torch.Generator().manual_seed(seed)
        ids = {key: torch.randint(0, NUM_ROWS, (num_rows,), generator=generator) for key in KEYS}
        self.wanted[batch] = ids
        self.rows.announce(batch, {key: Want((i,)) for key, i in ids.items()})

    def fetch(self, batch, every=1):
        """Take the rows of ids that ``every`` divides; the others are as if cached.

        Returns:
            Rows that other ranks sent.
        """
        ids = self.wanted.pop(batch)
        deliveries = {}
        for key, whole in whole_tables().items():
            target = torch.zeros((len(ids[key]), *whole.shape[1:]), dtype=whole.dtype)
            positions = (ids[key] % every == 0).nonzero().view(-1)
            fetch = Fetch(len(ids[key])) if every == 1 else Fetch(len(ids[key]), positions)
            deliveries[key] = Delivery(fetch, target)
        num_of_others = self.rows.num_of_others(batch, deliveries)
        fetches = self.rows.fetch(batch, deliveries)
        CpuDevice().execute([*fetches.first, *fetches.last])
        for key, whole in whole_tables().items():
            wanted = torch.zeros_like(deliveries[key].target)
            taken = ids[key] % every == 0
            wanted[taken] = whole[ids[key][taken]]
            assert torch.equal(deliveries[key].target, wanted)
        return sum(num_of_others.values())
