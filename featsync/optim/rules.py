"""What optimizers do to some rows, given the sum of their gradients.

State lies beside each row and is changed with it; rows without a gradient in a step are left alone,
state and all. So momenta do not decay for them, and Adam counts the steps of each row: the *lazy*
forms, as in DGL's and TorchRec's sparse optimizers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from featsync.row_kind import RowKind

__all__ = ["Adagrad", "Adam", "RowWiseAdagrad", "Rule", "Sgd"]

States = Mapping[str, torch.Tensor]


class Rule(ABC):
    """One optimizer's arithmetic."""

    @abstractmethod
    def states(self, kind: RowKind) -> dict[str, RowKind]:
        """What lies beside a row, all zeros at first, by name."""

    @abstractmethod
    def step(self, rows: torch.Tensor, gradients: torch.Tensor, states: States, lr: float) -> None:
        """Change some rows and what lies beside them, in place.

        Args:
            rows: ``(n, *row_shape)``.
            gradients: ``(n, *row_shape)``, not to be written.
            states: By name, ``(n, *its shape)``.
            lr: Learning rate.
        """


@dataclass(frozen=True)
class Sgd(Rule):
    """``row -= lr · gradient``."""

    def states(self, kind: RowKind) -> dict[str, RowKind]:
        """Nothing."""
        return {}

    def step(self, rows: torch.Tensor, gradients: torch.Tensor, states: States, lr: float) -> None:
        """See `Rule.step`."""
        rows.add_(gradients, alpha=-lr)


@dataclass(frozen=True)
class Adagrad(Rule):
    """``sum += gradient²; row -= lr · gradient / (√sum + eps)`` (Duchi et al., 2011).

    Attributes:
        eps: Keeps the divisor from being 0.
    """

    eps: float = 1e-10

    def states(self, kind: RowKind) -> dict[str, RowKind]:
        """A number for each element."""
        return {"sum": kind}

    def step(self, rows: torch.Tensor, gradients: torch.Tensor, states: States, lr: float) -> None:
        """See `Rule.step`."""
        total = states["sum"]
        total.addcmul_(gradients, gradients)
        rows.addcdiv_(gradients, total.sqrt().add_(self.eps), value=-lr)


@dataclass(frozen=True)
class RowWiseAdagrad(Rule):
    """Adagrad with one sum a row, of the mean of the squares: a fraction of the memory (FBGEMM).

    Attributes:
        eps: Keeps the divisor from being 0.
    """

    eps: float = 1e-10

    def states(self, kind: RowKind) -> dict[str, RowKind]:
        """A number for each row."""
        return {"sum": RowKind((1,), kind.dtype)}

    def step(self, rows: torch.Tensor, gradients: torch.Tensor, states: States, lr: float) -> None:
        """See `Rule.step`."""
        total = states["sum"]
        flat = gradients.reshape(len(gradients), -1)
        total.add_((flat * flat).mean(1, keepdim=True))
        divisor = total.sqrt().add_(self.eps).view(-1, *[1] * (rows.ndim - 1))
        rows.addcdiv_(gradients, divisor.expand_as(rows), value=-lr)


@dataclass(frozen=True)
class Adam(Rule):
    """Adam (Kingma and Ba, 2014) that counts the steps of each row.

    Attributes:
        betas: Decay of the means of gradients and of their squares.
        eps: Keeps the divisor from being 0.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    _NAMES: ClassVar[tuple[str, str]] = ("mean", "square")

    def states(self, kind: RowKind) -> dict[str, RowKind]:
        """Two numbers for each element, and a count for each row."""
        return {**dict.fromkeys(self._NAMES, kind), "steps": RowKind((1,), torch.float64)}

    def step(self, rows: torch.Tensor, gradients: torch.Tensor, states: States, lr: float) -> None:
        """See `Rule.step`."""
        mean, square, steps = states["mean"], states["square"], states["steps"]
        first, second = self.betas
        steps.add_(1)
        mean.mul_(first).add_(gradients, alpha=1 - first)
        square.mul_(second).addcmul_(gradients, gradients, value=1 - second)
        shape = (-1, *[1] * (rows.ndim - 1))
        scale = (1 - first**steps).to(rows.dtype).view(shape)
        divisor = (square / (1 - second**steps).to(rows.dtype).view(shape)).sqrt_()
        rows.addcdiv_(mean / scale, divisor.add_(self.eps), value=-lr)
