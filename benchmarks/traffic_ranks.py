"""One rank of `bench_traffic.py`: iterates in step with the others, and counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import dgl.graphbolt as gb
import torch
import torch.distributed as dist
from torch.utils.data import IterDataPipe

import featsync
from featsync.bench.check_rows import check_minibatch
from featsync.exchange.engines import engine_of
from featsync.exchange.traffic import Traffic
from featsync.loading import load_dataset
from featsync.pipeline import as_config
from featsync.plan import FeatureKey

KEY = FeatureKey("node", None, "feat")
_TIMEOUT = 60.0
_SETTLE_S = 0.2  # for what was sent to be counted where it came


@dataclass(frozen=True)
class Case:
    """What to count.

    Attributes:
        ids: ``random``: distinct ones; or ``sampled`` from a graph.
        ranks: How many.
        hosts: Machines that they are told they are on.
        transport: Of ``sync_feature``.
        cache: Rows that a rank caches.
        width: float32 numbers a row.
        rows: Of the table.
        batch: Random ids a minibatch, or seeds to sample from.
        steps: Minibatches.
    """

    ids: str
    ranks: int
    hosts: int = 1
    transport: str = "p2p"
    cache: int = 0
    width: int = 16
    rows: int = 200_000
    batch: int = 20_000
    steps: int = 12


@dataclass(frozen=True)
class Counted:
    """What one rank counted.

    Attributes:
        traffic: Of all steps.
        steps: How many.
        wanted: Rows.
        remote: Of them, those of ranks that are asked by messages.
        hits: Of those, out of the cache.
        wrong_rows: Of the last minibatch.
    """

    traffic: Traffic
    steps: int
    wanted: int
    remote: int
    hits: int
    wrong_rows: int


class RandomIds(IterDataPipe[Any]):
    """Minibatches of random distinct ids, and no graph."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__()
        self._case, self._seed = case, seed

    def __iter__(self) -> Iterator[Any]:
        """Yield them, the same each time."""
        generator = torch.Generator().manual_seed(self._seed)
        for _ in range(self._case.steps):
            ids = torch.randperm(self._case.rows, generator=generator)[: self._case.batch]
            yield gb.MiniBatch(input_nodes=ids)


def count(case: Case) -> Counted:
    """Iterate, and count what was sent and received; collective."""
    engine = engine_of(None, _TIMEOUT)
    if engine is None:
        raise RuntimeError("a single rank has no traffic")
    # Machines are only told apart here; what is between them is the same.
    engine.world._host_of_rank = tuple(r * case.hosts // case.ranks for r in range(case.ranks))
    loader, store = (_of_random_ids if case.ids == "random" else _of_a_graph)(case)
    dist.barrier()
    before = engine.traffic
    wanted = steps = 0
    last = None
    for minibatch in loader:
        last = minibatch
        wanted += len(minibatch.input_nodes)
        steps += 1
        dist.barrier()  # in step: nobody orders the next rows before all have ordered these
    time.sleep(_SETTLE_S)
    traffic = engine.traffic - before
    dist.barrier()
    rows = featsync.stats(loader).features[KEY].rows
    hits = rows["cache"]
    wrong = check_minibatch(last, store, (KEY,)).wrong
    dist.barrier()
    return Counted(traffic, steps, wanted, rows["peer"] + hits, hits, wrong)


def _of_random_ids(case: Case) -> tuple[Any, Any]:
    rank = dist.get_rank()
    owners = torch.randint(case.ranks, (case.rows,), generator=torch.Generator().manual_seed(0))
    owned = torch.nonzero(owners == rank).float()
    part = featsync.PartitionedFeature(owned.expand(-1, case.width), owners)
    store = gb.BasicFeatureStore({tuple(KEY): part})
    pipe = RandomIds(case, seed=1 + rank).plan_feature(
        store, node_feature_keys=["feat"], lookahead=2, device_cache=case.cache
    )
    return gb.DataLoader(pipe.sync_feature(transport=case.transport)), store


def _of_a_graph(case: Case) -> tuple[Any, Any]:
    graph = {"nodes": case.rows, "edges": 10 * case.rows, "width": case.width}
    config = as_config(
        {
            "dataset": {"synthetic": graph},
            "batch_size": case.batch,
            "partition": "hashed",
            "stages": [
                {"sample_neighbor": {"fanouts": [10, 10]}},
                {
                    "plan_feature": {
                        "node_feature_keys": ["feat"],
                        "lookahead": 2,
                        "device_cache": case.cache,
                    }
                },
                {"sync_feature": {"transport": case.transport}},
            ],
        }
    )
    share = case.batch * case.ranks * case.steps / case.rows
    config.dataset["synthetic"]["train_share"] = share
    dataset = load_dataset(config)
    return featsync.build(config, dataset=dataset), dataset.features
