"""Configuration files: what is accepted, and that every error says where and what is meant."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from featsync import config
from featsync.errors import ConfigError

GOOD = {
    "dataset": "debian",
    "batch_size": 512,
    "stages": [{"sample_neighbor": {"fanouts": [10, 10]}}, {"fetch_feature": None}],
}


def write(folder: Path, text: str) -> Path:
    path = folder / "pipeline.yaml"
    path.write_text(text)
    return path


def test_a_file_becomes_settings_and_stages_in_order(tmp_path):
    path = write(
        tmp_path,
        """
        dataset: {debian: {width: 512, heterogeneous: true}}
        stages:
          - sample_neighbor: {fanouts: [10, 10]}
          - my_stage:
        """,
    )

    loaded = config.load(path)

    assert loaded.dataset == {"debian": {"width": 512, "heterogeneous": True}}
    assert [stage.name for stage in loaded.stages] == ["sample_neighbor", "my_stage"]
    assert loaded.stages[0].arguments == {"fanouts": [10, 10]}
    assert loaded.stages[1].arguments == {}
    assert (loaded.batch_size, loaded.num_workers, loaded.shuffle) == (1024, 0, True)
    assert (loaded.task, loaded.allocator) == ("node_classification", "default")
    assert (loaded.source, loaded.name) == (str(path), "pipeline")


def test_settings_survive_pickling_with_their_source():
    original = config.parse(GOOD, "some/file.yaml")

    copied = pickle.loads(pickle.dumps(original))

    assert copied == original
    assert copied.source == "some/file.yaml"


@pytest.mark.parametrize(
    "dataset",
    [
        "debian",
        "debian-files",
        "synthetic",
        {"debian": {"width": 8}},
        {"debian-files": {}},
        {"synthetic": {"nodes": 20, "edges": 20}},
        {"path": "folder"},
    ],
)
def test_all_forms_of_a_dataset_are_accepted(dataset):
    assert config.parse({**GOOD, "dataset": dataset}).dataset == dataset


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"batchsize": 3}, ["batchsize", "num_workers", "Did you mean 'batch_size'?"]),
        ({"batch_size": 0}, ["batch_size = 0", "greater than or equal to 1"]),
        ({"batch_size": "512"}, ["batch_size = '512'", "valid integer"]),
        ({"batch_size": True}, ["batch_size = True", "valid integer"]),
        ({"shuffle": "no"}, ["shuffle = 'no'", "valid boolean"]),
        ({"allocator": "kepe"}, ["allocator = 'kepe'", "default, keep", "Did you mean 'keep'?"]),
        ({"task": "node"}, ["task = 'node'", "link_prediction, node_classification"]),
        ({"dataset": "debain"}, ["dataset = 'debain'", "Did you mean 'debian'?"]),
        ({"dataset": {"debian": {"widht": 1}}}, ["dataset.debian = 'widht'", "mean 'width'?"]),
        ({"dataset": {"synthetic": {"nodes": 0}}}, ["dataset.synthetic.nodes = 0", "equal to 1"]),
        ({"dataset": {"debian": 3}}, ["dataset.debian = 3", "mapping"]),
        ({"dataset": "path"}, ["dataset.path = None", "folder"]),
        ({"dataset": {"debian": {}, "path": "x"}}, ["dataset has 2 keys", "exactly one"]),
        ({"dataset": {"path": 3}}, ["dataset.path = 3", "folder"]),
        ({"stages": []}, ["stages = []", "at least 1 item"]),
        ({"stages": {"fetch_feature": None}}, ["stages = {", "valid list"]),
        ({"stages": ["fetch_feature"]}, ["stages[0]", "`- fetch_feature: {}`"]),
        ({"stages": [{"a": {}, "b": {}}]}, ["stages[0] has 2 keys (a, b)"]),
        ({"stages": [{"a": [1]}]}, ["stages[0].a = [1]", "mapping"]),
        ({"stages": [{"a": {1: 2}}]}, ["stages[0].a has the key 1"]),
    ],
)
def test_an_error_says_file_place_value_and_what_is_allowed(change, parts):
    with pytest.raises(ConfigError) as caught:
        config.parse({**GOOD, **change}, "x.yaml")

    message = str(caught.value)
    assert message.startswith("x.yaml: ")
    for part in parts:
        assert part in message
    assert "pydantic" not in message


def test_all_wrong_keys_are_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        config.parse({**GOOD, "num_worker": 1, "seeds": 1})

    assert len(str(caught.value).splitlines()) == 2


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match="stages is missing"):
        config.parse({"dataset": "debian"})


def test_settings_can_be_replaced_one_by_one(tmp_path):
    path = write(
        tmp_path, "dataset: {debian: {width: 8}}\nnum_workers: 0\nstages: [{fetch_feature: {}}]\n"
    )

    loaded = config.load(path, ["num_workers=2", "dataset.debian.heterogeneous=true"])

    assert loaded.num_workers == 2
    assert loaded.dataset == {"debian": {"width": 8, "heterogeneous": True}}
    with pytest.raises(ConfigError, match="Did you mean 'num_workers'"):
        config.load(path, ["num_worker=2"])
    with pytest.raises(ConfigError, match="write key=value"):
        config.load(path, ["num_workers"])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- a\n- b\n", "the top level"),
        ("dataset: [unclosed\n", "not valid YAML"),
        ("dataset: debian\ndataset: path\n", "'dataset' is given twice, in lines 1 and 2"),
        ("dataset: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
        ("dataset: !!python/name:os.system\n", "not valid YAML"),
    ],
)
def test_text_that_is_no_configuration_is_refused_with_the_file_named(tmp_path, text, part):
    path = write(tmp_path, text)

    with pytest.raises(ConfigError, match=re.escape(part)) as caught:
        config.load(path)

    assert str(path) in str(caught.value)


def test_a_missing_file_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml cannot be read"):
        config.load(tmp_path / "absent.yaml")


def test_configuration_needs_neither_dgl_nor_torchdata():
    code = (
        "import sys; sys.modules['dgl'] = sys.modules['torchdata'] = None;"
        "import featsync.config as c; c.parse({'dataset': 'debian', 'stages': [{'a': None}]})"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
