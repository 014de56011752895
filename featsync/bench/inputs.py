"""What the model is fed: the delivered features of a minibatch, or resident ones of that shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from featsync.bench.model import NodeType, Relation
from featsync.errors import FeatureError
from featsync.plan import FeatureKey


@dataclass(frozen=True)
class Inputs:
    """The rows of one minibatch as the model takes them.

    Attributes:
        nodes: ``(num_nodes, width)`` float32 for each node type.
        edges: For each layer, ``(num_edges, width)`` float32 of each relation with features.
    """

    nodes: dict[NodeType, Tensor]
    edges: list[dict[Relation, Tensor]]


def wanted_ids(
    minibatch: Any, keys: tuple[FeatureKey, ...]
) -> Iterator[tuple[FeatureKey, int, Tensor]]:
    """Yield which rows of which feature a minibatch needs, as (key, layer, ids).

    The layer of a node feature is -1. Types that the minibatch does not have, and edges without
    known ids, are left out, as feature stages do.
    """
    for key in keys:
        if key.domain == "node":
            ids = _of_type(minibatch.node_ids(), key.type)
            if ids is not None:
                yield key, -1, ids
            continue
        for layer in range(minibatch.num_layers()):
            ids = _of_type(minibatch.edge_ids(layer), key.type)
            if ids is not None:
                yield key, layer, ids


def delivered_rows(minibatch: Any, key: FeatureKey, layer: int) -> Tensor | None:
    """The rows that the pipeline delivered for one feature, ``None`` if it did not."""
    name = key.name if key.type is None else (key.type, key.name)
    features = minibatch.node_features if key.domain == "node" else minibatch.edge_features
    if features is None:
        return None
    if key.domain == "edge":
        features = features[layer] if layer < len(features) else {}
    rows: Tensor | None = features.get(name)
    return rows


class Delivered:
    """Feeds what the pipeline under test delivered."""

    def __init__(self, keys: tuple[FeatureKey, ...], node_types: tuple[NodeType, ...]) -> None:
        self._keys = keys
        self._node_types = node_types

    def __call__(self, minibatch: Any) -> Inputs:
        """Gather the model's inputs.

        Raises:
            FeatureError: A feature that the minibatch needs was not delivered.
        """
        found = []
        for key, layer, ids in wanted_ids(minibatch, self._keys):
            rows = delivered_rows(minibatch, key, layer)
            if rows is None or len(rows) != len(ids):
                count = "no" if rows is None else len(rows)
                raise FeatureError(
                    f"the pipeline delivered {count} rows of {key} where the minibatch has"
                    f" {len(ids)} ids: look at the stage that fetches it"
                )
            found.append((key, layer, _as_input(rows)))
        return _collect(minibatch, found, self._node_types)


@dataclass
class Resident:
    """Feeds random rows that lie in memory already: what a step costs without any feature stage.

    Attributes:
        keys: Features to stand in for.
        widths: Elements of a row of each.
        node_types: All node types.
    """

    keys: tuple[FeatureKey, ...]
    widths: Mapping[FeatureKey, int]
    node_types: tuple[NodeType, ...]
    _rows: dict[FeatureKey, Tensor] = field(default_factory=dict)

    def __call__(self, minibatch: Any) -> Inputs:
        """Give as many rows as the minibatch would want of each feature."""
        found = [
            (key, layer, self._first_rows(key, len(ids)))
            for key, layer, ids in wanted_ids(minibatch, self.keys)
        ]
        return _collect(minibatch, found, self.node_types)

    def _first_rows(self, key: FeatureKey, count: int) -> Tensor:
        rows = self._rows.get(key)
        if rows is None or len(rows) < count:
            # Some room to spare, so that it grows in the warm-up epoch only.
            rows = self._rows[key] = torch.randn(count + count // 4, self.widths[key])
        return rows[:count]


def _collect(
    minibatch: Any,
    found: list[tuple[FeatureKey, int, Tensor]],
    node_types: tuple[NodeType, ...],
) -> Inputs:
    """Lay the features of one type side by side, and give types without any a constant."""
    nodes: dict[NodeType, list[Tensor]] = {}
    edges: list[dict[Relation, list[Tensor]]] = [{} for _ in range(minibatch.num_layers())]
    for key, layer, rows in found:
        place = nodes if key.domain == "node" else edges[layer]
        place.setdefault(key.type, []).append(rows)
    for name in node_types:
        ids = _of_type(minibatch.node_ids(), name)
        if name not in nodes and ids is not None:
            nodes[name] = [torch.ones(len(ids), 1)]
    return Inputs(
        {name: _side_by_side(rows) for name, rows in nodes.items()},
        [{name: _side_by_side(rows) for name, rows in layer.items()} for layer in edges],
    )


def _side_by_side(rows: list[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)


def _as_input(rows: Tensor) -> Tensor:
    return rows.flatten(1).to(torch.float32)


def _of_type(ids: Any, name: str | None) -> Tensor | None:
    """Ids of one type; the host keys relations by string or by tuple of three."""
    if not isinstance(ids, Mapping):
        return ids if name is None else None
    found: Tensor | None = ids.get(name)
    if found is None and name is not None:
        found = ids.get(tuple(name.split(":")))
    return found
