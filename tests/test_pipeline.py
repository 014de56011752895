"""From configuration to dataloader: names become stages, wrong names become errors."""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import featsync
from featsync import allocator, config
from featsync.errors import ConfigError

pytestmark = pytest.mark.dgl

SAMPLE = {"sample_neighbor": {"fanouts": [3, 3]}}
FETCH = {"fetch_feature": {"node_feature_keys": ["feat", "mapped"]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from support.folders import homogeneous_folder

    return homogeneous_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def typed_folder(tmp_path_factory):
    from support.folders import heterogeneous_folder

    return heterogeneous_folder(tmp_path_factory.mktemp("shop"))


def settings(folder, *stages, **changes):
    return {"dataset": {"path": str(folder)}, "batch_size": 32, "stages": list(stages), **changes}


def check_all(loader, pipeline, dataset):
    from featsync.bench.check_rows import RowCheck, check_minibatch
    from featsync.feature_keys import feature_keys

    keys = feature_keys(config.parse(pipeline))
    checks = [check_minibatch(one, dataset.features, keys) for one in loader]
    return len(checks), sum(checks, RowCheck())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stock_stages_deliver_what_the_tables_hold(folder, num_workers):
    from featsync.loading import load_dataset

    edges = {"fetch_feature": {**FETCH["fetch_feature"], "edge_feature_keys": ["weight"]}}
    pipeline = settings(folder, SAMPLE, edges, num_workers=num_workers)
    dataset = load_dataset(config.parse(pipeline))

    count, rows = check_all(featsync.build(pipeline, dataset=dataset), pipeline, dataset)

    assert count == 4
    assert rows.checked > 1000
    assert rows.wrong == 0


def test_stages_of_featsync_take_the_place_of_the_stock_one(folder):
    from featsync.loading import load_dataset

    planned = {"plan_feature": FETCH["fetch_feature"]}
    pipeline = settings(folder, SAMPLE, planned, {"sync_feature": None})
    dataset = load_dataset(config.parse(pipeline))

    count, rows = check_all(featsync.build(pipeline, dataset=dataset), pipeline, dataset)

    assert (count, rows.wrong) == (4, 0)


def test_heterogeneous_seeds_and_features_are_typed(typed_folder):
    from featsync.loading import load_dataset

    keys = {"user": ["feat"], "item": ["feat"]}
    fetch = {"node_feature_keys": keys, "edge_feature_keys": {"user:buys:item": ["weight"]}}
    pipeline = settings(typed_folder, SAMPLE, {"fetch_feature": fetch})
    dataset = load_dataset(config.parse(pipeline))

    minibatch = next(iter(featsync.build(pipeline, dataset=dataset)))
    count, rows = check_all(featsync.build(pipeline, dataset=dataset), pipeline, dataset)

    assert set(minibatch.seeds) == {"user"}
    assert (count, rows.wrong) == (2, 0)


def test_link_prediction_samples_negatives_as_an_ordinary_stage(folder):
    negatives = {"sample_uniform_negative": {"negative_ratio": 2}}
    pipeline = settings(folder, negatives, SAMPLE, FETCH, task="link_prediction")

    minibatch = next(iter(featsync.build(pipeline)))

    assert minibatch.compacted_seeds.shape == (96, 2)
    assert minibatch.labels.sum() == 32


def test_a_split_is_chosen_and_only_training_is_shuffled(folder):
    pipeline = settings(folder, SAMPLE, FETCH, seed=3)

    seeds = {
        split: torch.cat([one.seeds for one in featsync.build(pipeline, split=split)])
        for split in ("train", "valid", "test")
    }
    again = torch.cat([one.seeds for one in featsync.build(pipeline)])

    assert torch.equal(seeds["valid"], torch.arange(120, 160))
    assert torch.equal(seeds["test"], torch.arange(160, 200))
    assert not torch.equal(seeds["train"], torch.arange(120))
    assert torch.equal(seeds["train"].sort()[0], torch.arange(120))
    assert torch.equal(seeds["train"], again)


def test_a_mapped_table_works_in_fortran_order_and_is_not_written(folder, tmp_path):
    from featsync.ondisk import open_folder

    file = folder / "preprocessed" / "mapped.npy"
    open_folder(str(folder), "node_classification")
    original = np.load(file)
    np.save(file, np.asfortranarray(original))
    before = file.read_bytes()
    file.chmod(0o444)

    _, store, _, _ = open_folder(str(folder), "node_classification")
    rows = store.read("node", None, "mapped", torch.tensor([5, 0, 5]))

    assert torch.equal(rows, torch.from_numpy(original[[5, 0, 5]]))
    assert store.read("node", None, "mapped").stride() == (1, len(original))
    with pytest.raises(ConfigError, match="in_memory: true"):
        store.update("node", None, "mapped", rows, torch.tensor([1, 2, 3]))
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("stages", "parts"),
    [
        ([{"sample_neighbour": {}}], ["stages[0]", "Did you mean 'sample_neighbor'?"]),
        (
            [SAMPLE, {"plan_feature": {"lookahed": 1}}],
            ["stages[1].plan_feature.lookahed", "Did you mean 'lookahead'?"],
        ),
        (
            [SAMPLE, {"plan_feature": {"retention": "windw"}}],
            ["stages[1].plan_feature", "plan_feature.retention", "Did you mean 'window'?"],
        ),
        ([{"sample_neighbor": {}}], ["stages[0].sample_neighbor.fanouts is missing"]),
        ([{"sample_neighbor": {"fanouts": ["ten"]}}], ["stages[0].sample_neighbor", "'ten'"]),
        (
            [{"sample_neighbor": {"fanouts": [3], "graph": 1}}],
            ["stages[0].sample_neighbor.graph", "leave it out"],
        ),
        ([SAMPLE, {"save_to_disk": {}}], ["stages[1]", "'save_to_disk' is not known"]),
        (
            [SAMPLE, {"fetch_feature": {"node_feature_keys": ["faet"]}}],
            ["feature = 'node/None/faet'", "Did you mean 'node/None/feat'?"],
        ),
        (
            [SAMPLE, {"fetch_feature": {"node_feature_keys": {"user": ["feat"]}}}],
            ["homogeneous", "write `[feat]`"],
        ),
        (
            [SAMPLE, {"fetch_feature": {"node_feature_keys": "feat"}}],
            ["stages[1].fetch_feature.node_feature_keys = 'feat'", "list of names"],
        ),
    ],
)
def test_a_wrong_stage_is_an_error_that_says_where_and_what_is_meant(folder, stages, parts):
    with pytest.raises(ConfigError) as caught:
        featsync.build(config.parse(settings(folder, *stages), "x.yaml"))

    assert str(caught.value).startswith("x.yaml: ")
    for part in parts:
        assert part in str(caught.value)


def test_list_keys_on_a_heterogeneous_graph_say_how_to_write_them(typed_folder):
    pipeline = settings(typed_folder, SAMPLE, {"fetch_feature": {"node_feature_keys": ["feat"]}})

    with pytest.raises(ConfigError, match=r"heterogeneous; write `\{type: \[feat\]\}`"):
        featsync.build(pipeline)


PROJECT = Path(__file__).parent.parent
SHIPPED = sorted((PROJECT / "pipelines").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configurations_name_stages_and_features_that_there_are(path, monkeypatch):
    monkeypatch.syspath_prepend(PROJECT)
    importlib.import_module("pipelines.all_to_all")  # registers the stage of one of them
    from featsync.feature_keys import feature_keys
    from featsync.pipeline import bind_stages

    loaded = config.load(path)

    assert [stage.name for stage in bind_stages(loaded)]
    assert feature_keys(loaded)


def test_splits_tasks_ranks_and_folders_that_are_not_there_are_named(folder, tmp_path):
    pipeline = settings(folder, SAMPLE, FETCH)

    with pytest.raises(ConfigError, match="Did you mean 'valid'"):
        featsync.build(pipeline, split="validation")
    with pytest.raises(ConfigError, match="rank = 1, but this process is rank 0"):
        featsync.build(pipeline, rank=1)
    with pytest.raises(ConfigError, match=r"metadata\.yaml is not there"):
        featsync.build(settings(tmp_path, SAMPLE, FETCH))


def test_fanouts_by_edge_type_are_given_as_tensors(typed_folder):
    by_type = {"sample_neighbor": {"fanouts": [[2, 1]]}}

    minibatch = next(iter(featsync.build(settings(typed_folder, by_type))))

    sampled = minibatch.sampled_subgraphs[0].sampled_csc
    assert sampled["item:bought_by:user"].indptr.diff().max() <= 2


def test_the_kept_allocator_is_asked_for_by_the_names_glibc_knows(monkeypatch):
    calls = []
    fake = SimpleNamespace(mallopt=lambda option, value: calls.append((option, value)) or 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)

    allocator.keep_memory()

    assert calls == [(-4, 0), (-1, -1)]


def test_another_c_library_is_an_error(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())

    with pytest.raises(ConfigError, match="glibc"):
        allocator.keep_memory()
