"""Which features a Planner was asked for, and where they lie."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from featsync._graphbolt import FeatureKeys, known_keys, table_of, type_name, wants_of
from featsync.errors import ConfigError, unknown_name
from featsync.plan import FeatureKey, Want
from featsync.table import Table


class Sources:
    """The features of one Planner.

    Args:
        store: The feature store.
        node_keys: Names, or names by node type.
        edge_keys: Names, or names by edge type.

    Raises:
        ConfigError: A feature does not exist.
    """

    def __init__(self, store: Any, node_keys: FeatureKeys, edge_keys: FeatureKeys) -> None:
        self.store = store
        self._node_keys = node_keys
        self._edge_keys = edge_keys
        self._warned_of_edges = False
        self.keys = [*_named("node", node_keys), *_named("edge", edge_keys)]
        known = known_keys(store)
        if known is None:
            return
        for key in self.keys:
            if key not in known:
                where = f"plan_feature.{key.domain}_feature_keys"
                raise unknown_name(where, str(key), [str(other) for other in known])

    def tables(self) -> dict[FeatureKey, Table]:
        """The home of each feature, as the store has it now."""
        return {key: table_of(self.store, key) for key in self.keys}

    def wants_of(self, minibatch: Any) -> dict[FeatureKey, Want]:
        """Which rows a minibatch wants.

        Raises:
            ConfigError: Keys by type on a homogeneous graph, or the other way round.
        """
        wants = wants_of(minibatch, self._node_keys, self._edge_keys)
        lacks_edges = self._edge_keys and not any(key.domain == "edge" for key in wants)
        if lacks_edges and minibatch.num_layers() and not self._warned_of_edges:
            self._warned_of_edges = True
            warnings.warn(
                f"plan_feature.edge_feature_keys = {self._edge_keys!r}, but the sampled edges "
                f"carry no ids, so there are no edge features: give the graph an edge attribute "
                f"'_ORIGINAL_EDGE_ID' (gb.ORIGINAL_EDGE_ID)",
                stacklevel=2,
            )
        return wants


def _named(domain: str, keys: FeatureKeys) -> Iterator[FeatureKey]:
    if isinstance(keys, str):  # also a sequence of names, of one letter each
        raise ConfigError(
            f"plan_feature.{domain}_feature_keys = {keys!r}: give a list of names, [{keys!r}]"
        )
    if isinstance(keys, Mapping):
        for type_, names in keys.items():
            yield from (FeatureKey(domain, type_name(type_), name) for name in names)
    else:
        yield from (FeatureKey(domain, None, name) for name in keys or ())
