"""Names and options of datasets, as a configuration gives them."""

from __future__ import annotations

import pytest

from featsync.datasets import DATASETS, folder_of, load
from featsync.errors import ConfigError

SMALL = {"nodes": 10, "edges": 20, "width": 2, "classes": 2}


def never(topology, path):
    pytest.fail("nothing is to be built")


@pytest.mark.parametrize("spec", ["synthetic", {"synthetic": None}, {"synthetic": SMALL}])
def test_a_name_alone_means_the_defaults(spec):
    data = load(spec)

    assert data.name == "synthetic"
    assert folder_of(spec, never) is None
    assert data.num_nodes == (10 if spec == {"synthetic": SMALL} else 100_000)


def test_every_dataset_of_the_table_has_documented_options():
    for entry in DATASETS.values():
        assert all(name in (entry.options.__doc__ or "") for name in entry.options.model_fields)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("debain", "dataset = 'debain' is not known; .*debian.* Did you mean 'debian'?"),
        ({"synthetics": {}}, "Did you mean 'synthetic'?"),
        (None, "dataset = None is not understood"),
        ({"debian": {}, "synthetic": {}}, "one name"),
        ({"debian": {"widht": 3}}, "dataset.debian = 'widht' is not known.*Did you mean 'width'?"),
        ({"debian": 512}, "dataset.debian = 512 is not a mapping; it takes width, heterogeneous"),
        ({"debian": {"width": 0}}, "dataset.debian.width = 0 is wrong.*greater than or equal to 1"),
        ({"debian": {"width": "512"}}, "dataset.debian.width = '512' is wrong.*integer"),
        ({"debian": {"heterogeneous": 1}}, "dataset.debian.heterogeneous = 1 is wrong.*boolean"),
        ({"synthetic": {**SMALL, "classes": 11}}, "11 classes need as many nodes.*there are 10"),
        ({"synthetic": {**SMALL, "edges": -1}}, "dataset.synthetic.edges = -1 is wrong"),
        ({"path": "somewhere"}, "dataset path is a folder.*folder_of"),
        ("debian-files", "dataset debian-files is a folder.*folder_of"),
    ],
)
def test_what_is_wrong_is_named(spec, message):
    with pytest.raises(ConfigError, match=message):
        load(spec)


def test_an_unknown_task_is_named():
    with pytest.raises(ConfigError, match=r"task = 'node_clasification' is not known.*Did you"):
        load({"synthetic": SMALL}, task="node_clasification")


def test_a_path_is_a_folder_that_exists(tmp_path):
    assert folder_of({"path": str(tmp_path)}, never) == tmp_path
    for wrong in ({"path": str(tmp_path / "no")}, {"path": 3}, "path"):
        with pytest.raises(ConfigError, match=r"dataset\.path = .* is not a folder"):
            folder_of(wrong, never)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"limit": 0}, "debian-files.limit = 0"), ({"foldr": "x"}, "Did you mean 'folder'?")],
)
def test_options_of_a_folder_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        folder_of({"debian-files": options}, never)
