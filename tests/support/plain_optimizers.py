"""What optimizers do to one row, in plain words: the reference of `featsync.optim`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

State = dict[str, Any]
PlainRule = Callable[[torch.Tensor, torch.Tensor, State, float], torch.Tensor]


def sgd(row: torch.Tensor, gradient: torch.Tensor, state: State, lr: float) -> torch.Tensor:
    return row - lr * gradient


def adagrad(row: torch.Tensor, gradient: torch.Tensor, state: State, lr: float) -> torch.Tensor:
    state["sum"] = state.get("sum", 0) + gradient * gradient
    return row - lr * gradient / (state["sum"].sqrt() + 1e-10)


def row_wise_adagrad(
    row: torch.Tensor, gradient: torch.Tensor, state: State, lr: float
) -> torch.Tensor:
    state["sum"] = state.get("sum", 0) + (gradient * gradient).mean()
    return row - lr * gradient / (state["sum"].sqrt() + 1e-10)


def adam(row: torch.Tensor, gradient: torch.Tensor, state: State, lr: float) -> torch.Tensor:
    state["steps"] = state.get("steps", 0) + 1
    state["mean"] = 0.9 * state.get("mean", 0) + 0.1 * gradient
    state["square"] = 0.999 * state.get("square", 0) + 0.001 * gradient * gradient
    mean = state["mean"] / (1 - 0.9 ** state["steps"])
    square = state["square"] / (1 - 0.999 ** state["steps"])
    return row - lr * mean / (square.sqrt() + 1e-8)


PLAIN_RULES: dict[str, PlainRule] = {
    "SparseSGD": sgd,
    "SparseAdagrad": adagrad,
    "RowWiseAdagrad": row_wise_adagrad,
    "SparseAdam": adam,
}


class PlainOptimizer:
    """Trains the rows of a table one by one; rows without a gradient are left alone.

    Args:
        name: Of `PLAIN_RULES`.
        table: ``(num_rows, *row_shape)``; changed in place.
        lr: Learning rate.
    """

    def __init__(self, name: str, table: torch.Tensor, lr: float) -> None:
        self.table, self.lr = table, lr
        self._rule = PLAIN_RULES[name]
        self._states: list[State] = [{} for _ in table]

    def step(self, ids: torch.Tensor, gradients: torch.Tensor) -> None:
        """Sum the gradients of each row in their order, then change it once."""
        for row, gradient in summed_by_row(ids, gradients).items():
            before = self.table[row].clone()
            self.table[row] = self._rule(before, gradient, self._states[row], self.lr)


def summed_by_row(ids: torch.Tensor, gradients: torch.Tensor) -> dict[int, torch.Tensor]:
    """Gradients of each row, added up in their order."""
    sums: dict[int, torch.Tensor] = {}
    for row, gradient in zip(ids.tolist(), gradients, strict=True):
        sums[row] = sums[row] + gradient if row in sums else gradient.clone()
    return sums
