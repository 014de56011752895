"""Errors reach the user as they are: cases 8 and 11, and bad input."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import dgl.graphbolt as gb
import pytest
import torch

import featsync
from featsync.errors import CapacityError, ConfigError, FeatureChangedError, FeatureError
from featsync.workers import WORKERS
from support.graphs import (
    HETERO_NODES,
    HandMade,
    assert_as_stock,
    end_loader_workers,
    hetero3,
    hetero_store,
    planned,
    planned_loader,
    ring_batches,
    ring_store,
    seed_batches,
    seeds_of,
    served,
    store_of,
)

pytestmark = pytest.mark.dgl

PROJECT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def no_worker_is_left():
    yield
    end_loader_workers()


def until_error(loader, store, error, match):
    """Seeds of the minibatches, all of them right, that come before the error."""
    seeds = []

    def epoch():
        for minibatch in loader:
            assert_as_stock(minibatch, store, ["x"])
            seeds.append(seeds_of(minibatch))

    with pytest.raises(error, match=match):
        epoch()
    return seeds


# Case 8: errors reach the user


class FailsAt:
    """A transform that raises at the minibatch of one seed, while it is armed."""

    def __init__(self, seed):
        self.seed = seed
        self.is_armed = True

    def __call__(self, minibatch):
        if self.is_armed and self.seed in minibatch.seed_nodes:
            raise ArithmeticError(f"seed {self.seed} is cursed")
        return minibatch


@pytest.mark.parametrize("worker", WORKERS)
def test_an_error_upstream_comes_in_its_turn_and_the_next_epoch_is_whole(worker):
    """Case 8: it is raised as it was, after the minibatches before it, none of them twice."""
    fails = FailsAt(12)
    store = served(worker, ring_store())
    source = ring_batches(10).transform(fails)
    loader = planned_loader(source, store, ["x"], worker=worker, lookahead=4)

    for _ in range(2):
        seeds = until_error(loader, store, ArithmeticError, "seed 12 is cursed")
        assert seeds == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]

    fails.is_armed = False
    assert [seeds_of(minibatch) for minibatch in loader] == [[i, i + 1] for i in range(0, 20, 2)]


def test_an_error_in_a_loader_worker_keeps_its_type():
    """Case 8: with two workers, minibatches of both come before it, each once."""
    store = ring_store()
    source = ring_batches(10).transform(FailsAt(6))
    loader = planned_loader(source, store, ["x"], num_workers=2)

    first = until_error(loader, store, ArithmeticError, "seed 6 is cursed")
    again = until_error(loader, store, ArithmeticError, "seed 6 is cursed")

    assert first == again
    assert len({tuple(seeds) for seeds in first}) == len(first) > 0


def die_at_seed_6(minibatch):
    if 6 in minibatch.seed_nodes:
        os._exit(9)
    return minibatch


@pytest.mark.timeout(60)
def test_a_loader_worker_that_dies_is_an_error_now_and_in_the_next_epoch():
    """Case 8: exit code 9; no old minibatch comes, and nobody waits."""
    store = ring_store()
    loader = planned_loader(ring_batches(10).transform(die_at_seed_6), store, ["x"], num_workers=2)

    first = until_error(loader, store, RuntimeError, "exited unexpectedly")
    again = until_error(loader, store, RuntimeError, "exited unexpectedly")

    for seeds in (first, again):
        assert [6, 7] not in seeds
        assert len({tuple(pair) for pair in seeds}) == len(seeds)


class CursedError(Exception):
    """An error that can be watched."""


@pytest.mark.parametrize("lookahead", [1, 4])
@pytest.mark.parametrize("worker", WORKERS)
def test_an_error_that_was_handled_is_gone_without_the_garbage_collector(worker, lookahead):
    """Case 8: what it holds can be what others wait for.

    Where a loader worker dies while the trainer takes a tensor from another one, the error's
    frames hold that connection. Until it closes, the other worker waits, and with it the trainer in
    its next epoch.
    """
    seen = []

    def curse(minibatch):
        if 6 in minibatch.seed_nodes:
            error = CursedError("of seed 6")
            seen.append(weakref.ref(error))
            try:
                raise error
            finally:
                del error
        return minibatch

    store = served(worker, ring_store())
    loader = planned_loader(
        ring_batches(10).transform(curse), store, ["x"], worker=worker, lookahead=lookahead
    )
    gc.disable()
    try:
        until_error(loader, store, CursedError, "of seed 6")
        (error,) = seen
        assert error() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("worker", WORKERS)
def test_a_row_outside_the_table_comes_in_its_turn_and_the_next_epoch_starts_anew(worker):
    """Case 8: a table of 10 rows for 20 nodes."""
    store = served(worker, ring_store(x=torch.arange(10.0).reshape(10, 1)))
    good, bad = torch.tensor([3, 9]), torch.tensor([4, 13])
    loader = planned_loader(HandMade([good, good, bad, good]), store, ["x"], worker=worker)

    for _ in range(2):
        delivered = []
        with pytest.raises(FeatureError, match="id 13 is outside its table of 10 rows"):
            delivered.extend(minibatch.node_features["x"].tolist() for minibatch in loader)
        # list.extend keeps what came before the error.
        assert delivered == [[[3.0], [9.0]]] * 2


class Stubborn(gb.Feature):
    """A feature with a read of its own, which fails at one id."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def read(self, ids=None):
        if ids is not None and 17 in ids:
            raise ArithmeticError("17 cannot be read")
        return self.table if ids is None else self.table[ids]

    def size(self):
        return self.table.shape[1:]


@pytest.mark.parametrize("worker", [name for name in WORKERS if name != "process"])
def test_the_error_of_a_features_own_read_keeps_its_type(worker):
    """Case 8: raised on the worker's thread, seen in the loop."""
    store = store_of({("node", None, "x"): Stubborn(torch.arange(20.0).reshape(20, 1))})
    ids = [torch.tensor([1, 2]), torch.tensor([17]), torch.tensor([3])]
    loader = planned_loader(HandMade(ids), store, ["x"], worker=worker)
    delivered = []

    with pytest.raises(ArithmeticError, match="17 cannot be read"):
        delivered.extend(minibatch.node_features["x"].tolist() for minibatch in loader)

    assert delivered == [[[1.0], [2.0]]]


# Case 11: DGL and torch do not match

# In one interpreter that has torch, forked for each way in which DGL can be broken.
_BROKEN_HOSTS = """
import json, os, sys, warnings
import torch

def hide(*names):
    sys.modules.update(dict.fromkeys(names))

def other_torch():
    torch.__version__ = "2.9.1"

WAYS = {
    "no DGL": lambda: hide("dgl"),
    "torch": other_torch,
    "torchdata": lambda: hide("torchdata.datapipes", "torchdata.datapipes.iter"),
    "pydantic": lambda: hide("pydantic"),
    "pandas": lambda: hide("pandas"),
    "yaml": lambda: hide("yaml"),
}

def attempt(action):
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None

def look():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import featsync
        import featsync.retention, featsync.segment, featsync.world, featsync.workers
    return {
        "warned": [str(w.message) for w in caught if "DGL" in str(w.message)],
        "errors": [attempt(lambda: getattr(featsync, n)) for n in ("Planner", "Planner", "share")],
    }

for name, break_it in WAYS.items():
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        break_it()
        print(json.dumps([name, look()]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def broken_hosts():
    """What a user sees, by what is broken."""
    done = subprocess.run(
        [sys.executable, "-c", _BROKEN_HOSTS],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    found = (line for line in done.stdout.splitlines() if line.startswith('["'))
    return dict(json.loads(line) for line in found)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ("no DGL", "DGL is not installed"),
        ("torch", "torch 2.2.1"),
        ("torchdata", "torchdata 0.7.1"),
        ("pydantic", "it needs pydantic"),
        ("pandas", "it needs pandas"),
        ("yaml", "it needs yaml"),
    ],
)
def test_a_host_that_cannot_be_used_is_explained_in_one_message(broken_hosts, broken, named):
    """Case 11: what is installed, what is supported, what to do; the core imports all the same."""
    found = broken_hosts[broken]

    for kind, message in found["errors"]:
        assert kind == "HostError"
        assert named in message
        assert "Installed: dgl" in message
        assert "2.0.0, 2.0.1, 2.1.0 to 2.1.2, 2.2.0 or 2.2.1" in message
        assert "pip install 'featsync[dgl]'" in message


@pytest.mark.parametrize("broken", ["torch", "torchdata", "pydantic", "pandas", "yaml"])
def test_importing_featsync_warns_once_where_dgl_is_there_and_broken(broken_hosts, broken):
    """Case 11: the stages will be missing, and the import says so."""
    assert len(broken_hosts[broken]["warned"]) == 1


def test_importing_featsync_is_silent_where_there_is_no_dgl(broken_hosts):
    """Case 11: the core alone is normal use."""
    assert broken_hosts["no DGL"]["warned"] == []


def test_the_extra_pins_a_torch_that_dgl_was_built_for():
    """Case 11: and all that DGL 2.1 imports without declaring it."""
    text = (PROJECT / "pyproject.toml").read_text()
    extra = re.search(r"^dgl = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)[1]
    pins = dict(re.findall(r'"([a-z]+)==([0-9.]+)"', extra))
    libraries = Path(gb.__file__).parent.glob("libgraphbolt_pytorch_*.so")
    built_for = {path.stem.rpartition("_")[2] for path in libraries}

    assert pins["dgl"] == "2.1.0"
    assert pins["torch"] in built_for
    assert pins["torchdata"] == "0.7.1"
    assert '"numpy<2"' in extra
    for needed in ("pandas", "pydantic", "PyYAML"):
        assert f'"{needed}' in text


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
    store = store_of({("node", None, "x"): Stubborn(torch.ones(20, 1))})
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
