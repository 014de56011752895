"""For the same sampled ids, features equal stock bit for bit: every shipped configuration.

Each configuration runs as it is but for its dataset, in whose place stands a small one with the
same feature keys. Starting ranks is slow, so there is one launch for each number of ranks and
loader workers, with all configurations inside, and one test for each of them.
"""

from __future__ import annotations

import tempfile
import traceback
from pathlib import Path

import dgl.graphbolt as gb
import numpy as np
import pytest
import torch
import torch.distributed as dist

import featsync
from featsync.config import load
from featsync.feature_keys import feature_keys
from featsync.loading import LoadedDataset
from featsync.partitioned_store import partitioned_store, split_nodes
from support.graphs import assert_as_stock, store_of
from support.loader_workers import end_loader_workers, forked_workers
from support.ranks import run_ranks

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]

FOLDER = Path(__file__).parents[1] / "pipelines"
PIPELINES = sorted(
    path.name
    for path in FOLDER.glob("*.yaml")
    if any(stage.name == "plan_feature" for stage in load(path).stages)
)
NUM_NODES = 60  # of each type
NUM_EDGES = 240  # of each relation
NUM_SEEDS = 25


def small_tables(config):
    """A table for each feature that the configuration asks for, of odd widths and dtypes."""
    dtypes = (torch.float32, torch.float16, torch.int16)
    tables = {}
    for i, key in enumerate(feature_keys(config)):
        rows = NUM_NODES if key.domain == "node" else NUM_EDGES
        width, dtype = 3 + 2 * i, dtypes[i % 3]
        start = 1000.0 * i
        values = start + torch.arange(rows * width, dtype=torch.float64) % 2000
        tables[tuple(key)] = values.reshape(rows, width).to(dtype)
    return tables


def small_graph(config):
    """A graph of the node and edge types that the configuration names, seeded."""
    keys = feature_keys(config)
    node_types = sorted({key.type for key in keys if key.domain == "node" and key.type})
    generator = np.random.default_rng(0)
    if not node_types:
        counts = np.bincount(generator.integers(0, NUM_NODES, NUM_EDGES), minlength=NUM_NODES)
        return gb.fused_csc_sampling_graph(
            torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])),
            torch.from_numpy(generator.integers(0, NUM_NODES, NUM_EDGES)),
            edge_attributes={
                gb.ORIGINAL_EDGE_ID: torch.from_numpy(generator.permutation(NUM_EDGES))
            },
        )
    named = {key.type for key in keys if key.domain == "edge"}
    edge_types = sorted(named | {f"{a}:to:{b}" for a in node_types for b in node_types})
    parts = []
    for number, edge_type in enumerate(edge_types):
        source, _, target = edge_type.split(":")
        ends = [
            NUM_NODES * node_types.index(type_) + generator.integers(0, NUM_NODES, NUM_EDGES)
            for type_ in (source, target)
        ]
        parts.append([*ends, np.full(NUM_EDGES, number), generator.permutation(NUM_EDGES)])
    sources, targets, types, ids = np.concatenate(parts, axis=1)
    order = np.lexsort([types, targets])
    counts = np.bincount(targets, minlength=NUM_NODES * len(node_types))
    return gb.fused_csc_sampling_graph(
        torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])),
        torch.from_numpy(sources[order]),
        node_type_offset=torch.arange(len(node_types) + 1) * NUM_NODES,
        type_per_edge=torch.from_numpy(types[order].astype(np.uint8)),
        node_type_to_id={type_: i for i, type_ in enumerate(node_types)},
        edge_type_to_id={type_: i for i, type_ in enumerate(edge_types)},
        edge_attributes={gb.ORIGINAL_EDGE_ID: torch.from_numpy(ids[order])},
    )


def small_items(config):
    """Training seeds with labels, or pairs, as the datasets name them; typed where the graph is."""
    if config.task == "link_prediction":
        pairs = torch.arange(2 * NUM_SEEDS).reshape(NUM_SEEDS, 2)
        return gb.ItemSet((pairs,), names=("seeds",))
    seeds = torch.arange(NUM_SEEDS)
    items = gb.ItemSet((seeds, seeds % 5), names=("seeds", "labels"))
    types = [key.type for key in feature_keys(config) if key.domain == "node" and key.type]
    return gb.ItemSetDict({types[0]: items}) if types else items


def mapped(tables, folder):
    """The tables as stock maps them from disk."""
    features = {}
    for i, (key, table) in enumerate(tables.items()):
        path = Path(folder) / f"{i}.npy"
        np.save(path, table.numpy())
        features[key] = torch.from_numpy(np.load(path, mmap_mode="r+"))
    return store_of(features)


def check_pipeline(name, num_workers, folder):
    """Two epochs of one configuration, each minibatch against the unshared, unmapped tables."""
    config = load(FOLDER / name).model_copy(update={"num_workers": num_workers, "batch_size": 8})
    tables = small_tables(config)
    plain = store_of(tables)
    features = plain
    if "debian-files" in str(config.dataset):
        features = mapped(tables, folder)
    elif config.share:
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        features = featsync.share(plain if is_first else None)
    graph = small_graph(config)
    if config.partition is not None:
        features = partitioned_store(plain, split_nodes(graph, config.partition))
    dataset = LoadedDataset(graph, features, {"train": small_items(config)}, 5)
    loader = featsync.build(config, dataset=dataset)
    arguments = {
        key: value
        for stage in config.stages
        for key, value in stage.arguments.items()
        if key.endswith("_feature_keys")
    }
    nodes, edges = (arguments.get(f"{domain}_feature_keys") for domain in ("node", "edge"))
    for _ in range(2):
        items = []
        for minibatch in loader:
            assert_as_stock(minibatch, plain, nodes, edges)
            items += items_of(minibatch)
        assert sorted(of_all_ranks(items)) == list(range(NUM_SEEDS))


def of_all_ranks(items):
    """The items that the ranks got, together."""
    if not dist.is_initialized():
        return items
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, items)
    assert all(parts)
    return [item for part in parts for item in part]


def items_of(minibatch):
    """Numbers of the training items in a minibatch."""
    seeds = minibatch.seeds
    if isinstance(seeds, dict):
        (seeds,) = seeds.values()
    if seeds.dim() == 2:  # pairs, the sampled negative ones labelled 0
        seeds = seeds[minibatch.labels.bool(), 0] // 2
    return seeds.tolist()


def establish(rank, num_workers):
    """What went wrong with each configuration on this rank, or ``None``."""
    outcomes = {}
    for name in PIPELINES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                with forked_workers():
                    check_pipeline(name, num_workers, folder)
                outcomes[name] = None
            except Exception:  # noqa: BLE001 - reported by the configuration's own test
                outcomes[name] = traceback.format_exc()
            end_loader_workers()
        if dist.is_initialized():
            dist.barrier()
    return outcomes


@pytest.fixture(scope="module", params=[0, 2], ids=["0 workers", "2 workers"])
def num_workers(request):
    return request.param


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def outcomes(request, num_workers):
    """By rank."""
    if request.param == 1:
        return [establish(0, num_workers)]
    return run_ranks(establish, request.param, num_workers, timeout_s=300)


@pytest.mark.timeout(360)
@pytest.mark.parametrize("name", PIPELINES)
def test_every_configuration_delivers_what_stock_would(outcomes, name):
    for rank, found in enumerate(outcomes):
        assert found[name] is None, f"rank {rank}:\n{found[name]}"


def test_there_are_configurations_of_every_kind():
    """Homogeneous and heterogeneous, node and edge features, every worker and policy, pairs."""
    configs = [load(FOLDER / name) for name in PIPELINES]
    keys = [key for config in configs for key in feature_keys(config)]

    assert {(key.domain, key.type is None) for key in keys} == {
        ("node", True),
        ("node", False),
        ("edge", True),
        ("edge", False),
    }
    assert {config.task for config in configs} == {"node_classification", "link_prediction"}
    assert {config.share for config in configs} == {True, False}
