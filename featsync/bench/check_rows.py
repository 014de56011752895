"""Compare delivered rows with the tables, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from featsync.bench.inputs import delivered_rows, wanted_ids
from featsync.plan import FeatureKey


@dataclass(frozen=True)
class RowCheck:
    """How many rows were compared, and how many differed; add two with ``+``."""

    checked: int = 0
    wrong: int = 0

    def __add__(self, other: RowCheck) -> RowCheck:
        return RowCheck(self.checked + other.checked, self.wrong + other.wrong)


def check_minibatch(minibatch: Any, tables: Any, keys: tuple[FeatureKey, ...]) -> RowCheck:
    """Compare all features of one minibatch with the rows of the same ids.

    A feature that was not delivered, or has another shape or dtype, is wrong in all its rows.

    Args:
        minibatch: As it was delivered.
        tables: A ``gb.FeatureStore`` of whole tables, which other ranks have no part in reading.
        keys: The features.
    """
    total = RowCheck()
    for key, layer, ids in wanted_ids(minibatch, keys):
        expected = tables.read(*key, ids)
        found = delivered_rows(minibatch, key, layer)
        wrong = len(ids) if found is None else count_different_rows(found, expected)
        total += RowCheck(len(ids), wrong)
    return total


def count_different_rows(found: Tensor, expected: Tensor) -> int:
    """Count rows that differ in any bit.

    Example:
        >>> count_different_rows(torch.tensor([[1.0], [-0.0]]), torch.tensor([[1.0], [0.0]]))
        1
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return max(len(found), len(expected))
    if expected.numel() == 0:
        return 0
    # Bytes, since NaN differs from itself and -0.0 equals 0.0.
    different = _as_bytes(found.cpu()) != _as_bytes(expected.cpu())
    return int(different.any(dim=1).sum())


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.detach().reshape(len(rows), -1).contiguous().view(torch.uint8)
