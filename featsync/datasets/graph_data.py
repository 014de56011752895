"""`GraphData`, a dataset without any framework: a graph, its features and its splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

# The name under which GraphBolt looks for the ids of sampled edges (its ``ORIGINAL_EDGE_ID``).
ORIGINAL_EDGE_ID = "_ORIGINAL_EDGE_ID"

Task = Literal["node_classification", "link_prediction"]
FeatureKey = tuple[str, str | None, str]


@dataclass(frozen=True, eq=False)
class Split:
    """The items of one part (train, valid or test) of a dataset.

    In a heterogeneous dataset each attribute is a mapping: from node type for seeds and labels,
    from edge type (``source:relation:destination``) for pairs. Ids count per node type there.

    Attributes:
        seeds: ``(seeds,)`` int64, node ids.
        labels: ``(seeds,)`` int64, the class of each seed.
        pairs: ``(pairs, 2)`` int64, source and destination of edges of the graph. ``None`` unless
            the dataset was loaded for link prediction.
    """

    seeds: Tensor | Mapping[str, Tensor]
    labels: Tensor | Mapping[str, Tensor]
    pairs: Tensor | Mapping[str, Tensor] | None = None


@dataclass(frozen=True, eq=False)
class Topology:
    """A graph in CSC form: the edges sorted by destination, then by edge type.

    The attributes are, name for name but for the first, the arguments of GraphBolt's
    ``fused_csc_sampling_graph``.

    Attributes:
        indptr: ``(nodes + 1,)`` int64, where the edges into each node begin.
        indices: ``(edges,)`` int64, the source of each edge. In a heterogeneous graph the nodes of
            all types are numbered through here.
        node_type_offset: ``(node types + 1,)`` int64, the first such number of each node type;
            ``None`` in a homogeneous graph, like all below.
        type_per_edge: ``(edges,)`` uint8, the edge type id of each edge.
        node_type_to_id: Node types, in alphabetical order, to 0, 1, ...
        edge_type_to_id: Edge types (``source:relation:destination``), likewise.
        edge_attributes: Tensors of shape ``(edges,)``. Where there are edge features it has
            `ORIGINAL_EDGE_ID`, int64: the row of each edge in its feature table (in the table of
            its edge type, if heterogeneous).
    """

    indptr: Tensor
    indices: Tensor
    node_type_offset: Tensor | None = None
    type_per_edge: Tensor | None = None
    node_type_to_id: Mapping[str, int] | None = None
    edge_type_to_id: Mapping[str, int] | None = None
    edge_attributes: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, of all types together."""
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        """Number of edges, of all types together."""
        return len(self.indices)

    @property
    def is_heterogeneous(self) -> bool:
        """Whether nodes and edges have types."""
        return self.node_type_to_id is not None


@dataclass(frozen=True, eq=False)
class GraphData(Topology):
    """A graph with its features and its splits; see `Topology` for the graph itself.

    Attributes:
        name: Name of the dataset.
        features: By domain (``"node"`` or ``"edge"``), type (``None`` if homogeneous) and name:
            ``(nodes or edges of that type, width)``.
        splits: By part (``"train"``, ``"valid"``, ``"test"``).
        num_classes: Labels are from 0 to this number, exclusive.
    """

    name: str = ""
    features: Mapping[FeatureKey, Tensor] = field(default_factory=dict)
    splits: Mapping[str, Split] = field(default_factory=dict)
    num_classes: int = 0
