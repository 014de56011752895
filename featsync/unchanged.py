"""Notices that a static feature is written while its rows are read ahead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from featsync.errors import ConfigError, FeatureChangedError
from featsync.plan import FeatureKey
from featsync.table import ForeignTable, Table, TensorTable

__all__ = ["Unchanged"]


class Unchanged:
    """The state of tables when an iteration began.

    Args:
        tables: Home of every feature that the loader delivers.

    Raises:
        ConfigError: A feature needs a gradient.
    """

    def __init__(self, tables: Mapping[FeatureKey, Table]) -> None:
        for table in tables.values():
            _refuse_learning(table)
        self._tables = tables
        self.versions = {
            key: table.version
            for key, table in tables.items()
            if not isinstance(table, ForeignTable)
        }

    def check(self, keys: Iterable[FeatureKey]) -> None:
        """Raise if one of these features was written since.

        Raises:
            FeatureChangedError: The feature.
        """
        for key in keys:
            table = self._tables[key]
            if isinstance(table, TensorTable) and table.version != self.versions[key]:
                raise FeatureChangedError(
                    f"feature {key} was updated inside a loop that reads it ahead: the rows of the "
                    f"next minibatch were read before. Update static features between epochs, or "
                    f"make it a featsync.DynamicFeature."
                )


def _refuse_learning(table: Table) -> None:
    if isinstance(table, TensorTable) and table.tensor.requires_grad:
        raise ConfigError(
            f"feature {table.key} is a tensor that requires grad, and rows that were read ahead "
            f"know nothing of its gradient. Give features.detach() for rows that do not learn, or "
            f"make it a featsync.DynamicFeature with an optimizer of featsync.optim."
        )
