"""Hypothesis strategies: tables, their parts, the ids that minibatches want, caches and windows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from featsync.partition import OwnerPartition, Partition, RangePartition
from featsync.plan import FeatureKey, Want
from featsync.retention import RETENTION
from support.tensors import DTYPES

NODE = FeatureKey("node", None, "feat")
EDGE = FeatureKey("edge", None, "weight")
OTHER = FeatureKey("node", None, "label")
KEYS = (NODE, EDGE, OTHER)

dtypes = st.sampled_from(DTYPES)
row_shapes = st.sampled_from([(), (1,), (3,), (16,), (2, 2)])
policies = st.sampled_from(sorted(RETENTION))
windows = st.integers(1, 4)


def table_of(num_rows: int, row_shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows of which no two are alike, as far as the dtype has that many values."""
    count = num_rows * torch.Size(row_shape).numel()
    values = torch.arange(1, count + 1)
    values = values % 2 if dtype is torch.bool else values % 120
    return values.to(dtype).view(num_rows, *row_shape)


def ids_of(num_rows: int, max_size: int = 12, *, unique: bool = False) -> st.SearchStrategy:
    """Ids of one tensor: int32 or int64, in any order."""
    dtype = st.sampled_from([torch.int32, torch.int64])
    ids = st.lists(st.integers(0, num_rows - 1), max_size=max_size, unique=unique)
    return st.builds(lambda values, kind: torch.tensor(values, dtype=kind), ids, dtype)


@st.composite
def wants_of(draw, key: FeatureKey, num_rows: int) -> Want:
    """What one minibatch wants of one feature; ids repeat, also across the layers of an edge."""
    if key.domain == "node":
        return Want((draw(ids_of(num_rows)),))
    num_layers = draw(st.integers(1, 3))
    # All layers of one minibatch come from one sampler, so they have one dtype.
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    ids = [draw(ids_of(num_rows, 6)).to(dtype) for _ in range(num_layers)]
    return Want(tuple(ids), tuple(range(num_layers)))


@dataclass(frozen=True)
class Epoch:
    """Minibatches of one epoch, and how many of them are taken before the loop is left.

    Attributes:
        batches: What each minibatch wants; a feature may be absent.
        taken: Minibatches that the user takes; fewer than there are where the loop is left.
    """

    batches: list[dict[FeatureKey, Want]]
    taken: int


@dataclass(frozen=True)
class Case:
    """Tables, their caches, and some epochs.

    Attributes:
        tables: The rows of each feature.
        slots: Slots of each feature that has a cache.
        policy: A name of RETENTION.
        window: Minibatches whose ids are known ahead.
        epochs: One after the other, over the same caches.
    """

    tables: dict[FeatureKey, torch.Tensor]
    slots: dict[FeatureKey, int]
    policy: str
    window: int
    epochs: list[Epoch]


@st.composite
def cases(draw, max_epochs: int = 3, max_batches: int = 7) -> Case:
    """Everything that a loader needs, small enough to see when it fails."""
    keys = draw(st.lists(st.sampled_from(KEYS), min_size=1, unique=True))
    tables = {
        key: table_of(draw(st.integers(1, 30)), draw(row_shapes), draw(dtypes)) for key in keys
    }
    slots = {key: draw(st.integers(1, len(table))) for key, table in tables.items()}
    uncached = draw(st.sets(st.sampled_from(keys)))
    epochs = []
    for _ in range(draw(st.integers(1, max_epochs))):
        batches = [
            {
                key: draw(wants_of(key, len(table)))
                for key, table in tables.items()
                if draw(st.integers(0, 5))  # one in six does not want it
            }
            for _ in range(draw(st.integers(0, max_batches)))
        ]
        is_left_early = draw(st.booleans())
        taken = draw(st.integers(0, len(batches))) if is_left_early else len(batches)
        epochs.append(Epoch(batches, taken))
    slots = {key: count for key, count in slots.items() if key not in uncached}
    return Case(tables, slots, draw(policies), draw(windows), epochs)


@st.composite
def partitions(
    draw, min_ranks: int = 1, max_ranks: int = 6, min_rows: int = 0
) -> tuple[Partition, list[int]]:
    """A partition, and the owner of each row as a plain list."""
    num_ranks = draw(st.integers(min_ranks, max_ranks))
    owners = draw(st.lists(st.integers(0, num_ranks - 1), min_size=min_rows, max_size=60))
    if draw(st.booleans()):
        owners = sorted(owners)
        counts = [owners.count(rank) for rank in range(num_ranks)]
        return RangePartition([0, *np.cumsum(counts).tolist()]), owners
    return OwnerPartition(np.array(owners, np.int64), num_ranks), owners
