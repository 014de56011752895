"""The `debian` dataset: the packages of Debian 12 and how they depend on each other.

It is made from the package index of Debian 12 "bookworm" for amd64: the main archive with its
updates and its security archive, 63,681 packages, as ``apt-cache dumpavail`` prints it. The task is
to tell the section of a package (58 classes, the largest has 10.5 % of the packages) from the words
of its description, its tags and its neighbours. GraphSAGE with two layers (hidden 64, dropout 0.2,
Adam at 0.01, batches of 1024, fanouts 10-10, stock GraphBolt) reaches 0.81 validation accuracy in
8 epochs at width 128, and 0.84 at width 512.

``debian.xz`` is built by `featsync.datasets.debian_builder`, whose docstring has the rules, and
lies in the package: nothing is downloaded. It holds facts taken from the index and no text of it:
package names, section names, who depends on whom, which packages share a maintainer (as a number),
and 32-bit hashes of words and tags. The index is published by the Debian project; the software
that it lists is free under the licence of each package and no part of it is included.

**Homogeneous form.** Node ``i`` is package ``i`` by name. Each dependency is two edges, one each
way, so that a package hears from what it needs and from what needs it: edge ``e`` goes from a
package to one it names, edge ``e + E/2`` back. Edge feature ``relation``: `EDGE_COLUMNS`.

**Heterogeneous form.** Node types ``package``, ``maintainer``, ``tag``. Edge types
``package:depends:package`` (from a package to one it names) and likewise ``pre_depends``,
``recommends``, ``suggests``; each has its reverse, ``package:reverse_depends:package`` and so on;
``maintainer:maintains:package``, ``tag:describes:package`` and their reverses
``package:maintained_by:maintainer`` and ``package:described_by:tag``. The edges between packages
have the feature ``relation``, with the same columns.

Node feature ``feat``, both forms: hashed words and tags (`featsync.datasets.hashed_words`), of the
width asked for; for maintainers and tags the mean of their packages' rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from featsync.datasets import csc, packed, splits
from featsync.datasets.graph_data import (
    FeatureKey,
    GraphData,
    Split,
    Task,
    Topology,
)
from featsync.datasets.hashed_words import Bags, hash_rows
from featsync.datasets.options import Options

FILE = Path(__file__).with_name("debian.xz")
RELATIONS = ("depends", "pre_depends", "recommends", "suggests")
EDGE_COLUMNS = (*RELATIONS, "versioned", "reverse")
PAIRS_EDGE_TYPE = "package:depends:package"

Integers = npt.NDArray[np.int64]


class DebianOptions(Options):
    """Options of the `debian` dataset.

    Attributes:
        width: Columns of the node features.
        heterogeneous: Whether maintainers and tags are nodes and relations are edge types.
    """

    width: int = Field(default=128, ge=1, le=65536)
    heterogeneous: bool = False


@dataclass(frozen=True, eq=False)
class PackageIndex:
    """What the file holds, unpacked.

    Attributes:
        names: Package names, ascending.
        section_names: Names of the classes.
        sections: ``(packages,)``, the class of each package.
        maintainers: ``(packages,)``, the maintainer of each package, as a number.
        words: Hashes of the words of each package's description.
        tag_lengths: ``(packages,)``, the number of tags of each package.
        tags: ``(tag_lengths.sum(),)``, the tags of the packages, as numbers.
        tag_hashes: ``(tags,)``, the hash of each tag.
        links: By relation, three arrays ``(edges,)``: from which package, to which, and whether a
            version is asked for.
    """

    names: list[str]
    section_names: list[str]
    sections: Integers
    maintainers: Integers
    words: Bags
    tag_lengths: Integers
    tags: Integers
    tag_hashes: Integers
    links: Mapping[str, tuple[Integers, Integers, Integers]]


def read_index(path: Path = FILE) -> PackageIndex:
    """Read a file that the builder wrote; takes about a tenth of a second."""
    arrays = packed.load(path)
    words = packed.from_deltas(arrays["word_lengths"], arrays["word_deltas"])
    return PackageIndex(
        names=_lines(arrays["names"]),
        section_names=_lines(arrays["section_names"]),
        sections=arrays["sections"],
        maintainers=arrays["maintainers"],
        words=Bags(arrays["word_lengths"], arrays["word_hashes"][words]),
        tag_lengths=arrays["tag_lengths"],
        tags=packed.from_deltas(arrays["tag_lengths"], arrays["tag_deltas"]),
        tag_hashes=arrays["tag_hashes"],
        links={relation: _links(arrays, relation) for relation in RELATIONS},
    )


def load(options: DebianOptions, task: Task) -> GraphData:
    """Load the bundled packages as a graph."""
    return make_graph(read_index(), options, task)


def make_graph(index: PackageIndex, options: DebianOptions, task: Task) -> GraphData:
    """Make a graph of a package index, in the form that the options ask for."""
    tags = Bags(index.tag_lengths, index.tag_hashes[index.tags])
    features = torch.from_numpy(hash_rows([index.words, tags], options.width))
    make = _heterogeneous if options.heterogeneous else _homogeneous
    return make(index, features, task)


def _homogeneous(index: PackageIndex, packages: Tensor, task: Task) -> GraphData:
    forward = [np.concatenate(ends) for ends in zip(*index.links.values(), strict=True)]
    sources, destinations, _ = forward
    edges = (
        np.concatenate([sources, destinations]),
        np.concatenate([destinations, sources]),
    )
    topology = csc.homogeneous(len(index.sections), edges)
    rows = [_edge_rows(index, name, is_reverse) for is_reverse in (0, 1) for name in RELATIONS]
    nodes = splits.seeds_and_labels(index.sections)
    pairs = _pairs(topology, None, task, len(index.sections))
    return GraphData(
        **vars(topology),
        name="debian",
        features={("node", None, "feat"): packages, ("edge", None, "relation"): torch.cat(rows)},
        splits={part: Split(*nodes[part], pairs.get(part)) for part in nodes},
        num_classes=len(index.section_names),
    )


def _heterogeneous(index: PackageIndex, packages: Tensor, task: Task) -> GraphData:
    num_nodes = {
        "package": len(index.sections),
        "maintainer": int(index.maintainers.max(initial=-1)) + 1,
        "tag": len(index.tag_hashes),
    }
    everyone = np.arange(num_nodes["package"])
    tagged = np.repeat(everyone, index.tag_lengths)
    edges = {
        "maintainer:maintains:package": (index.maintainers, everyone),
        "package:maintained_by:maintainer": (everyone, index.maintainers),
        "tag:describes:package": (index.tags, tagged),
        "package:described_by:tag": (tagged, index.tags),
    }
    features: dict[FeatureKey, Tensor] = {
        ("node", "package", "feat"): packages,
        ("node", "maintainer", "feat"): _means(packages, edges["package:maintained_by:maintainer"]),
        ("node", "tag", "feat"): _means(packages, edges["package:described_by:tag"]),
    }
    for relation, (sources, destinations, _) in index.links.items():
        forward, back = f"package:{relation}:package", f"package:reverse_{relation}:package"
        edges[forward], edges[back] = (sources, destinations), (destinations, sources)
        features["edge", forward, "relation"] = _edge_rows(index, relation, 0)
        features["edge", back, "relation"] = _edge_rows(index, relation, 1)
    topology = csc.heterogeneous(num_nodes, edges)
    nodes = splits.seeds_and_labels(index.sections)
    pairs = _pairs(topology, PAIRS_EDGE_TYPE, task, num_nodes["package"])
    return GraphData(
        **vars(topology),
        name="debian",
        features=features,
        splits={
            part: Split(
                {"package": seeds},
                {"package": labels},
                {PAIRS_EDGE_TYPE: pairs[part]} if pairs else None,
            )
            for part, (seeds, labels) in nodes.items()
        },
        num_classes=len(index.section_names),
    )


def _pairs(
    topology: Topology, edge_type: str | None, task: Task, num_pairs: int
) -> Mapping[str, Tensor]:
    """As many pairs as there are packages, so that both tasks have equally many minibatches."""
    if task != "link_prediction":
        return {}
    return splits.sample_pairs(topology, edge_type, num_pairs)


def _edge_rows(index: PackageIndex, relation: str, is_reverse: int) -> Tensor:
    versioned = index.links[relation][2]
    rows = np.zeros((len(versioned), len(EDGE_COLUMNS)), dtype=np.float32)
    rows[:, EDGE_COLUMNS.index(relation)] = 1
    rows[:, EDGE_COLUMNS.index("versioned")] = versioned
    rows[:, EDGE_COLUMNS.index("reverse")] = is_reverse
    return torch.from_numpy(rows)


def _means(packages: Tensor, members: tuple[Integers, Integers]) -> Tensor:
    """Mean row of each group's packages; every group has one at least."""
    package_ids, group_ids = map(torch.from_numpy, members)
    counts = torch.bincount(group_ids)
    sums = torch.zeros(len(counts), packages.shape[1])
    step = max(1, (1 << 24) // packages.shape[1])
    for ids, groups in zip(
        torch.split(package_ids, step), torch.split(group_ids, step), strict=True
    ):
        sums.index_add_(0, groups, packages[ids])
    return sums / counts.clamp(min=1).unsqueeze(1)


def _links(arrays: Mapping[str, Integers], relation: str) -> tuple[Integers, Integers, Integers]:
    lengths = arrays[f"{relation}_lengths"]
    sources = np.repeat(np.arange(len(lengths)), lengths)
    destinations = packed.from_deltas(lengths, arrays[f"{relation}_deltas"])
    bits = arrays[f"{relation}_versioned"].astype(np.uint8)
    return sources, destinations, np.unpackbits(bits, count=len(sources)).astype(np.int64)


def _lines(text: Integers) -> list[str]:
    return text.astype(np.uint8).tobytes().decode().split("\n")
