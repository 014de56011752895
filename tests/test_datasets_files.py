"""The file index of Debian as a dataset, from handwritten lists."""

from __future__ import annotations

import subprocess
import threading
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest
import torch
import yaml

from featsync.datasets import debian_files, debian_files_builder, folder_of
from featsync.datasets.debian_files import DebianFilesOptions
from featsync.datasets.hashed_words import Bags, hash_rows
from featsync.errors import ConfigError

AMD64 = """\
bin/tool                                                utils/tool
usr/bin/tool-2                                          utils/tool,contrib/admin/other
usr/share/doc/read me.txt                               utils/tool
"""
ALL = """\
usr/bin/tool-2                                          doc/manual
usr/share/doc/Manual-Page_v12.HTML                      doc/manual
usr/share/doc/read me.txt                               utils/tool
"""
FILES = [
    "bin/tool",
    "usr/bin/tool-2",
    "usr/share/doc/Manual-Page_v12.HTML",
    "usr/share/doc/read me.txt",
]
FOLDERS = ["", "bin", "usr", "usr/bin", "usr/share", "usr/share/doc"]
PACKAGES = ["tool", "manual", "other"]
SHIPPED = {(0, "tool"), (1, "tool"), (1, "other"), (1, "manual"), (2, "manual"), (3, "tool")}


@pytest.fixture
def lists(tmp_path):
    (tmp_path / "amd64.txt").write_text(AMD64)
    (tmp_path / "all.txt").write_text(ALL)
    return [tmp_path / "amd64.txt", tmp_path / "all.txt"]


def save_plainly(topology, path):
    torch.save(vars(topology), path)


def edges_of(topology, name):
    offset = topology["node_type_offset"].tolist()
    first = {kind: offset[number] for kind, number in topology["node_type_to_id"].items()}
    source, _, destination = name.split(":")
    of_type = topology["type_per_edge"] == topology["edge_type_to_id"][name]
    ends = torch.repeat_interleave(
        torch.arange(len(topology["indptr"]) - 1), topology["indptr"].diff()
    )
    sources = topology["indices"][of_type] - first[source]
    return set(zip(sources.tolist(), (ends[of_type] - first[destination]).tolist(), strict=True))


def test_the_graph_has_every_file_folder_and_package_once(lists, tmp_path):
    folder = tmp_path / "built"

    debian_files.build(folder, save_plainly, width=8, lists=lists)

    graph = torch.load(folder / "preprocessed" / "fused_csc_sampling_graph.pt")
    assert graph["node_type_offset"].tolist() == [0, 4, 10, 13]
    assert graph["edge_attributes"] == {}
    ships = edges_of(graph, "package:ships:file")
    # Packages are numbered as they come, and those of one file come in no special order.
    names = packages_by_number(folder)
    assert {(file, names[package]) for package, file in ships} == SHIPPED
    contains = {(FOLDERS.index(FILES[file].rpartition("/")[0]), file) for file in range(4)}
    assert edges_of(graph, "folder:contains:file") == contains
    parents = {(0, 1), (0, 2), (2, 3), (2, 4), (4, 5)}
    assert edges_of(graph, "folder:parent_of:folder") == parents
    for name, reverse in {
        "package:ships:file": "file:shipped_by:package",
        "folder:contains:file": "file:in:folder",
        "folder:parent_of:folder": "folder:child_of:folder",
    }.items():
        mirrored = {(b, a) for a, b in edges_of(graph, name)}
        assert edges_of(graph, reverse) == mirrored


def packages_by_number(folder):
    """Recognise the packages by their features."""
    rows = np.load(folder / "preprocessed" / "package-feat.npy")
    expected = {name: by_hand([[name]], rows.shape[1])[0] for name in PACKAGES}
    return [next(n for n in PACKAGES if np.array_equal(expected[n], row)) for row in rows]


def by_hand(words, width):
    hashes = [[crc32(word.encode()) for word in of] for of in words]
    lengths = np.array([len(of) for of in hashes])
    return hash_rows([Bags(lengths, np.array([h for of in hashes for h in of]))], width)


@pytest.mark.parametrize("block", [1, 3, 1000])
def test_features_are_the_parts_of_names(lists, tmp_path, monkeypatch, block):
    monkeypatch.setattr(debian_files_builder, "_BLOCK_FILES", block)

    debian_files.build(tmp_path / "built", save_plainly, width=8, lists=lists)

    files = np.load(tmp_path / "built" / "preprocessed" / "file-feat.npy", mmap_mode="r+")
    words = [["tool"], ["tool", "2"], ["manual", "page", "v", "12", "html"], ["read", "me", "txt"]]
    assert files.dtype == np.float32
    np.testing.assert_array_equal(files, by_hand(words, 8))
    folders = np.load(tmp_path / "built" / "preprocessed" / "folder-feat.npy")
    names = [[], ["bin"], ["usr"], ["bin"], ["share"], ["doc"]]
    np.testing.assert_array_equal(folders, by_hand(names, 8))


def test_labels_are_sections(lists, tmp_path):
    debian_files.build(tmp_path / "built", save_plainly, width=8, lists=lists)

    metadata = yaml.safe_load((tmp_path / "built" / "preprocessed" / "metadata.yaml").read_text())
    found = {task["name"]: labels_of(tmp_path / "built", task) for task in metadata["tasks"]}
    names = packages_by_number(tmp_path / "built")
    sections = {"tool": "utils", "manual": "doc", "other": "admin"}
    classes = sorted(sections.values())
    assert {
        names[node]: classes[label] for node, label in found["node_classification"].items()
    } == sections
    first = found["file_classification"]
    assert [classes[first[file]] for file in (0, 2, 3)] == ["utils", "doc", "utils"]
    assert classes[first[1]] in classes  # three packages ship it


def labels_of(folder, task):
    labels = {}
    for part in ("train_set", "validation_set", "test_set"):
        (of_type,) = task[part]
        seeds, values = (np.load(folder / data["path"]) for data in of_type["data"])
        labels.update(zip(seeds.tolist(), values.tolist(), strict=True))
    return labels


def test_a_limit_stops_early(lists, tmp_path):
    debian_files.build(tmp_path / "built", save_plainly, limit=2, width=8, lists=lists)

    assert np.load(tmp_path / "built" / "preprocessed" / "file-feat.npy").shape == (2, 8)


def test_a_folder_is_built_once_and_never_mixed_up(lists, tmp_path, monkeypatch):
    monkeypatch.setattr(debian_files, "_find_lists", lambda: lists)
    folder = str(tmp_path / "built")
    spec = {"debian-files": {"folder": folder, "width": 8}}

    assert folder_of(spec, save_plainly) == tmp_path / "built"
    monkeypatch.setattr(debian_files, "_find_lists", lambda: pytest.fail("built twice"))
    assert folder_of(spec, save_plainly) == tmp_path / "built"
    with pytest.raises(ConfigError, match=r"built with .*8.*asked for; name another folder"):
        debian_files.ensure(DebianFilesOptions(folder=folder, width=9), save_plainly)


def test_a_foreign_folder_is_left_alone(tmp_path):
    with pytest.raises(ConfigError, match="something else"):
        debian_files.ensure(DebianFilesOptions(folder=str(tmp_path)), save_plainly)


def test_a_build_that_failed_leaves_no_folder_and_the_next_one_works(lists, tmp_path):
    def fail(topology, path):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        debian_files.build(tmp_path / "built", fail, width=8, lists=lists)
    assert not (tmp_path / "built").exists()
    debian_files.build(tmp_path / "built", save_plainly, width=8, lists=lists)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.txt", "amd64.txt", "built"]


def test_without_the_index_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=""))

    with pytest.raises(ConfigError, match="apt-get install apt-file && apt-file update"):
        debian_files.build(tmp_path / "built", save_plainly)

    assert not (tmp_path / "built").exists()


def test_without_apt_the_error_says_so(tmp_path, monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)

    with pytest.raises(ConfigError, match="no apt on this machine"):
        debian_files.build(tmp_path / "built", save_plainly)


def test_lists_of_updates_are_not_taken(monkeypatch):
    found = "bookworm main /a b_Contents-all.lz4\nbookworm-updates main /c\nbookworm contrib /d\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=found))

    assert [str(path) for path in debian_files._find_lists()] == ["/a b_Contents-all.lz4"]


@pytest.mark.dgl
def test_graphbolt_opens_the_folder(lists, tmp_path):
    gb = pytest.importorskip("dgl.graphbolt")

    def save(topology, path):
        graph = gb.fused_csc_sampling_graph(
            topology.indptr,
            topology.indices,
            topology.node_type_offset,
            topology.type_per_edge,
            topology.node_type_to_id,
            topology.edge_type_to_id,
        )
        torch.save(graph, path)

    debian_files.build(tmp_path / "built", save, width=8, lists=lists)

    # Twice, and with its own check for changes: it must not want to preprocess anything.
    for _ in range(2):
        dataset = gb.OnDiskDataset(str(tmp_path / "built")).load()
    assert dataset.graph.num_nodes == {"file": 4, "folder": 6, "package": 3}
    assert dataset.tasks[0].metadata == {"name": "node_classification", "num_classes": 3}
    assert len(dataset.tasks[1].train_set) == 2
    feature = dataset.feature.read("node", "file", "feat", torch.tensor([2]))
    expected = by_hand([["manual", "page", "v", "12", "html"]], 8)
    np.testing.assert_array_equal(feature.numpy(), expected)


def test_who_asks_during_a_build_waits_and_does_not_build_again(lists, tmp_path, monkeypatch):
    monkeypatch.setattr(debian_files, "_find_lists", lambda: lists)
    options = DebianFilesOptions(folder=str(tmp_path / "new" / "built"), width=8)
    saved, answers = [], []
    second = threading.Thread(
        target=lambda: answers.append(debian_files.ensure(options, lambda *_: saved.append(2)))
    )

    def save(topology, path):
        second.start()
        second.join(0.2)  # it must not get anywhere while this build goes on
        saved.append(len(answers))
        save_plainly(topology, path)

    answers_first = debian_files.ensure(options, save)
    second.join(30)

    assert saved == [0]
    assert answers == [answers_first]
