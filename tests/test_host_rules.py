"""Facts about GraphBolt 2.1 that featsync leans on: they fail here first when DGL changes."""

from __future__ import annotations

import os
from pathlib import Path

import dgl.graphbolt as gb
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterDataPipe
from torch.utils.data.graph import traverse_dps

from support.graphs import (
    HETERO_NODES,
    HandMade,
    hetero3,
    hetero_store,
    ring20,
    ring_batches,
    ring_store,
    seed_batches,
    stock_loader,
)
from support.loader_workers import note_process

pytestmark = pytest.mark.dgl


def stages(pipe):
    """All stages of a pipe."""
    found = []
    levels = [traverse_dps(pipe)]
    while levels:
        for stage, above in levels.pop().values():
            found.append(stage)
            levels.append(above)
    return found


# The worker cut
class OwnFetcher(gb.FeatureFetcher):
    """A subclass of the marker."""


@pytest.mark.parametrize(("fetcher", "is_cut"), [(gb.FeatureFetcher, True), (OwnFetcher, False)])
def test_the_worker_cut_is_found_by_exact_class(fetcher, is_cut):
    source = ring_batches(4).transform(note_process)
    loader = gb.DataLoader(fetcher(source, ring_store(), ["x"]), num_workers=2)

    minibatches = list(loader)

    assert {minibatch.is_in_worker for minibatch in minibatches} == {is_cut}
    assert (os.getpid() in {minibatch.sampled_in for minibatch in minibatches}) != is_cut


def test_a_fetcher_without_keys_is_a_cut_and_reads_nothing():
    class Untouchable:
        def read(self, *_):
            raise AssertionError("read")

    source = ring_batches(4).transform(note_process)
    loader = gb.DataLoader(source.fetch_feature(Untouchable()), num_workers=2)

    for minibatch in loader:
        assert minibatch.is_in_worker
        assert minibatch.node_features == {}
        assert minibatch.edge_features == [{}, {}]


def test_a_stage_behind_the_cut_runs_in_the_main_process():
    pipe = ring_batches(4).fetch_feature(ring_store()).transform(note_process)

    for minibatch in gb.DataLoader(pipe, num_workers=2):
        assert minibatch.sampled_in == os.getpid()
        assert not minibatch.is_in_worker


def test_two_cuts_nest_workers_and_fail():
    pipe = ring_batches(4).fetch_feature(ring_store(), ["x"]).fetch_feature(ring_store(), ["x"])

    with pytest.raises(AssertionError, match="daemonic processes"):
        list(gb.DataLoader(pipe, num_workers=2))


def test_a_loader_is_a_torch_loader_of_its_pipe_and_takes_any_stage():
    pipe = ring_batches(4).fetch_feature(ring_store(), ["x"])
    loader = gb.DataLoader(pipe)

    assert isinstance(loader, torch.utils.data.DataLoader)
    assert pipe in stages(loader.dataset)
    assert isinstance(pipe, IterDataPipe)


def test_a_plain_item_sampler_is_given_a_filter_that_splits_by_rank(monkeypatch):
    plain = gb.DataLoader(ring_batches(4).fetch_feature(ring_store()))
    items = gb.ItemSet(torch.arange(8), names="seed_nodes")
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    split = gb.DistributedItemSampler(items, batch_size=2)

    for loader, is_filtered in ((plain, True), (gb.DataLoader(split), False)):
        names = {type(stage).__name__ for stage in stages(loader.dataset)}
        assert ("ShardingFilterIterDataPipe" in names) == is_filtered


def test_two_pipes_of_one_sampler_cannot_both_get_loaders_that_run():
    """Why every loader here gets a pipe of its own: the first loader rewrote the sampler's."""
    sampled = ring_batches(4)
    first = gb.DataLoader(sampled.fetch_feature(ring_store()))
    second = gb.DataLoader(sampled.fetch_feature(ring_store()))

    with pytest.raises(RuntimeError, match="Sharding twice"):
        list(second)
    assert first is not second


# Feature stages
def test_a_second_fetcher_throws_the_first_ones_features_away():
    pipe = (
        ring_batches(4).fetch_feature(ring_store(), ["x"]).fetch_feature(ring_store(), None, ["w"])
    )

    for minibatch in gb.DataLoader(pipe):
        assert minibatch.node_features == {}
        assert [set(layer) for layer in minibatch.edge_features] == [{"w"}, {"w"}]


def test_the_fetcher_sets_features_through_the_minibatchs_own_methods():
    """By which `SyncedMiniBatch` takes the union."""

    class Watched(gb.MiniBatch):
        calls = 0

        def set_node_features(self, node_features):
            Watched.calls += 1
            super().set_node_features(node_features)

        def set_edge_features(self, edge_features):
            Watched.calls += 1
            super().set_edge_features(edge_features)

    def watch(minibatch):
        minibatch.__class__ = Watched
        return minibatch

    list(ring_batches(3).transform(watch).fetch_feature(ring_store(), ["x"]))

    assert Watched.calls == 6


def test_a_type_that_is_never_a_source_is_a_key_error_in_stock():
    seeds = seed_batches({"item": torch.tensor([0, 1])}).sample_neighbor(hetero3(), [2])

    with pytest.raises(KeyError, match="item"):
        list(stock_loader(seeds, hetero_store(), HETERO_NODES))


def test_edges_without_ids_give_nothing_and_no_word_in_stock():
    source = ring_batches(2, graph=ring20(edge_ids=False))

    for minibatch in stock_loader(source, ring_store(), None, ["w"]):
        assert minibatch.edge_ids(0) is None
        assert minibatch.edge_features == [{}, {}]


def test_a_tuple_as_edge_type_is_not_found_in_stock():
    seeds = seed_batches({"item": torch.arange(6)}, batch_size=6).sample_neighbor(hetero3(), [2])
    keys = {("user", "buys", "item"): ["w"]}

    (minibatch,) = list(stock_loader(seeds, hetero_store(), None, keys))

    assert minibatch.edge_features == [{}]
    assert set(minibatch.edge_ids(0)) == {"user:buys:item", "shop:sells:item"}


def test_a_negative_id_wraps_to_the_last_row_in_stock():
    (minibatch,) = list(HandMade([torch.tensor([-1])]).fetch_feature(ring_store(), ["x"]))

    assert minibatch.node_features["x"].tolist() == [[19.0]]


def test_the_table_of_a_feature_is_its_contiguous_tensor_and_an_update_is_seen_by_its_version():
    table = torch.arange(20.0).reshape(20, 1)
    feature = gb.TorchBasedFeature(table)
    version = table._version

    assert feature._tensor is table
    feature.update(torch.ones(2, 1), torch.tensor([3, 4]))
    assert feature._tensor is table
    assert table._version > version
    feature.update(torch.ones(20, 1))
    assert feature._tensor is not table


def test_a_store_keeps_its_features_by_domain_type_and_name():
    store = ring_store()

    assert set(store.keys()) == {("node", None, "x"), ("edge", None, "w")}
    assert store._features["node", None, "x"].read() is store.read("node", None, "x")


def on_disk_store(folder):
    np.save(folder / "x.npy", np.ones((20, 3), np.float32))
    spec = gb.OnDiskFeatureData(
        domain="node", name="x", format="numpy", path=str(folder / "x.npy"), in_memory=False
    )
    return gb.TorchBasedFeatureStore([spec])


def test_the_domain_of_an_on_disk_feature_is_an_enum_that_equals_its_name(tmp_path):
    ((domain, _, _),) = on_disk_store(tmp_path).keys()

    assert domain == "node"
    assert type(domain) is not str
    assert domain.value == "node"


def test_a_table_on_disk_is_mapped_for_writing(tmp_path):
    store = on_disk_store(tmp_path)

    lines = Path("/proc/self/maps").read_text().splitlines()
    (line,) = [line for line in lines if line.endswith(str(tmp_path / "x.npy"))]
    assert line.split()[1] == "rw-s"
    assert store.read("node", None, "x").shape == (20, 3)


# Minibatches
def test_a_minibatch_takes_attributes_of_our_own_through_the_stages_and_the_worker_cut():
    source = ring_batches(4).transform(note_process)

    for minibatch in stock_loader(source, ring_store(), ["x"], num_workers=1):
        assert minibatch.sampled_in != os.getpid()


def test_a_minibatch_has_its_ids_where_the_planner_looks():
    (minibatch, *_) = list(ring_batches(2))

    assert minibatch.node_ids() is minibatch.input_nodes
    assert minibatch.num_layers() == 2
    for layer in range(2):
        edges = minibatch.edge_ids(layer)
        assert edges is minibatch.sampled_subgraphs[layer].original_edge_ids
    assert gb.MiniBatch().num_layers() == 0
    assert gb.MiniBatch().node_ids() is None
