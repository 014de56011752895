"""Everything that depends on DGL GraphBolt, and the only module that imports it.

Written for 2.1 (what the package index has), aware of what changed up to the newest source:

* The loader cuts the pipe for its worker processes at a marker stage that it finds by exact class:
  `FeatureFetcher` up to 2.3, `FeatureFetcherStartMarker` from 2.4. Planner and Syncer have to stand
  behind the cut, else each worker would plan for its own share of the minibatches. `mark_cut` adds
  the marker where there is none. Two cuts nest workers in workers, which fails.
* Leaving a loop is invisible to a stage: its generator stays suspended until the next ``iter()``.
  `watch_loop` attaches a finalizer to the loader's iterator instead, which dies at the break.
* A later ``fetch_feature`` throws away the features that are there. Minibatches that the Syncer
  delivered become `SyncedMiniBatch`, which takes the union.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.graph import traverse_dps

from featsync.dynamic.clock import FeatureClock
from featsync.errors import ConfigError, HostError
from featsync.host_check import explain_host
from featsync.partitioned_table import PartitionedTable, Parts
from featsync.plan import FeatureKey, Want
from featsync.table import DynamicTable, ForeignTable, Table, TensorTable

try:
    import dgl
    import dgl.graphbolt as gb
    from dgl.partition import metis_partition_assignment
except Exception as error:
    raise HostError(explain_host(error)) from error

__all__ = [
    "FeatureKeys",
    "SyncedMiniBatch",
    "deliver",
    "feature_of",
    "gb",
    "known_keys",
    "mark_cut",
    "metis_owners",
    "seeded",
    "stages_of",
    "table_of",
    "type_name",
    "upstream",
    "wants_of",
    "warn_of_unusable_overlap",
    "watch_loop",
]

FeatureKeys = Sequence[str] | Mapping[str, Sequence[str]] | None


class SyncedMiniBatch(gb.MiniBatch):
    """A minibatch with features, to which a later feature stage adds its own."""

    def set_node_features(self, node_features: dict[Any, torch.Tensor]) -> None:
        """Add to, instead of replace, the features that are there."""
        self.node_features: dict[Any, torch.Tensor] = {
            **(self.node_features or {}),
            **node_features,
        }

    def set_edge_features(self, edge_features: list[dict[Any, torch.Tensor]]) -> None:
        """Add to, instead of replace, the features of each layer."""
        present = self.edge_features or [{} for _ in edge_features]
        self.edge_features: list[dict[Any, torch.Tensor]] = [
            {**a, **b} for a, b in zip(present, edge_features, strict=True)
        ]


def mark_cut(datapipe: IterDataPipe[Any], features: object) -> IterDataPipe[Any]:
    """Put the loader's worker cut behind ``datapipe``, unless there is one upstream already."""
    marker = getattr(gb, "FeatureFetcherStartMarker", gb.FeatureFetcher)
    if any(type(stage) is marker for stage in upstream(datapipe)):
        return datapipe
    if marker is gb.FeatureFetcher:
        # A stock fetcher without keys reads nothing.
        return cast("IterDataPipe[Any]", datapipe.fetch_feature(features))
    return cast("IterDataPipe[Any]", datapipe.mark_feature_fetcher_start())


def metis_owners(graph: Any, num_parts: int) -> torch.Tensor:
    """Let METIS split a graph: ``(num_nodes,)`` int64, the part of each node."""
    empty = torch.empty(0, dtype=torch.int64)
    topology = dgl.graph(
        ("csc", (graph.csc_indptr.long(), graph.indices.long(), empty)),
        num_nodes=graph.total_num_nodes,
    )
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore", ResourceWarning)  # DGL leaves /proc/self/status open
        owners: torch.Tensor = metis_partition_assignment(topology, num_parts)
    return owners


def upstream(datapipe: IterDataPipe[Any]) -> Iterator[IterDataPipe[Any]]:
    """Yield ``datapipe`` and every stage before it, nearest first."""
    level = traverse_dps(datapipe)
    while level:
        yield from (cast("IterDataPipe[Any]", stage) for stage, _ in level.values())
        level = {key: value for _, above in level.values() for key, value in above.items()}


def stages_of(dataloader: object) -> Iterator[IterDataPipe[Any]]:
    """Yield the stages behind a ``gb.DataLoader``, last first."""
    # Up to 2.3 the loader is torch's, which wraps the pipe once more; from 2.4 it is a stage.
    datapipe = getattr(dataloader, "dataset", dataloader)
    if not isinstance(datapipe, IterDataPipe):
        raise ConfigError(f"{type(dataloader).__name__} is not a gb.DataLoader or a datapipe")
    return upstream(datapipe)


def watch_loop(on_left: Callable[[], None]) -> None:
    """Call ``on_left`` right after the loop that is now asking for its first minibatch was left.

    The loader's iterator is found on the stack, once an epoch. Where there is none (a datapipe
    iterated by itself, or read ahead by another thread) nothing happens before the next ``iter()``.

    Args:
        on_left: Runs in a finalizer: must not wait, raise or take locks.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.utils.data.dataloader._BaseDataLoaderIter):
            weakref.finalize(owner, on_left).atexit = False
            return
        frame = frame.f_back  # type: ignore[assignment]


def warn_of_unusable_overlap() -> str | None:
    """Say what to do where CUDA is there but DGL was built without it; ``None`` if all is well."""
    if not torch.cuda.is_available() or hasattr(
        torch.ops.graphbolt,  # type: ignore[attr-defined]
        "set_max_uva_threads",
    ):
        return None
    return (
        "this DGL was built without CUDA, and torch sees a GPU: gb.DataLoader(..., "
        "overlap_feature_fetch=False) works, without it the loader fails for want of "
        "set_max_uva_threads"
    )


def seeded(sampler_class: Any, items: object, seed: int, **arguments: Any) -> Any:
    """Make an item sampler whose order of seeds repeats.

    Up to 2.3 there is no argument for it, and the generator is seeded by the operating system.
    """
    if "seed" in inspect.signature(sampler_class).parameters:
        return sampler_class(items, seed=seed, **arguments)
    sampler = sampler_class(items, **arguments)
    if hasattr(sampler, "_rng"):
        sampler._rng = np.random.default_rng(seed)
    return sampler


def table_of(store: gb.FeatureStore, key: FeatureKey) -> Table:
    """Find the home of a feature: its tensor where that is known, else the store's ``read``."""
    feature = feature_of(store, key)
    if type(feature) is gb.TorchBasedFeature:
        return TensorTable(key, lambda: feature._tensor)
    clock = getattr(feature, "featsync_clock", None)
    if isinstance(clock, FeatureClock):
        return DynamicTable.of(key, clock)
    parts = getattr(feature, "featsync_parts", None)
    if isinstance(parts, Parts):
        return PartitionedTable(key, parts)
    tensor = getattr(feature, "featsync_tensor", None)
    if isinstance(tensor, torch.Tensor):
        return TensorTable(key, lambda: feature.featsync_tensor, getattr(feature, "segment", None))
    return ForeignTable(key, lambda ids: store.read(*key, ids))


def feature_of(store: gb.FeatureStore, key: FeatureKey) -> Any:
    """The feature object behind a key, on which its caches live; the store where there is none."""
    features = getattr(store, "_features", None)
    if isinstance(features, Mapping) and tuple(key) in features:
        return features[tuple(key)]
    return store


def known_keys(store: gb.FeatureStore) -> list[FeatureKey] | None:
    """The features of a store, or ``None`` if it does not tell."""
    keys = getattr(store, "keys", None)
    try:
        # In the store of an on-disk dataset the domain is an Enum, which prints as its own name.
        return (
            None
            if keys is None
            else [
                FeatureKey(str(getattr(domain, "value", domain)), *key) for domain, *key in keys()
            ]
        )
    except NotImplementedError:
        return None


def wants_of(
    minibatch: gb.MiniBatch, node_keys: FeatureKeys, edge_keys: FeatureKeys
) -> dict[FeatureKey, Want]:
    """Which rows a minibatch wants; a type that it has no ids of is left out, as in newer DGL.

    Raises:
        ConfigError: Keys by type on a homogeneous graph, or a plain list on a heterogeneous one.
    """
    wants: dict[FeatureKey, Want] = {}
    nodes = minibatch.node_ids()
    if node_keys and nodes is not None:
        for key, ids in _pair("node", node_keys, nodes):
            wants[key] = Want((ids,))
    layers: dict[FeatureKey, list[tuple[int, torch.Tensor]]] = {}
    for layer in range(minibatch.num_layers() if edge_keys else 0):
        edges = minibatch.edge_ids(layer)
        if edges is not None:
            for key, ids in _pair("edge", edge_keys, edges):
                layers.setdefault(key, []).append((layer, ids))
    for key, found in layers.items():
        wants[key] = Want(tuple(ids for _, ids in found), tuple(layer for layer, _ in found))
    return wants


def _pair(domain: str, keys: FeatureKeys, ids: object) -> Iterator[tuple[FeatureKey, torch.Tensor]]:
    """Pair feature keys with ids, by type where there are types."""
    if isinstance(keys, Mapping) != isinstance(ids, Mapping):
        form = "by type, such as {'paper': ['feat']}" if isinstance(ids, Mapping) else "a list"
        raise ConfigError(
            f"plan_feature.{domain}_feature_keys = {keys!r}: the graph is "
            f"{'heterogeneous' if isinstance(ids, Mapping) else 'homogeneous'}, so give {form}"
        )
    if isinstance(ids, torch.Tensor):
        for name in cast("Sequence[str]", keys):
            yield FeatureKey(domain, None, name), ids
        return
    by_type = {
        type_name(type_): found
        for type_, found in cast("Mapping[Any, torch.Tensor | None]", ids).items()
    }
    for type_, names in cast("Mapping[Any, Sequence[str]]", keys).items():
        found = by_type.get(type_name(type_))
        if found is not None:
            for name in names:
                yield FeatureKey(domain, type_name(type_), name), found


def type_name(type_: str | tuple[str, str, str]) -> str:
    """A node or edge type as one string; edge types may come as tuples of three."""
    return ":".join(type_) if isinstance(type_, tuple) else type_


def deliver(
    minibatch: gb.MiniBatch,
    wants: Mapping[FeatureKey, Want],
    rows: Mapping[FeatureKey, Sequence[torch.Tensor]],
) -> gb.MiniBatch:
    """Put rows where ``fetch_feature`` would, beside the features of other stages."""
    nodes: dict[Any, torch.Tensor] = {}
    edges: list[dict[Any, torch.Tensor]] = [{} for _ in range(minibatch.num_layers())]
    for key, want in wants.items():
        name = key.name if key.type is None else (key.type, key.name)
        if key.domain == "node":
            nodes[name] = rows[key][0]
        else:
            for layer, tensor in zip(want.layers, rows[key], strict=True):
                edges[layer][name] = tensor
    minibatch.__class__ = SyncedMiniBatch
    minibatch.set_node_features(nodes)
    minibatch.set_edge_features(edges)
    return minibatch
