"""Kinds of tables and policies: they change where rows come from, and never what they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import featsync
from featsync.retention import RETENTION
from featsync.workers import WORKERS
from support.graphs import (
    assert_as_stock,
    planned_loader,
    ring_batches,
    ring_store,
    seeds_of,
    store_of,
)

pytestmark = pytest.mark.dgl


# Tables and workers
def in_memory(folder, tables):
    return store_of(tables)


def mapped(folder, tables):
    features = {}
    for i, (key, table) in enumerate(tables.items()):
        np.save(folder / f"{i}.npy", table.numpy())
        features[key] = torch.from_numpy(np.load(folder / f"{i}.npy", mmap_mode="r+"))
    return store_of(features)


def shared(folder, tables):
    return featsync.share(store_of(tables))


KINDS = {"in memory": in_memory, "mapped": mapped, "shared": shared}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("worker", WORKERS)
def test_every_worker_serves_every_kind_of_table(worker, kind, num_workers, tmp_path):
    if worker == "process" and kind == "in memory":
        pytest.skip("refused, as tested elsewhere: the helper cannot see private memory")
    tables = {
        ("node", None, "x"): torch.randn(20, 7, generator=torch.Generator().manual_seed(0)),
        ("edge", None, "w"): torch.arange(80, dtype=torch.int16).reshape(40, 2),
    }
    plain = store_of(tables)
    store = KINDS[kind](tmp_path, tables)
    loader = planned_loader(
        ring_batches(6), store, ["x"], ["w"], num_workers=num_workers, worker=worker, device_cache=6
    )

    for _ in range(2):
        seeds = []
        for minibatch in loader:
            assert_as_stock(minibatch, plain, ["x"], ["w"])
            seeds.append(seeds_of(minibatch))
        assert len(seeds) == 6


@pytest.mark.parametrize("lookahead", [1, 2, 5, 11])
@pytest.mark.parametrize("device_cache", [1, 7, 0.5, 1.0, "100B"])
@pytest.mark.parametrize("retention", RETENTION)
def test_a_policy_changes_sources_and_never_values(retention, device_cache, lookahead):
    store = ring_store()
    loader = planned_loader(
        ring_batches(10),
        store,
        ["x"],
        ["w"],
        retention=retention,
        device_cache=device_cache,
        lookahead=lookahead,
    )
    stats = featsync.stats(loader)

    for _ in range(2):
        wanted = 0
        for minibatch in loader:
            assert_as_stock(minibatch, store, ["x"], ["w"])
            wanted += len(minibatch.input_nodes) + sum(
                len(minibatch.edge_ids(layer)) for layer in range(2)
            )
        assert stats.rows == wanted
        assert stats.bytes == {source: 4 * stats_rows(stats, source) for source in stats.bytes}
        if retention == "none":
            assert stats.hit_rate == 0
        stats.reset()


def stats_rows(stats, source):
    return sum(feature.rows[source] for feature in stats.features.values())


@pytest.mark.parametrize("retention", [name for name in RETENTION if name != "none"])
def test_a_cache_as_large_as_the_table_serves_every_row_of_the_second_epoch(retention):
    """What a cache holds belongs to the feature: it survives epochs, and other loaders use it."""
    store = ring_store()
    settings = {"retention": retention, "device_cache": 1.0}
    first = planned_loader(ring_batches(10), store, ["x"], **settings)
    second = planned_loader(ring_batches(10), store, ["x"], **settings)
    list(first)

    for loader in (first, second):
        stats = featsync.stats(loader)
        stats.reset()
        for minibatch in loader:
            assert_as_stock(minibatch, store, ["x"])
        assert stats.hit_rate == 1.0


@pytest.mark.parametrize("kind", ["mapped", "shared"])
def test_loaders_with_different_workers_use_one_cache(kind, tmp_path):
    """What one worker put into it another one reads, and moves on."""
    tables = {("node", None, "x"): torch.arange(60.0).reshape(20, 3)}
    store, plain = KINDS[kind](tmp_path, tables), store_of(tables)
    settings = {"device_cache": 1.0}
    list(planned_loader(ring_batches(10), store, ["x"], worker="thread", **settings))

    for worker in WORKERS:
        loader = planned_loader(ring_batches(10), store, ["x"], worker=worker, **settings)
        for minibatch in loader:
            assert_as_stock(minibatch, plain, ["x"])
        assert featsync.stats(loader).hit_rate == 1.0


def test_an_update_between_epochs_is_seen_although_rows_were_cached():
    store = ring_store()
    loader = planned_loader(ring_batches(10), store, ["x"], device_cache=1.0)
    list(loader)

    for value, ids in (
        (torch.full((2, 1), -3.0), torch.tensor([0, 19])),
        (torch.ones(20, 1), None),
    ):
        store.update("node", None, "x", value, ids)
        for _ in range(2):
            for minibatch in loader:
                assert_as_stock(minibatch, store, ["x"])
