"""The obvious program for partitioned features, to compare with: ask for rows when they are needed.

``fetch_by_all_to_all`` takes the place of ``plan_feature`` and ``sync_feature``: for each minibatch
the ranks exchange how many rows they want of each other, then the ids, then the rows, and wait for
each. Stock GraphBolt has nothing for features that are split over ranks. As in any such program all
ranks need the same number of minibatches.

    featsync bench pipelines/all_to_all.yaml pipelines/partitioned.yaml --ranks 2 \
        --import pipelines.all_to_all
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterDataPipe, functional_datapipe


@functional_datapipe("fetch_by_all_to_all")
class AllToAllFetcher(IterDataPipe[Any]):
    """Deliver rows of partitioned features without looking ahead.

    Args:
        datapipe: The pipe up to the sampler.
        features: A store of `featsync.PartitionedFeature`.
        node_feature_keys: Names, on a homogeneous graph.
    """

    def __init__(
        self, datapipe: IterDataPipe[Any], features: Any, node_feature_keys: Sequence[str] = ()
    ) -> None:
        super().__init__()
        # The stock fetcher without keys reads nothing and marks where loader workers end.
        self.datapipe = datapipe.fetch_feature(features)
        self.features = features
        self.keys = tuple(node_feature_keys)

    def __iter__(self) -> Iterator[Any]:
        """Yield each minibatch with its rows; collective."""
        for minibatch in self.datapipe:
            ids = minibatch.node_ids()
            minibatch.set_node_features(
                {key: self._fetch(("node", None, key), ids) for key in self.keys}
            )
            yield minibatch

    def _fetch(self, key: tuple[str, str | None, str], ids: torch.Tensor) -> torch.Tensor:
        parts = self.features._features[key].featsync_parts
        own = parts.readable[parts.rank]
        if dist.get_world_size() == 1:
            return own[ids]
        ranks, numbers = parts.partition.locate(ids.numpy().astype(np.int64, copy=False))
        order = torch.from_numpy(np.argsort(ranks, kind="stable"))
        wanted = torch.from_numpy(np.bincount(ranks, minlength=dist.get_world_size()))
        asked = torch.empty_like(wanted)
        dist.all_to_all_single(asked, wanted)
        theirs, mine = asked.tolist(), wanted.tolist()
        asked_numbers = torch.empty(sum(theirs), dtype=torch.int64)
        dist.all_to_all_single(asked_numbers, torch.from_numpy(numbers)[order], theirs, mine)
        rows = torch.empty((len(ids), *own.shape[1:]), dtype=own.dtype)
        dist.all_to_all_single(rows, own[asked_numbers], mine, theirs)
        delivered = torch.empty_like(rows)
        delivered[order] = rows
        return delivered
