"""What stages, caches and stores refuse, and in which words."""

from __future__ import annotations

import dgl.graphbolt as gb
import pytest
import torch

import featsync
from featsync.errors import CapacityError, ConfigError, FeatureChangedError
from support.graphs import (
    HETERO_NODES,
    OwnRead,
    assert_as_stock,
    hetero3,
    hetero_store,
    planned,
    planned_loader,
    ring_batches,
    ring_store,
    seed_batches,
    store_of,
)

pytestmark = pytest.mark.dgl


# Bad input
@pytest.mark.parametrize(
    ("nodes", "edges", "facts"),
    [
        (["y"], None, ["node_feature_keys", "'node/None/y'", "Did you mean 'node/None/x'"]),
        (None, ["x"], ["edge_feature_keys", "'edge/None/x'", "edge/None/w"]),
        ({"paper": ["x"]}, None, ["'node/paper/x'", "node/None/x"]),
        ("x", None, ["node_feature_keys = 'x'", "['x']"]),
        (None, "w", ["edge_feature_keys = 'w'", "['w']"]),
    ],
    ids=str,
)
def test_a_feature_that_does_not_exist_is_refused_when_the_stage_is_built(nodes, edges, facts):
    with pytest.raises(ConfigError) as caught:
        ring_batches(2).plan_feature(ring_store(), nodes, edges)

    for fact in facts:
        assert fact in str(caught.value)


def test_a_list_of_keys_on_a_heterogeneous_store_says_which_there_are():
    sampled = seed_batches({"item": torch.arange(6)}).sample_neighbor(hetero3(), [2])

    with pytest.raises(ConfigError, match=r"'node/None/f' is not known; .*node/user/f"):
        sampled.plan_feature(hetero_store(), ["f"])


class KeylessStore:
    """A store that reads and tells nothing."""

    def __init__(self, store):
        self._store = store

    def read(self, domain, type_name, name, ids=None):
        return self._store.read(domain, type_name, name, ids)


def test_a_list_of_keys_on_a_heterogeneous_graph_is_refused():
    for keys, domain in ((["f"], "node"), (["w"], "edge")):
        sampled = seed_batches({"item": torch.arange(6)}).sample_neighbor(hetero3(), [2])
        arguments = {f"{domain}_feature_keys": keys}
        pipe = sampled.plan_feature(KeylessStore(hetero_store()), **arguments).sync_feature()
        with pytest.raises(ConfigError, match=f"{domain}_feature_keys.*heterogeneous.*by type"):
            list(gb.DataLoader(pipe))


def test_keys_by_type_on_a_homogeneous_graph_are_refused():
    for keys, domain in (({"a": ["x"]}, "node"), ({"a:b:c": ["w"]}, "edge")):
        arguments = {f"{domain}_feature_keys": keys}
        pipe = ring_batches(2).plan_feature(KeylessStore(ring_store()), **arguments).sync_feature()
        with pytest.raises(ConfigError, match=f"{domain}_feature_keys.*homogeneous.*a list"):
            list(gb.DataLoader(pipe))


@pytest.mark.parametrize("lookahead", [0, -1, 1.5, True, "2", None])
def test_a_lookahead_that_is_no_whole_number_from_1_on_is_refused(lookahead):
    with pytest.raises(ConfigError, match=r"plan_feature\.lookahead = .*whole number, 1 or more"):
        ring_batches(2).plan_feature(ring_store(), ["x"], lookahead=lookahead)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"retention": "windw"}, r"plan_feature\.retention = 'windw'.*Did you mean 'window'"),
        ({"cache_scope": "hots"}, r"plan_feature\.cache_scope = 'hots'.*Did you mean 'host'"),
        ({"transport": "p2"}, r"sync_feature\.transport = 'p2'.*Did you mean 'p2p'"),
        ({"worker": "thred"}, r"sync_feature\.worker = 'thred'.*Did you mean 'thread'"),
        ({"staleness": -1}, r"sync_feature\.staleness = -1"),
        ({"timeout": 0}, r"sync_feature\.timeout = 0"),
        ({"device": "cuda:99"}, r"sync_feature\.device = 'cuda:99' is not there"),
        ({"device": "gpu"}, r"sync_feature\.device = 'gpu' is not a device"),
        ({"device": "meta"}, r"sync_feature\.device = 'meta'.*not meta"),
        ({"device_cache": -1}, r"plan_feature\.device_cache = -1"),
        ({"device_cache": 1.5}, r"plan_feature\.device_cache = 1\.5"),
        ({"device_cache": "12 apples"}, r"plan_feature\.device_cache = '12 apples'"),
    ],
    ids=str,
)
def test_a_setting_that_is_not_allowed_is_refused_when_the_stage_is_built(settings, said):
    with pytest.raises(ConfigError, match=said):
        planned(ring_batches(2), ring_store(), ["x"], **settings)


@pytest.mark.parametrize(
    ("size", "fact"),
    [(41, "the largest table has 40 rows"), ("1MiB", "all tables together have 240 bytes")],
)
def test_a_cache_larger_than_all_tables_is_refused(size, fact):
    loader = planned_loader(ring_batches(2), ring_store(), ["x"], ["w"], device_cache=size)

    with pytest.raises(ConfigError, match=f"device_cache = {size!r} is larger.*{fact}"):
        list(loader)


def test_a_cache_larger_than_the_memory_is_refused_and_nothing_is_lost(monkeypatch):
    store = ring_store()
    loader = planned_loader(ring_batches(10), store, ["x"], device_cache=10)

    with monkeypatch.context() as patch:
        patch.setattr("featsync.caches.free_bytes", lambda device: 39)
        with pytest.raises(CapacityError, match="node/None/x need 40 bytes on cpu, where 39 are"):
            list(loader)

    assert len(list(loader)) == 10
    for minibatch in loader:
        assert_as_stock(minibatch, store, ["x"])


def test_a_lookahead_beyond_what_a_cache_can_plan_for_is_refused():
    with pytest.raises(ConfigError, match=r"plan_feature\.lookahead = 1000: .*at most 64"):
        ring_batches(2).plan_feature(ring_store(), ["x"], lookahead=1000, device_cache=4)

    assert len(list(planned_loader(ring_batches(2), ring_store(), ["x"], lookahead=1000))) == 2


def test_loaders_that_want_one_cache_otherwise_are_refused():
    store = ring_store()
    first = planned_loader(ring_batches(2), store, ["x"], device_cache=4)
    second = planned_loader(ring_batches(2), store, ["x"], device_cache=5)
    assert len(list(first)) == 2

    with pytest.raises(ConfigError, match="node/None/x is cached already"):
        list(second)

    assert len(list(first)) == 2


def test_a_score_of_another_length_is_refused_with_the_right_shape():
    score = torch.ones(19)
    loader = planned_loader(ring_batches(2), ring_store(), ["x"], device_cache=4, score=score)

    with pytest.raises(ConfigError, match=r"node/None/x has shape \(19,\); it must be \(20,\)"):
        list(loader)


def test_sync_feature_without_plan_feature_is_refused():
    with pytest.raises(ConfigError, match="sync_feature needs plan_feature before it"):
        list(gb.DataLoader(ring_batches(2).sync_feature()))


def test_plan_feature_without_sync_feature_is_refused():
    with pytest.raises(ConfigError, match="plan_feature needs sync_feature behind it"):
        list(gb.DataLoader(ring_batches(2).plan_feature(ring_store(), ["x"])))


def make_anew(minibatch):
    fresh = gb.MiniBatch()
    fresh.input_nodes = minibatch.input_nodes
    return fresh


def test_a_stage_between_the_two_that_drops_the_plan_is_named():
    pipe = ring_batches(2).plan_feature(ring_store(), ["x"]).transform(make_anew).sync_feature()

    with pytest.raises(ConfigError, match="a stage between plan_feature and sync_feature"):
        list(gb.DataLoader(pipe))


def test_stats_of_a_stock_loader_are_refused():
    with pytest.raises(ConfigError, match="no sync_feature stage"):
        featsync.stats(gb.DataLoader(ring_batches(2).fetch_feature(ring_store(), ["x"])))


def test_a_private_table_is_refused_by_the_process_worker_and_says_what_works():
    loader = planned_loader(ring_batches(2), ring_store(), ["x"], worker="process")

    with pytest.raises(ConfigError, match=r"feature node/None/x.*featsync\.share.*\"thread\""):
        list(loader)


def test_a_features_own_read_is_refused_by_the_process_worker():
    store = store_of({("node", None, "x"): OwnRead(torch.ones(20, 1))})
    loader = planned_loader(ring_batches(2), store, ["x"], worker="process")

    with pytest.raises(ConfigError, match=r"feature node/None/x.*\"thread\""):
        list(loader)


@pytest.mark.parametrize("with_ids", [True, False])
def test_a_static_feature_updated_inside_its_loop_is_an_error_and_then_the_new_rows_come(with_ids):
    """No mode is silently stale."""
    store = ring_store()
    loader = planned_loader(ring_batches(10), store, ["x"], device_cache=4)
    value, ids = torch.full((20, 1), 7.0), torch.arange(20) if with_ids else None

    def update_inside():
        for _ in loader:
            store.update("node", None, "x", value, ids)

    with pytest.raises(FeatureChangedError, match="node/None/x was updated inside a loop"):
        update_inside()

    for minibatch in loader:
        assert torch.equal(minibatch.node_features["x"], value[minibatch.input_nodes])


def test_a_type_by_the_wrong_name_is_refused():
    keys = {**HETERO_NODES, "shopp": ["f"]}
    sampled = seed_batches({"item": torch.arange(6)}).sample_neighbor(hetero3(), [2])

    with pytest.raises(ConfigError, match=r"'node/shopp/f' is not known.*Did you mean"):
        sampled.plan_feature(hetero_store(), keys)
