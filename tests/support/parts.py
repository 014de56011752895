"""Partitioned tables of the tests: which rank gets which rows of a table, and how they travel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import featsync
from featsync.partition import as_partition
from featsync.transports import TRANSPORTS
from featsync.workers import WORKERS
from support.graphs import store_of

PARTITIONS = ("range", "owners")
WAYS = ("auto", *TRANSPORTS)
NOTHING = torch.tensor([], dtype=torch.int64)


def partition_of(how: str, num_rows: int, num_ranks: int) -> Any:
    """Bounds that are far from even, or owners at random; some rank may hold nothing."""
    generator = np.random.default_rng(num_rows + num_ranks)
    if how == "range":
        inner = np.sort(generator.integers(0, num_rows + 1, num_ranks - 1))
        return [0, *map(int, inner), num_rows]
    return torch.from_numpy(generator.integers(0, num_ranks, num_rows))


def part_of(table: torch.Tensor, partition: Any, rank: int, num_ranks: int) -> torch.Tensor:
    """The rows that a rank holds, by ascending id."""
    rows = as_partition(partition, num_ranks).rows_of(rank)
    return table[torch.from_numpy(rows)]


def partitioned(tables: Any, how: str, process_group: Any = None) -> Any:
    """A store of partitioned features with the rows of a stock store; collective."""
    rank, num_ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
    features = {}
    for key in tables.keys():  # noqa: SIM118 - a feature store is no mapping
        domain, *names = key
        table = tables.read(getattr(domain, "value", domain), *names)
        partition = partition_of(how, len(table), num_ranks)
        part = part_of(table, partition, rank, num_ranks)
        features[key] = featsync.PartitionedFeature(part, partition, process_group)
    return store_of(features)


def settings_of_ways() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each transport with each partition, and with windows, caches and workers in turn."""
    others = itertools.cycle(
        itertools.product((1, 3, 8), (0, 0.3), [name for name in WORKERS if name != "process"])
    )
    for how, transport in itertools.product(PARTITIONS, WAYS):
        for lookahead, device_cache, worker in itertools.islice(others, 3):
            yield (
                how,
                {
                    "transport": transport,
                    "lookahead": lookahead,
                    "device_cache": device_cache,
                    "worker": worker,
                },
            )
