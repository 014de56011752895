"""How much each row will be used: scores for ``static`` retention and the tie-break of ``window``.

Two ways, both done once before training and given to ``plan_feature(score=…)``:

* `inclusion_probability` computes from graph, seeds and fanouts how likely each node is to be in a
  minibatch. Nothing is sampled, and rare nodes are ranked as well as frequent ones.
* `presampled_counts` counts uses in batches that were sampled. That knows all that the sampler does
  (weights, types, edges left out), and is noise for nodes that came once or never.

For a GraphBolt graph, whose arrays are passed as they are::

    score = inclusion_probability(
        graph.csc_indptr, graph.indices, train_set_ids, batch_size=1024, fanouts=[10, 10, 10]
    )
    datapipe = datapipe.sample_neighbor(graph, [10, 10, 10])
    datapipe = datapipe.plan_feature(features, ["feat"], score=score, device_cache=0.1)

The idea of ranking a cache by analytic inclusion probabilities is that of SALIENT++ (Kaler et al.,
MLSys 2023: Communication-Efficient Graph Neural Networks with Probabilistic Neighborhood Expansion
Analysis and Caching). There each hop expands what the hop before found; GraphBolt's sampler expands
all nodes found so far in each hop, and so does this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.errors import ConfigError, FeatureError

__all__ = ["inclusion_probability", "presampled_counts"]

_ALL = -1
_CHUNK_EDGES = 1 << 20  # worked on at a time

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]


def inclusion_probability(
    indptr: object,
    indices: object,
    seeds: object,
    batch_size: int,
    fanouts: Sequence[int],
) -> _Floats:
    """Compute how likely a minibatch is to contain each node.

    A node is a seed of a batch with probability ``batch_size / len(seeds)``. A node that is in
    picks each of its neighbours with probability ``min(1, fanout / degree)`` in each later hop.
    Nodes are taken to pick independently: exact where each node can be reached in one way only
    (beside loops at a node), and somewhat too much where edges lead back soon.

    Takes 10 to 15 ns an edge and hop on one core, and 100 bytes a node beside the graph.

    Args:
        indptr: ``(num_nodes + 1,)`` integers, tensor or array: the neighbours that are sampled for
            node ``u`` are ``indices[indptr[u] : indptr[u + 1]]``. In GraphBolt: its in-neighbours,
            ``graph.csc_indptr``.
        indices: ``(num_edges,)`` integers, ``graph.indices``. Of a graph with types both count all
            nodes of all types through; types of edges are not looked at.
        seeds: ``(n,)`` ids of the nodes that are trained on.
        batch_size: Seeds of one minibatch.
        fanouts: One for each hop in the order of ``sample_neighbor``: the last one is of the hop
            next to the seeds. -1 takes all neighbours.

    Returns:
        ``(num_nodes,)``, from 0 to 1.

    Raises:
        ConfigError: The arrays make no graph, there are no seeds, or a number is out of its range.

    Example:
        Node 0 is the only seed and picks one of nodes 1 and 2; node 2 picks node 3.

        >>> inclusion_probability([0, 2, 2, 3, 3], [1, 2, 3], [0], 1, [1, 1])
        array([1.  , 0.75, 0.75, 0.5 ])
    """
    where = "inclusion_probability"
    bounds, neighbors = _graph(
        _integers(indptr, f"{where}.indptr"), _integers(indices, f"{where}.indices")
    )
    hops = [_fanout(fanout) for fanout in reversed(fanouts)]
    not_seed = _log_not_seed(_integers(seeds, f"{where}.seeds"), len(bounds) - 1, batch_size)
    return _expanded(not_seed, hops, bounds, neighbors)


def presampled_counts(ids_batches: Iterable[object], num_rows: int) -> _Ints:
    """Count how often each row is used in some batches.

    Args:
        ids_batches: Ids of each batch, ``(n,)`` integers, tensors or arrays; for example
            ``(minibatch.input_nodes for minibatch in datapipe)`` over one or two epochs.
        num_rows: Rows of the feature's table.

    Returns:
        ``(num_rows,)``.

    Raises:
        FeatureError: A batch names a row that the table does not have.

    Example:
        >>> presampled_counts([[0, 2], [2, 3]], 4)
        array([1, 0, 2, 1])
    """
    counts = torch.zeros(num_rows, dtype=torch.int64)
    for batch in ids_batches:
        ids = _integers(batch, "presampled_counts: a batch")
        outside = _outside(ids, num_rows)
        if outside is not None:
            raise FeatureError(
                f"presampled_counts: a batch uses row {outside} of a table of {num_rows} rows; "
                "graph and features do not match"
            )
        rows = torch.from_numpy(ids.astype(np.int64))
        counts.scatter_add_(0, rows, torch.ones_like(rows))
    result: _Ints = counts.numpy()
    return result


def _log_not_seed(seeds: NDArray[Any], num_nodes: int, batch_size: int) -> _Floats:
    """Logarithm of the probability that a node is no seed of a batch."""
    if len(seeds) == 0 or batch_size < 1:
        raise ConfigError(
            f"inclusion_probability: {len(seeds)} seeds in batches of {batch_size}; there must be "
            "one seed at least, and one in a batch"
        )
    outside = _outside(seeds, num_nodes)
    if outside is not None:
        raise ConfigError(
            f"inclusion_probability.seeds names node {outside} of a graph of {num_nodes} nodes"
        )
    times = np.bincount(seeds.astype(np.int64), minlength=num_nodes).astype(np.float64)
    share = min(1.0, batch_size / len(seeds))
    return times * np.log1p(-share) if share < 1.0 else np.where(times > 0, -np.inf, 0.0)


def _expanded(
    not_seed: _Floats, hops: Sequence[int], bounds: _Ints, neighbors: NDArray[Any]
) -> _Floats:
    """How likely each node is in after all hops, the first of which is next to the seeds."""
    degrees = np.diff(bounds)
    is_in = -np.expm1(not_seed)
    # Of each node: that it came in with the last hop; that it came in earlier and has not picked a
    # given neighbour yet; that it has.
    came, waits, picked = is_in, np.zeros_like(is_in), np.zeros_like(is_in)
    for fanout in hops:
        picks = np.ones_like(is_in) if fanout == _ALL else fanout / np.maximum(degrees, fanout or 1)
        waits += came
        picked += waits * picks
        waits *= 1.0 - picks
        with np.errstate(divide="ignore"):  # a neighbour that is picked for certain: log of 0
            not_picked = np.log1p(-np.minimum(picked, 1.0))
        absent = not_seed.copy()
        _add_to_neighbors(absent, not_picked, bounds, neighbors)
        is_in_now = -np.expm1(absent)
        came, is_in = is_in_now - is_in, is_in_now
    return is_in


def _add_to_neighbors(
    sums: _Floats, terms: _Floats, bounds: _Ints, neighbors: NDArray[Any]
) -> None:
    """Add the term of each node to the sums of all its neighbours, in place."""
    target = torch.from_numpy(sums)
    for first, last in _node_ranges(bounds):
        ids = neighbors[bounds[first] : bounds[last]].astype(np.int64)  # torch refuses read-only
        nodes = np.repeat(np.arange(first, last), np.diff(bounds[first : last + 1]))
        values = terms.take(nodes)
        values[ids == nodes] = 0.0  # who picks itself was in already
        target.scatter_add_(0, torch.from_numpy(ids), torch.from_numpy(values))


def _node_ranges(bounds: _Ints) -> Iterator[tuple[int, int]]:
    """Cut the nodes into ranges that have few edges together, or are one node."""
    first = 0
    while first < len(bounds) - 1:
        end = int(np.searchsorted(bounds, bounds[first] + _CHUNK_EDGES, side="right")) - 1
        last = max(first + 1, end)
        yield first, last
        first = last


def _graph(indptr: NDArray[Any], indices: NDArray[Any]) -> tuple[_Ints, NDArray[Any]]:
    bounds = indptr.astype(np.int64, copy=False)
    if (
        len(bounds) == 0
        or bounds[0] != 0
        or bounds[-1] != len(indices)
        or (np.diff(bounds) < 0).any()
    ):
        raise ConfigError(
            "inclusion_probability.indptr must rise from 0 to the number of edges, "
            f"{len(indices)}, one number more than nodes"
        )
    outside = _outside(indices, len(bounds) - 1)
    if outside is not None:
        raise ConfigError(
            f"inclusion_probability.indices names node {outside} of a graph of "
            f"{len(bounds) - 1} nodes"
        )
    return bounds, indices


def _fanout(fanout: object) -> int:
    number = np.asarray(fanout)
    if number.size != 1 or number.dtype.kind not in "iu" or number < _ALL:
        raise ConfigError(
            f"inclusion_probability.fanouts holds {fanout}; each hop has one number of neighbours, "
            "or -1 for all"
        )
    return int(number.item())


def _integers(given: object, name: str) -> NDArray[Any]:
    """See a vector of integers as an array, without a copy where that is possible."""
    array = given.cpu().numpy() if isinstance(given, torch.Tensor) else np.asarray(given)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ConfigError(
            f"{name} is {array.dtype} of shape {array.shape}; it must be a vector of integers"
        )
    return array


def _outside(ids: NDArray[Any], size: int) -> int | None:
    """The worst of the ids that are not below size, if there is one."""
    if len(ids) and ids.min() < 0:
        return int(ids.min())
    return int(ids.max()) if len(ids) and ids.max() >= size else None
