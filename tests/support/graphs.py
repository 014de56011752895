"""The small graphs of the cases, loaders of them, and what stock would deliver from them."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dgl.graphbolt as gb
import torch
from torch.utils.data import IterDataPipe

import featsync
from support.tensors import same_bits

BUYS, SELLS = "user:buys:item", "shop:sells:item"


def ring20(edge_ids: bool = True, dtype: torch.dtype = torch.int64) -> gb.FusedCSCSamplingGraph:
    """20 nodes; the in-neighbours of v are v - 1 and v - 3.

    Fanout 2 takes all of them, so that two pipelines sample the same.

    Args:
        edge_ids: Whether the edges carry original ids (39, 38, … 0), which stock needs to read
            edge features.
        dtype: Of node ids.
    """
    nodes = torch.arange(20)
    indices = torch.stack([(nodes - 1) % 20, (nodes - 3) % 20], 1).reshape(-1)
    return gb.fused_csc_sampling_graph(
        torch.arange(0, 41, 2, dtype=dtype),
        indices.to(dtype),
        edge_attributes={gb.ORIGINAL_EDGE_ID: torch.arange(39, -1, -1)} if edge_ids else None,
    )


def hetero3(edge_ids: bool = True) -> gb.FusedCSCSamplingGraph:
    """user(4) --buys--> item(6) <--sells-- shop(3); an item is never a source.

    buys (0,0)(1,1)(2,2) with original ids 7, 8, 9; sells (0,4)(1,5) with 3, 4.
    """
    # Nodes in one numbering: users 0-3, items 4-9, shops 10-12.
    return gb.fused_csc_sampling_graph(
        torch.tensor([0, 0, 0, 0, 0, 1, 2, 3, 3, 4, 5, 5, 5, 5]),
        torch.tensor([0, 1, 2, 10, 11]),
        node_type_offset=torch.tensor([0, 4, 10, 13]),
        type_per_edge=torch.tensor([0, 0, 0, 1, 1], dtype=torch.uint8),
        node_type_to_id={"user": 0, "item": 1, "shop": 2},
        edge_type_to_id={BUYS: 0, SELLS: 1},
        edge_attributes=(
            {gb.ORIGINAL_EDGE_ID: torch.tensor([7, 8, 9, 3, 4])} if edge_ids else None
        ),
    )


def store_of(tables: Mapping[tuple[str, str | None, str], Any]) -> gb.BasicFeatureStore:
    """A feature store of tensors, or of features that are ready."""
    return gb.BasicFeatureStore(
        {
            key: gb.TorchBasedFeature(table) if isinstance(table, torch.Tensor) else table
            for key, table in tables.items()
        }
    )


class OwnRead(gb.Feature):
    """A feature with a read of its own, which fails at id 17."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table = table

    def read(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        if ids is not None and 17 in ids:
            raise ArithmeticError("17 cannot be read")
        return self.table if ids is None else self.table[ids]

    def size(self) -> torch.Size:
        return self.table.shape[1:]


def ring_store(x: torch.Tensor | None = None, w: torch.Tensor | None = None) -> Any:
    """Node feature x, (20, 1) arange unless given, and edge feature w, (40, 1)."""
    x = torch.arange(20.0).reshape(20, 1) if x is None else x
    w = 100 + torch.arange(40.0).reshape(40, 1) if w is None else w
    return store_of({("node", None, "x"): x, ("edge", None, "w"): w})


def hetero_store() -> Any:
    """Node features f of all three types, 2 wide, and edge features w of both relations."""
    tables: dict[tuple[str, str | None, str], torch.Tensor] = {}
    for start, (type_, rows) in enumerate({"user": 4, "item": 6, "shop": 3}.items()):
        tables["node", type_, "f"] = 100.0 * start + torch.arange(rows * 2.0).reshape(rows, 2)
    for start, type_ in enumerate((BUYS, SELLS)):
        tables["edge", type_, "w"] = 500.0 + 100 * start + torch.arange(30.0).reshape(10, 3)
    return store_of(tables)


HETERO_NODES = {"user": ["f"], "item": ["f"], "shop": ["f"]}
HETERO_EDGES = {BUYS: ["w"], SELLS: ["w"]}


def seed_batches(
    seeds: Any = 20, batch_size: int = 2, names: str = "seed_nodes", **options: Any
) -> gb.ItemSampler:
    """Seeds in order: a number of nodes, a tensor, or tensors by type."""
    if isinstance(seeds, Mapping):
        items = gb.ItemSetDict({t: gb.ItemSet(s, names=names) for t, s in seeds.items()})
    else:
        items = gb.ItemSet(torch.arange(seeds) if isinstance(seeds, int) else seeds, names=names)
    return gb.ItemSampler(items, batch_size=batch_size, **options)


def ring_batches(
    num_batches: int, fanouts: Sequence[int] = (2, 2), graph: Any = None
) -> IterDataPipe[Any]:
    """Minibatches of two seeds each, sampled from ring20."""
    # Of an odd number of seeds the last is dropped: so there can be none at all.
    seeds = torch.arange(2 * num_batches + 1) % 20
    return seed_batches(seeds, drop_last=True).sample_neighbor(graph or ring20(), list(fanouts))


class HandMade(IterDataPipe[Any]):
    """Minibatches with the input nodes that are given, without any sampler.

    Args:
        input_nodes: Of each minibatch: ids, or ids by type.
        pause_s: Seconds that each of them takes.
    """

    def __init__(self, input_nodes: Sequence[Any], pause_s: float = 0.0) -> None:
        super().__init__()
        self.input_nodes = input_nodes
        self.pause_s = pause_s

    def __iter__(self) -> Iterator[gb.MiniBatch]:
        for nodes in self.input_nodes:
            time.sleep(self.pause_s)
            minibatch = gb.MiniBatch()
            minibatch.input_nodes = nodes
            yield minibatch


class Counted(IterDataPipe[Any]):
    """Passes minibatches on; counts how many were pulled, in all epochs, and notes who pulled them.

    Attributes:
        pulled: How many.
        threads: Identifiers of the threads that asked.
    """

    def __init__(self, datapipe: IterDataPipe[Any]) -> None:
        super().__init__()
        self.datapipe = datapipe
        self.pulled = 0
        self.threads: set[int] = set()

    def __iter__(self) -> Iterator[Any]:
        for minibatch in self.datapipe:
            self.pulled += 1
            self.threads.add(threading.get_ident())
            yield minibatch


_PLANNER = inspect.signature(featsync.Planner).parameters


def planned(
    datapipe: IterDataPipe[Any], store: Any, nodes: Any = None, edges: Any = None, **settings: Any
) -> IterDataPipe[Any]:
    """The two stages behind a pipe; each setting goes to the stage that has it."""
    plan = {name: value for name, value in settings.items() if name in _PLANNER}
    sync = {name: value for name, value in settings.items() if name not in _PLANNER}
    return datapipe.plan_feature(store, nodes, edges, **plan).sync_feature(**sync)


def planned_loader(
    datapipe: IterDataPipe[Any],
    store: Any,
    nodes: Any = None,
    edges: Any = None,
    num_workers: int = 0,
    **settings: Any,
) -> gb.DataLoader:
    """The stock loader of `planned`."""
    return gb.DataLoader(
        planned(datapipe, store, nodes, edges, **settings), num_workers=num_workers
    )


def stock_loader(
    datapipe: IterDataPipe[Any],
    store: Any,
    nodes: Any = None,
    edges: Any = None,
    num_workers: int = 0,
) -> gb.DataLoader:
    """The same with the stock fetcher."""
    return gb.DataLoader(datapipe.fetch_feature(store, nodes, edges), num_workers=num_workers)


def expected(
    minibatch: gb.MiniBatch, store: Any, nodes: Any = None, edges: Any = None
) -> tuple[dict[Any, torch.Tensor], list[dict[Any, torch.Tensor]]]:
    """What the stock fetcher reads for the ids of a minibatch, types without ids left out.

    Args:
        minibatch: As it was sampled.
        store: Of stock features.
        nodes: Node feature keys.
        edges: Edge feature keys.

    Returns:
        Node features, and edge features by layer.
    """
    layers = [
        _read(store, "edge", edges, minibatch.edge_ids(i)) for i in range(minibatch.num_layers())
    ]
    return _read(store, "node", nodes, minibatch.node_ids()), layers


def _read(store: Any, domain: str, keys: Any, ids: Any) -> dict[Any, torch.Tensor]:
    if not keys or ids is None:
        return {}
    if not isinstance(keys, Mapping):
        return {name: store.read(domain, None, name, ids) for name in keys}
    by_type = {gb.etype_tuple_to_str(t) if isinstance(t, tuple) else t: i for t, i in ids.items()}
    return {
        (type_, name): store.read(domain, type_, name, by_type[type_])
        for type_, names in keys.items()
        for name in names
        if by_type.get(type_) is not None
    }


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal in shape, dtype, device and every bit (so NaN equals itself, and -0.0 is not 0.0)."""
    assert (found.shape, found.dtype, found.device) == (wanted.shape, wanted.dtype, wanted.device)
    assert same_bits(found, wanted)


def assert_as_stock(
    minibatch: gb.MiniBatch, store: Any, nodes: Any = None, edges: Any = None
) -> None:
    """A delivered minibatch has exactly the features that stock reads for its ids."""
    node_features, edge_features = expected(minibatch, store, nodes, edges)
    assert_same_features(minibatch.node_features, node_features)
    assert len(minibatch.edge_features) == len(edge_features)
    for found, wanted in zip(minibatch.edge_features, edge_features, strict=True):
        assert_same_features(found, wanted)


def assert_same_features(
    found: Mapping[Any, torch.Tensor], wanted: Mapping[Any, torch.Tensor]
) -> None:
    """The same keys, and behind each the same bits."""
    assert set(found) == set(wanted)
    for name in wanted:
        assert_same(found[name], wanted[name])


def seeds_of(minibatch: gb.MiniBatch) -> Any:
    """Seeds of a minibatch as lists."""
    seeds = minibatch.seed_nodes if minibatch.seeds is None else minibatch.seeds
    if isinstance(seeds, Mapping):
        return {type_: nodes.tolist() for type_, nodes in seeds.items()}
    return seeds.tolist()


def served(worker: str, store: Any) -> Any:
    """A store that a worker can serve: the mover process sees shared memory only."""
    return featsync.share(store) if worker == "process" else store
