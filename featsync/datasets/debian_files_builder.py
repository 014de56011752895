"""Builds the folder of the `debian-files` dataset, in the form GraphBolt's OnDiskDataset reads.

What is written is the *preprocessed* form, directly: the graph as GraphBolt saves it, features and
splits as ``.npy`` files. Going through the raw form would have every array read, sorted and written
a second time. Files pass by one block at a time; what stays in memory is who is in which folder
and package, as numbers.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from array import array
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import yaml

from featsync.datasets import csc, splits
from featsync.datasets.graph_data import Topology
from featsync.datasets.hashed_words import Bags, hash_rows

Entry = tuple[str, list[str]]
Integers = npt.NDArray[np.int64]

_WORD = re.compile(rb"[A-Za-z]+|[0-9]+")
_BLOCK_FILES = 200_000
_METADATA = Path("preprocessed", "metadata.yaml")
_HASHES = Path("preprocessed", "dataset_hash_value.txt")
_GRAPH = Path("preprocessed", "fused_csc_sampling_graph.pt")
_SET_NAMES = {"train": "train_set", "valid": "validation_set", "test": "test_set"}


class FileTree:
    """Files, folders and packages as numbers, and the links between them.

    Attributes:
        folders: Path of each folder to its number; a folder's parent comes before it.
        parents: Number of each folder's parent; the root, number 0, is its own.
        packages: Name of each package to its number.
        sections: Section of each package.
        folder_of_file: Number of each file's folder.
        shipped_files: Per shipment, the file.
        shipping_packages: Per shipment, the package.
    """

    def __init__(self) -> None:
        self.folders: dict[str, int] = {"": 0}
        self.parents = array("q", [0])
        self.packages: dict[str, int] = {}
        self.sections: list[str] = []
        self.folder_of_file = array("q")
        self.shipped_files = array("q")
        self.shipping_packages = array("q")

    def add(self, path: str, packages: list[str]) -> str:
        """Add a file and give back its name without the folder."""
        folder, _, name = path.rpartition("/")
        number = len(self.folder_of_file)
        self.folder_of_file.append(self._folder(folder))
        for package in dict.fromkeys(packages):
            self.shipped_files.append(number)
            self.shipping_packages.append(self._package(package))
        return name

    def _folder(self, path: str) -> int:
        known = self.folders.get(path)
        if known is not None:
            return known
        parent = self._folder(path.rpartition("/")[0])
        self.parents.append(parent)
        return self.folders.setdefault(path, len(self.folders))

    def _package(self, qualified: str) -> int:
        section, _, name = qualified.rpartition("/")
        known = self.packages.get(name)
        if known is None:
            known = self.packages[name] = len(self.packages)
            self.sections.append(section.rpartition("/")[2] or "unknown")
        return known

    def topology(self) -> Topology:
        """Build the graph, each relation with its reverse."""
        files = np.arange(len(self.folder_of_file))
        folders = np.array(self.folder_of_file, dtype=np.int64)
        children = np.arange(1, len(self.parents))
        parents = np.array(self.parents, dtype=np.int64)[1:]
        shipped = np.array(self.shipped_files, dtype=np.int64)
        shipping = np.array(self.shipping_packages, dtype=np.int64)
        num_nodes = {
            "file": len(files),
            "folder": len(self.folders),
            "package": len(self.packages),
        }
        edges = {
            "folder:contains:file": (folders, files),
            "file:in:folder": (files, folders),
            "folder:parent_of:folder": (parents, children),
            "folder:child_of:folder": (children, parents),
            "package:ships:file": (shipping, shipped),
            "file:shipped_by:package": (shipped, shipping),
        }
        return csc.heterogeneous(num_nodes, edges, keep_edge_ids=False)


def build(
    entries: Iterator[Entry],
    folder: Path,
    width: int,
    limit: int | None,
    save_graph: Callable[[Topology, Path], None],
) -> None:
    """Write the dataset of all `entries`; the folder appears when it is complete.

    Args:
        entries: Path of each file, once, and the packages that ship it, as ``section/package``.
        folder: What to create.
        width: Columns of the node features.
        limit: Recorded, so that `settings_of` can tell.
        save_graph: Writes a graph to a file in the form GraphBolt reads.
    """
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    (unfinished / _METADATA).parent.mkdir(parents=True)
    tree = FileTree()
    _write_file_features(tree, entries, unfinished, width)
    _save_features(unfinished, "folder", [path.rpartition("/")[2] for path in tree.folders], width)
    _save_features(unfinished, "package", list(tree.packages), width)
    tasks = _write_tasks(tree, unfinished)
    save_graph(tree.topology(), unfinished / _GRAPH)
    metadata = {
        "dataset_name": "debian-files",
        "include_original_edge_id": False,
        "graph_topology": {"type": "FusedCSCSamplingGraph", "path": str(_GRAPH)},
        "feature_data": [_feature_entry(type_) for type_ in ("file", "folder", "package")],
        "tasks": tasks,
        "built_with": {"width": width, "limit": limit},
    }
    (unfinished / _METADATA).write_text(yaml.safe_dump(metadata, sort_keys=False))
    (unfinished / _HASHES).write_text(json.dumps(_file_hashes(unfinished, folder), indent=4))
    unfinished.rename(folder)


def settings_of(folder: Path) -> dict[str, Any] | None:
    """Tell with which width and limit a folder was built; ``None`` if it is not such a folder."""
    try:
        metadata = yaml.safe_load((folder / _METADATA).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    settings = metadata.get("built_with") if isinstance(metadata, dict) else None
    return settings if isinstance(settings, dict) else None


def words_of(name: str) -> list[int]:
    """Hash the parts of a name: runs of letters (as one word whatever their case) or digits."""
    parts = _WORD.findall(name.encode("utf-8", "surrogateescape"))
    return [crc32(part.lower()) for part in parts]


def _write_file_features(
    tree: FileTree, entries: Iterator[Entry], folder: Path, width: int
) -> None:
    """Read all files and write their features, of which only a block is ever in memory."""
    with (folder / _feature_path("file")).open("wb") as target:
        target.write(_npy_header(0, width))
        while names := [tree.add(*entry) for entry in islice(entries, _BLOCK_FILES)]:
            target.write(_name_features(names, width).tobytes())
        # The header comes first and has the number of rows, which is known only now.
        target.seek(0)
        target.write(_npy_header(len(tree.folder_of_file), width))


def _npy_header(rows: int, width: int) -> bytes:
    """Head of a version 1.0 ``.npy`` file of float32, 128 bytes long whatever the shape."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {width}), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n"


def _save_features(folder: Path, node_type: str, names: list[str], width: int) -> None:
    np.save(folder / _feature_path(node_type), _name_features(names, width))


def _name_features(names: list[str], width: int) -> npt.NDArray[np.float32]:
    words = [words_of(name) for name in names]
    lengths = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
    hashes = np.fromiter((word for of in words for word in of), dtype=np.int64)
    return hash_rows([Bags(lengths, hashes)], width)


def _write_tasks(tree: FileTree, folder: Path) -> list[dict[str, Any]]:
    names = sorted(set(tree.sections))
    number = {name: position for position, name in enumerate(names)}
    of_package = np.array([number[section] for section in tree.sections], dtype=np.int64)
    shipped = np.array(tree.shipped_files, dtype=np.int64)
    first = np.flatnonzero(np.diff(shipped, prepend=-1))
    of_file = of_package[np.array(tree.shipping_packages, dtype=np.int64)[first]]
    labels = {"node_classification": ("package", of_package)}
    labels["file_classification"] = ("file", of_file)
    return [
        {
            "name": task,
            "num_classes": len(names),
            **_write_sets(folder, task, node_type, of_nodes),
        }
        for task, (node_type, of_nodes) in labels.items()
    ]


def _write_sets(
    folder: Path, task: str, node_type: str, labels: Integers
) -> dict[str, list[dict[str, Any]]]:
    sets = {}
    for part, tensors in splits.seeds_and_labels(labels).items():
        data = []
        for name, tensor in zip(("seed_nodes", "labels"), tensors, strict=True):
            path = Path("preprocessed", f"{task}-{part}-{name}.npy")
            np.save(folder / path, tensor.numpy())
            data.append({"name": name, "format": "numpy", "path": str(path)})
        sets[_SET_NAMES[part]] = [{"type": node_type, "data": data}]
    return sets


def _feature_path(node_type: str) -> Path:
    return Path("preprocessed", f"{node_type}-feat.npy")


def _feature_entry(node_type: str) -> dict[str, Any]:
    return {
        "domain": "node",
        "type": node_type,
        "name": "feat",
        "format": "numpy",
        "in_memory": False,
        "path": str(_feature_path(node_type)),
    }


def _file_hashes(folder: Path, final: Path) -> dict[str, str]:
    """Hash all files as GraphBolt does to see whether a dataset was changed since."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest = hashlib.md5(usedforsecurity=False)
            with path.open("rb") as content:
                while block := content.read(1 << 22):
                    digest.update(block)
            hashes[str(final / path.relative_to(folder))] = digest.hexdigest()
    return hashes
