"""One rank's part of a check: load, build, compare some minibatches, and see what was chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import featsync
from featsync._graphbolt import table_of
from featsync.bench.check_rows import RowCheck, check_minibatch
from featsync.bench.inputs import wanted_ids
from featsync.checking.protocol import FeatureFound, Outcome
from featsync.config import Config
from featsync.feature_keys import feature_keys
from featsync.loading import load_to_compare
from featsync.partition import Partition
from featsync.partitioned_table import PartitionedTable
from featsync.partitioners import joined, remote_share
from featsync.pipeline import build
from featsync.plan import FeatureKey

__all__ = ["Comparison"]


class Comparison:
    """A pipeline and the tables that its rows are compared with.

    Making one is collective where the configuration shares or splits its tables.

    Args:
        config: The pipeline.
        rank: This process's.

    Raises:
        ConfigError: The pipeline cannot be built.
    """

    def __init__(self, config: Config, rank: int = 0) -> None:
        self._config, self._rank = config, rank
        self._dataset, self._tables = load_to_compare(config)
        self._loader = build(config, dataset=self._dataset)
        self._keys = feature_keys(config)
        self._partitions: dict[FeatureKey, Partition] = {}
        for key in self._keys:
            table = table_of(self._dataset.features, key)
            if isinstance(table, PartitionedTable):
                self._partitions[key] = table.parts.partition
        self._num_wanted: Counter[FeatureKey] = Counter()
        self._num_of_others: Counter[FeatureKey] = Counter()

    def run(self, minibatches: int, on_minibatch: Callable[[int], None]) -> Outcome:
        """Run some minibatches and compare all features with their tables.

        Rows are compared when they come, and again when the next minibatch has come: until then
        they must be there and stay.

        Args:
            minibatches: How many, at most.
            on_minibatch: Told how many are done.
        """
        total, done, before = RowCheck(), 0, None
        for minibatch in self._loader:
            total += check_minibatch(minibatch, self._tables, self._keys)
            if before is not None:
                total += check_minibatch(before, self._tables, self._keys)
            self._count(minibatch)
            before, done = minibatch, done + 1
            on_minibatch(done)
            if done == minibatches:
                break
        return Outcome(done, total, self._features(), self._remote_share())

    def _count(self, minibatch: Any) -> None:
        for key, _, ids in wanted_ids(minibatch, self._keys):
            self._num_wanted[key] += len(ids)
            if (partition := self._partitions.get(key)) is not None:
                ranks = partition.ranks_of(ids.to(torch.int64).cpu().numpy())
                self._num_of_others[key] += int(np.count_nonzero(ranks != self._rank))

    def _features(self) -> list[FeatureFound]:
        stats = None
        if any(stage.name == "sync_feature" for stage in self._config.stages):
            stats = featsync.stats(self._loader)
        found = []
        for key in self._keys:
            chosen = None if stats is None else stats.features.get(key)
            partition = self._partitions.get(key)
            found.append(
                FeatureFound(
                    name=str(key),
                    row_shape=tuple(self._tables.size(*key)),
                    transport="stock" if chosen is None else chosen.transport,
                    why="read by the stage itself" if chosen is None else chosen.why,
                    hit_rate=None if chosen is None else chosen.hit_rate,
                    num_wanted=self._num_wanted[key],
                    num_of_others=self._num_of_others[key],
                    sizes=() if partition is None else partition.sizes,
                )
            )
        return found

    def _remote_share(self) -> float | None:
        nodes = self._dataset.nodes_by_type
        if not nodes or self._rank != 0:
            return None
        return remote_share(self._dataset.graph, joined(list(nodes.values())))
