"""What the command and the processes of its ranks say to each other; all of it is pickled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from featsync.bench.check_rows import RowCheck
from featsync.config import Config

__all__ = ["Compare", "Compared", "FeatureFound", "Outcome", "RankSpec", "Ready"]


@dataclass(frozen=True)
class RankSpec:
    """All that one process needs to know.

    Attributes:
        config: The pipeline.
        rank: Its rank, of ``num_ranks``.
        num_ranks: How many there are.
        store_file: Where the ranks meet.
        modules: Modules to import first, which register the user's own stages.
        timeout: Seconds after which a silent peer is given up.
    """

    config: Config
    rank: int
    num_ranks: int
    store_file: str
    modules: tuple[str, ...]
    timeout: float


@dataclass(frozen=True)
class Ready:
    """A process has loaded the dataset and built the pipeline."""


@dataclass(frozen=True)
class Compare:
    """Asks for some minibatches to be compared.

    Attributes:
        minibatches: How many, at most.
    """

    minibatches: int


@dataclass(frozen=True)
class Compared:
    """A sign of life.

    Attributes:
        minibatches: Compared so far.
    """

    minibatches: int


@dataclass(frozen=True)
class FeatureFound:
    """What was found about one feature.

    Attributes:
        name: Its key.
        row_shape: Of its rows.
        transport: How rows of other ranks came; ``stock`` if another stage than featsync's reads.
        why: The reasons for what was chosen.
        hit_rate: Share of the rows that caches served; ``None`` if nobody counts.
        num_wanted: Rows that were wanted.
        num_of_others: How many of them other ranks hold.
        sizes: Rows that each rank holds; empty if the feature is not split.
    """

    name: str
    row_shape: tuple[int, ...]
    transport: str
    why: str
    hit_rate: float | None
    num_wanted: int
    num_of_others: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """What one rank found.

    Attributes:
        minibatches: How many were compared.
        rows: Rows compared, and those that differed.
        features: One for each feature.
        remote_share: Of the neighbours of a node, the share that other ranks hold; ``None`` where
            nodes are not split, and on all ranks but the first.
    """

    minibatches: int
    rows: RowCheck
    features: Sequence[FeatureFound]
    remote_share: float | None
