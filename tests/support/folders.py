"""Small GraphBolt dataset folders, as a user would write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import yaml

NUM_NODES = 200
NUM_EDGES = 2000
NUM_CLASSES = 5


def homogeneous_folder(folder: Path, *, fortran: bool = False) -> Path:
    """Write a graph of 200 nodes with a node feature in memory, one mapped, and an edge feature."""
    generator = np.random.default_rng(0)
    edges = generator.integers(0, NUM_NODES, (NUM_EDGES, 2))
    np.save(folder / "edges.npy", edges.T)
    feature = generator.random((NUM_NODES, 8), dtype=np.float32)
    mapped = generator.random((NUM_NODES, 4), dtype=np.float32)
    np.save(folder / "feat.npy", feature)
    np.save(folder / "mapped.npy", np.asfortranarray(mapped) if fortran else mapped)
    np.save(folder / "weight.npy", generator.random((NUM_EDGES, 3), dtype=np.float32))
    labels = generator.integers(0, NUM_CLASSES, NUM_NODES)
    splits = {"train": (0, 120), "validation": (120, 160), "test": (160, 200)}
    for name, (first, last) in splits.items():
        np.save(folder / f"{name}_seeds.npy", np.arange(first, last))
        np.save(folder / f"{name}_labels.npy", labels[first:last])
        np.save(folder / f"{name}_pairs.npy", edges[first:last])
    metadata = {
        "dataset_name": "tiny",
        "graph": {
            "nodes": [{"num": NUM_NODES}],
            "edges": [{"format": "numpy", "path": "edges.npy"}],
        },
        "feature_data": [
            _feature("node", None, "feat", in_memory=True),
            _feature("node", None, "mapped", in_memory=False),
            _feature("edge", None, "weight", in_memory=True),
        ],
        "tasks": [
            {"name": "node_classification", "num_classes": NUM_CLASSES}
            | _sets(splits, {"seeds": "seeds", "labels": "labels"}),
            {"name": "link_prediction"} | _sets(splits, {"seeds": "pairs"}),
        ],
    }
    (folder / "metadata.yaml").write_text(yaml.safe_dump(metadata))
    return folder


def heterogeneous_folder(folder: Path) -> Path:
    """Write users that buy items: features of both, and of the edges; users are classified."""
    generator = np.random.default_rng(1)
    counts = {"user": 120, "item": 80}
    relations = {"buys": ("user", "item"), "bought_by": ("item", "user")}
    for name, (source, target) in relations.items():
        ends = [generator.integers(0, counts[end], 600) for end in (source, target)]
        np.save(folder / f"{name}.npy", np.stack(ends))
        np.save(folder / f"{name}_weight.npy", generator.random((600, 2), dtype=np.float32))
    for name, count in counts.items():
        np.save(folder / f"{name}_feat.npy", generator.random((count, 6), dtype=np.float32))
    splits = {"train": (0, 60), "validation": (60, 90), "test": (90, 120)}
    labels = generator.integers(0, NUM_CLASSES, counts["user"])
    for name, (first, last) in splits.items():
        np.save(folder / f"{name}_seeds.npy", np.arange(first, last))
        np.save(folder / f"{name}_labels.npy", labels[first:last])
    types = {name: f"{source}:{name}:{target}" for name, (source, target) in relations.items()}
    metadata = {
        "dataset_name": "shop",
        "graph": {
            "nodes": [{"type": name, "num": count} for name, count in counts.items()],
            "edges": [
                {"type": relation, "format": "numpy", "path": f"{name}.npy"}
                for name, relation in types.items()
            ],
        },
        "feature_data": [
            *(_feature("node", name, "feat", in_memory=True) for name in counts),
            *(
                _feature("edge", relation, "weight", in_memory=True, path=f"{name}_weight.npy")
                for name, relation in types.items()
            ),
        ],
        "tasks": [
            {"name": "node_classification", "num_classes": NUM_CLASSES}
            | _sets(splits, {"seeds": "seeds", "labels": "labels"}, "user")
        ],
    }
    (folder / "metadata.yaml").write_text(yaml.safe_dump(metadata))
    return folder


def preprocessed_folder(folder: Path) -> Path:
    """Write that of `homogeneous_folder` and preprocess it once, not in every process."""
    from featsync.ondisk import open_folder  # needs DGL, which writing a folder does not

    path = homogeneous_folder(folder)
    open_folder(str(path), "node_classification")
    return path


def _feature(
    domain: str, type_name: str | None, name: str, *, in_memory: bool, path: str | None = None
) -> dict[str, Any]:
    entry = {"domain": domain, "name": name, "format": "numpy", "in_memory": in_memory}
    entry["path"] = path or (f"{type_name}_{name}.npy" if type_name else f"{name}.npy")
    return entry | ({"type": type_name} if type_name else {})


def _sets(
    splits: dict[str, Any], columns: dict[str, str], type_name: str | None = None
) -> dict[str, Any]:
    sets = {}
    for split in splits:
        data = [
            {"name": name, "format": "numpy", "path": f"{split}_{file}.npy"}
            for name, file in columns.items()
        ]
        sets[f"{split}_set"] = [({"type": type_name} if type_name else {}) | {"data": data}]
    return sets
