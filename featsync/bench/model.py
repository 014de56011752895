"""GraphSAGE with mean aggregation, on sampled layers of homogeneous and heterogeneous graphs.

Plain torch: the mean over a CSC layer is an ``embedding_bag`` over its neighbours. A homogeneous
graph is one with a single node type and a single relation, both named ``None``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Relation = str | None
NodeType = str | None


@dataclass(frozen=True)
class Shape:
    """What decides a model's parameters.

    Attributes:
        node_widths: Width of the input of each node type; 0 for a type without features.
        edge_widths: Width of the edge features of each relation that has some.
        relations: All relations, ``source:name:target``, or ``(None,)``.
        num_layers: Sampled layers.
        num_outputs: Width of the output.
        hidden: Width between layers.
    """

    node_widths: Mapping[NodeType, int]
    edge_widths: Mapping[Relation, int]
    relations: tuple[Relation, ...]
    num_layers: int
    num_outputs: int
    hidden: int = 64


class GraphSage(nn.Module):
    """One `SageLayer` for each sampled layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        # A type without features gets one constant input: what is learned is its bias.
        widths = {name: width or 1 for name, width in shape.node_widths.items()}
        layers = []
        for index in range(shape.num_layers):
            is_last = index == shape.num_layers - 1
            outputs = shape.num_outputs if is_last else shape.hidden
            layers.append(SageLayer(widths, shape.edge_widths, shape.relations, outputs))
            widths = dict.fromkeys(widths, outputs)
        self.layers = nn.ModuleList(layers)

    def forward(
        self,
        subgraphs: Sequence[Any],
        nodes: Mapping[NodeType, Tensor],
        edges: Sequence[Mapping[Relation, Tensor]],
    ) -> dict[NodeType, Tensor]:
        """Compute the representation of the seeds.

        Args:
            subgraphs: The sampled layers of a minibatch, outermost first.
            nodes: ``(num_nodes, width)`` float32 for each type, of the outermost layer's sources.
            edges: For each layer, ``(num_edges, width)`` float32 of the relations that have some.

        Returns:
            ``(num_seeds, num_outputs)`` for each type.
        """
        hidden = dict(nodes)
        last = len(self.layers) - 1
        for index, (layer, subgraph) in enumerate(zip(self.layers, subgraphs, strict=True)):
            hidden = layer(subgraph, hidden, edges[index] if edges else {})
            if index != last:
                hidden = {name: functional.relu(value) for name, value in hidden.items()}
        return hidden


class SageLayer(nn.Module):
    """Own row, plus for each relation the mean over the neighbours and over their edges."""

    def __init__(
        self,
        node_widths: Mapping[NodeType, int],
        edge_widths: Mapping[Relation, int],
        relations: Sequence[Relation],
        num_outputs: int,
    ) -> None:
        super().__init__()
        # Names of types and relations may hold what module names must not, hence positions.
        self._types = list(node_widths)
        self._relations = list(relations)
        self._edge_relations = [relation for relation in relations if edge_widths.get(relation)]
        self.own = nn.ModuleList(nn.Linear(w, num_outputs) for w in node_widths.values())
        self.neighbour = nn.ModuleList(
            nn.Linear(node_widths[source_of(relation)], num_outputs, bias=False)
            for relation in relations
        )
        self.edge = nn.ModuleList(
            nn.Linear(edge_widths[relation], num_outputs, bias=False)
            for relation in self._edge_relations
        )

    def forward(
        self,
        subgraph: Any,
        nodes: Mapping[NodeType, Tensor],
        edges: Mapping[Relation, Tensor],
    ) -> dict[NodeType, Tensor]:
        """Compute ``(num_targets, num_outputs)`` for each type; targets are the first sources."""
        targets = _by_type(subgraph.original_column_node_ids)
        layers = _by_type(subgraph.sampled_csc)
        output = {
            name: linear(nodes[name][: len(targets[name])])
            for name, linear in zip(self._types, self.own, strict=True)
            if name in targets and name in nodes
        }
        for relation, linear in zip(self._relations, self.neighbour, strict=True):
            source, target = source_of(relation), target_of(relation)
            if relation in layers and source in nodes and target in output:
                mean = neighbour_mean(nodes[source], layers[relation])
                output[target] = output[target] + linear(mean)
        for relation, linear in zip(self._edge_relations, self.edge, strict=True):
            if relation in layers and relation in edges and target_of(relation) in output:
                mean = edge_mean(edges[relation], layers[relation])
                output[target_of(relation)] = output[target_of(relation)] + linear(mean)
        return output


def neighbour_mean(rows: Tensor, layer: Any) -> Tensor:
    """Average ``rows`` over the sources of each target, ``(num_targets, width)``; 0 without any."""
    offsets = layer.indptr.to(layer.indices.dtype)
    if len(rows) == 0:
        return rows.new_zeros(len(offsets) - 1, rows.shape[1])
    return functional.embedding_bag(
        layer.indices, rows, offsets, mode="mean", include_last_offset=True
    )


def edge_mean(rows: Tensor, layer: Any) -> Tensor:
    """Average edge rows over the edges into each target, ``(num_targets, width)``."""
    if len(rows) == 0:
        return rows.new_zeros(len(layer.indptr) - 1, rows.shape[1])
    positions = torch.arange(len(rows), dtype=layer.indptr.dtype)
    return functional.embedding_bag(
        positions, rows, layer.indptr, mode="mean", include_last_offset=True
    )


def source_of(relation: Relation) -> NodeType:
    """Node type that a relation starts from."""
    return None if relation is None else relation.split(":")[0]


def target_of(relation: Relation) -> NodeType:
    """Node type that a relation leads to."""
    return None if relation is None else relation.split(":")[2]


def _by_type(value: Any) -> Mapping[str | None, Any]:
    return value if isinstance(value, Mapping) else {None: value}
