"""The `synthetic` dataset: seeded random graphs with hubs, of any size.

* Nodes have a rank, and the chance to be the source of an edge falls with rank so that degrees
  follow a power law with exponent 2.5; in-degrees do too. Node ids are a random permutation of the
  ranks, so hubs lie anywhere.
* The class of a node is its rank modulo the number of classes: all are equally large and have
  equally many hubs. Half of the edges (`HOMOPHILY`) come from a node of the same class, the others
  from anywhere.
* Features are normal noise around a centre of the class, near enough to each other that a node's
  own row tells the class only sometimes and its neighbours help.

An edge may occur twice and a node may be its own neighbour. Time and memory grow with the result
only: work is done in blocks. The same options give the same graph with the same version of numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, model_validator
from torch import Tensor

from featsync.datasets import splits
from featsync.datasets.graph_data import GraphData, Split, Task, Topology
from featsync.datasets.options import Options
from featsync.datasets.splits import SHARES

HOMOPHILY = 0.5
CENTRE_LENGTH = 2.8  # of a class centre, where the noise has length sqrt(width)

_BLOCK = 1 << 22  # elements worked on at a time

Integers = npt.NDArray[np.int64]


class SyntheticOptions(Options):
    """Options of the `synthetic` dataset.

    Attributes:
        nodes: Number of nodes.
        edges: Number of edges.
        width: Columns of the node features.
        classes: Number of classes.
        seed: Another seed gives another graph.
        train_share: Share of the nodes that are trained on; real graphs of this size have labels
            for few (1 to 10 %), and an epoch is as long as that.
    """

    nodes: int = Field(default=100_000, ge=1)
    edges: int = Field(default=1_000_000, ge=0)
    width: int = Field(default=128, ge=1)
    classes: int = Field(default=16, ge=1)
    seed: int = Field(default=0, ge=0)
    train_share: float = Field(default=SHARES["train"], gt=0.0, le=SHARES["train"])

    @model_validator(mode="after")
    def _classes_fit(self) -> SyntheticOptions:
        if self.classes > self.nodes:
            raise ValueError(
                f"{self.classes} classes need as many nodes at least, there are {self.nodes}"
            )
        return self


class _Nodes(NamedTuple):
    """Who is who: ``id_of_rank`` and, by id, ``labels`` and ``in_degrees``; each ``(nodes,)``."""

    id_of_rank: Integers
    labels: Integers
    in_degrees: Integers


def load(options: SyntheticOptions, task: Task) -> GraphData:
    """Generate the graph: about four seconds for a million nodes and twenty million edges."""
    rng = np.random.default_rng(options.seed)
    nodes = _make_nodes(options, rng)
    topology = _make_edges(options, nodes, rng)
    features = _make_features(options, nodes.labels, rng)
    parts = splits.seeds_and_labels(nodes.labels, options.train_share)
    pairs: Mapping[str, Tensor] = {}
    if task == "link_prediction":
        pairs = splits.sample_pairs(topology, None, options.nodes)
    return GraphData(
        **vars(topology),
        name="synthetic",
        features={("node", None, "feat"): features},
        splits={part: Split(*parts[part], pairs.get(part)) for part in parts},
        num_classes=options.classes,
    )


def _make_nodes(options: SyntheticOptions, rng: np.random.Generator) -> _Nodes:
    ids = rng.permutation(options.nodes)
    ranks = np.arange(options.nodes + 1)
    labels = np.empty(options.nodes, dtype=np.int64)
    labels[ids] = ranks[:-1] % options.classes
    # Of the first r ranks' edges there are E * (r/N)^(1/3): a power law whose sum is E exactly.
    ends = np.floor(options.edges * np.cbrt(ranks / options.nodes)).astype(np.int64)
    ends[-1] = options.edges
    in_degrees = np.empty(options.nodes, dtype=np.int64)
    in_degrees[ids] = np.diff(ends)
    return _Nodes(ids, labels, in_degrees)


def _make_edges(options: SyntheticOptions, nodes: _Nodes, rng: np.random.Generator) -> Topology:
    indptr = np.concatenate([[0], np.cumsum(nodes.in_degrees)])
    indices = np.empty(options.edges, dtype=np.int64)
    for first, last in _blocks(options.edges, _BLOCK):
        destinations = _destinations(indptr, first, last)
        # The cube of a uniform number has the distribution (r/N)^(1/3).
        ranks = (rng.random(last - first) ** 3 * options.nodes).astype(np.int64)
        alike = rng.random(last - first) < HOMOPHILY
        wanted = nodes.labels[destinations[alike]]
        same = ranks[alike] - ranks[alike] % options.classes + wanted
        ranks[alike] = np.where(same < options.nodes, same, same - options.classes)
        indices[first:last] = nodes.id_of_rank[ranks]
    return Topology(indptr=torch.from_numpy(indptr), indices=torch.from_numpy(indices))


def _destinations(indptr: Integers, first: int, last: int) -> Integers:
    """Destination of each of the edges from `first` to `last`, exclusive."""
    node = int(np.searchsorted(indptr, first, side="right")) - 1
    end = int(np.searchsorted(indptr, last, side="left"))
    bounds = np.clip(indptr[node : end + 1], first, last)
    return np.repeat(np.arange(node, end), np.diff(bounds))


def _make_features(options: SyntheticOptions, labels: Integers, rng: np.random.Generator) -> Tensor:
    centres = rng.standard_normal((options.classes, options.width), dtype=np.float32)
    centres *= CENTRE_LENGTH / np.linalg.norm(centres, axis=1, keepdims=True)
    features = np.empty((options.nodes, options.width), dtype=np.float32)
    for first, last in _blocks(options.nodes, max(1, _BLOCK // options.width)):
        block = features[first:last]
        rng.standard_normal(out=block, dtype=np.float32)
        block += centres[labels[first:last]]
    return torch.from_numpy(features)


def _blocks(size: int, step: int) -> Iterator[tuple[int, int]]:
    for first in range(0, size, step):
        yield first, min(first + step, size)
