"""The bundled Debian graph: its facts, and that its two forms are the same graph."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from featsync.datasets import debian, load
from featsync.datasets.debian import EDGE_COLUMNS, RELATIONS
from featsync.datasets.graph_data import ORIGINAL_EDGE_ID


@pytest.fixture(scope="module")
def flat():
    return load("debian", task="link_prediction")


@pytest.fixture(scope="module")
def typed():
    spec = {"debian": {"width": 16, "heterogeneous": True}}
    return load(spec, task="link_prediction")


def destinations(graph):
    return torch.repeat_interleave(torch.arange(graph.num_nodes), graph.indptr.diff())


def test_the_file_is_small():
    assert debian.FILE.stat().st_size < 4 << 20


def test_size_and_classes(flat):
    assert flat.num_nodes == 63_681
    assert flat.num_classes == 58
    assert 2 * 330_000 < flat.num_edges < 2 * 350_000
    labels = torch.cat([split.labels for split in flat.splits.values()])
    counts = torch.bincount(labels)
    assert len(labels) == 63_681
    assert len(counts) == 58
    assert counts.min() > 0
    assert counts.max() / len(labels) == pytest.approx(0.105, abs=0.001)


def test_a_known_package_is_what_it_is():
    index = debian.read_index()
    ids = {name: number for number, name in enumerate(index.names)}
    sources, targets, _ = index.links["depends"]

    needs = {index.names[target] for target in targets[sources == ids["git"]]}

    assert index.names == sorted(index.names)
    assert index.section_names[index.sections[ids["git"]]] == "vcs"
    assert {"libc6", "perl", "git-man"} <= needs


def test_shapes_and_types(flat):
    features = flat.features["node", None, "feat"]
    edges = flat.features["edge", None, "relation"]

    assert flat.indptr.dtype == flat.indices.dtype == torch.int64
    assert (features.shape, features.dtype) == ((63_681, 128), torch.float32)
    assert (edges.shape, edges.dtype) == ((flat.num_edges, len(EDGE_COLUMNS)), torch.float32)
    assert not flat.is_heterogeneous
    assert flat.type_per_edge is flat.node_type_offset is None


def test_features_have_no_gaps_and_are_the_same_again(flat):
    features = flat.features["node", None, "feat"]

    again = load("debian").features["node", None, "feat"]

    assert torch.isfinite(features).all()
    assert torch.equal(features, again)
    norms = features.norm(dim=1)
    assert torch.all((norms == 0) | ((norms - 128**0.5).abs() < 1e-3))
    assert (norms == 0).float().mean() < 0.01


def test_every_edge_has_its_reverse_with_the_same_feature(flat):
    relation = flat.features["edge", None, "relation"]
    original = flat.edge_attributes[ORIGINAL_EDGE_ID]
    half = flat.num_edges // 2
    ends = torch.empty(flat.num_edges, 2, dtype=torch.int64)
    ends[original] = torch.stack([flat.indices, destinations(flat)], dim=1)

    assert torch.equal(ends[:half], ends[half:].flip(1))
    assert torch.equal(relation[:half, :5], relation[half:, :5])
    assert relation[:half, 5].sum() == 0
    assert relation[half:, 5].sum() == half
    assert torch.all(relation[:, :4].sum(dim=1) == 1)


def edges_by_type(graph):
    """Edges of each type as a list of (source, destination), counted per type, in id order."""
    offset = graph.node_type_offset.tolist()
    original = graph.edge_attributes[ORIGINAL_EDGE_ID]
    ends = destinations(graph)
    edges = {}
    for name, number in graph.edge_type_to_id.items():
        source, _, destination = name.split(":")
        of_type = graph.type_per_edge == number
        rows = torch.empty(int(of_type.sum()), 2, dtype=torch.int64)
        rows[original[of_type]] = torch.stack(
            [
                graph.indices[of_type] - offset[graph.node_type_to_id[source]],
                ends[of_type] - offset[graph.node_type_to_id[destination]],
            ],
            dim=1,
        )
        edges[name] = rows
    return edges


def test_both_forms_have_the_same_edges_with_the_same_features(flat, typed):
    original = flat.edge_attributes[ORIGINAL_EDGE_ID]
    flat_rows = torch.cat(
        [
            torch.stack([flat.indices, destinations(flat)], dim=1).float(),
            flat.features["edge", None, "relation"][original],
        ],
        dim=1,
    )
    parts = []
    for name, ends in edges_by_type(typed).items():
        if name.split(":")[0] == name.split(":")[2]:
            parts.append(torch.cat([ends.float(), typed.features["edge", name, "relation"]], dim=1))
    typed_rows = torch.cat(parts)

    def ordered(rows):
        # One number an edge: ids below 2**16 each, then the feature bits.
        bits = (rows[:, 2:].long() << torch.arange(len(EDGE_COLUMNS))).sum(dim=1)
        return ((rows[:, 0].long() << 16 | rows[:, 1].long()) << 6 | bits).sort().values

    assert torch.equal(ordered(flat_rows), ordered(typed_rows))


def test_reverse_types_mirror_their_types(typed):
    edges = edges_by_type(typed)

    mirrors = {f"package:{name}:package": f"package:reverse_{name}:package" for name in RELATIONS}
    mirrors["maintainer:maintains:package"] = "package:maintained_by:maintainer"
    mirrors["tag:describes:package"] = "package:described_by:tag"
    assert set(edges) == set(mirrors) | set(mirrors.values())
    for name, mirror in mirrors.items():
        assert torch.equal(edges[name], edges[mirror].flip(1))


def test_a_group_has_the_mean_row_of_its_packages(typed):
    packages = typed.features["node", "package", "feat"]
    edges = edges_by_type(typed)

    for kind, relation in (("tag", "described_by"), ("maintainer", "maintained_by")):
        features = typed.features["node", kind, "feat"]
        of_group = edges[f"package:{relation}:{kind}"]
        counts = Counter(of_group[:, 1].tolist())
        for group in (0, len(features) // 2, len(features) - 1):
            members = of_group[of_group[:, 1] == group, 0]
            assert len(members) == counts[group] > 0
            torch.testing.assert_close(features[group], packages[members].mean(dim=0))
        assert torch.isfinite(features).all()


def test_splits_are_disjoint_and_both_forms_have_the_same(flat, typed):
    seeds = torch.cat([split.seeds for split in flat.splits.values()])

    assert sorted(seeds.tolist()) == list(range(63_681))
    assert [len(flat.splits[part].seeds) for part in ("train", "valid", "test")] == [
        38209,
        12736,
        12736,
    ]
    for part, split in flat.splits.items():
        assert torch.equal(split.seeds, typed.splits[part].seeds["package"])
        assert torch.equal(split.labels, typed.splits[part].labels["package"])
        assert torch.equal(
            split.labels, torch.from_numpy(debian.read_index().sections)[split.seeds]
        )


def test_pairs_are_edges(flat, typed):
    def codes(pairs):
        return (pairs[:, 0] << 16 | pairs[:, 1]).numpy()

    everything = codes(torch.stack([flat.indices, destinations(flat)], dim=1))
    dependencies = codes(edges_by_type(typed)["package:depends:package"])
    for part, split in flat.splits.items():
        assert split.pairs.shape == (len(split.seeds), 2)
        assert np.isin(codes(split.pairs), everything).all()
        typed_pairs = typed.splits[part].pairs["package:depends:package"]
        assert np.isin(codes(typed_pairs), dependencies).all()
        assert len(np.unique(codes(typed_pairs))) == len(typed_pairs)


def test_node_classification_has_no_pairs():
    data = load({"debian": {"width": 4}})

    assert all(split.pairs is None for split in data.splits.values())
    assert data.features["node", None, "feat"].shape == (63_681, 4)
