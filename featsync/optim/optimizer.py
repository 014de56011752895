"""Optimizers of learnable rows: gradients of all ranks are summed, state lies beside each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from featsync.dynamic.checks import checked_values
from featsync.dynamic.clock import FeatureClock
from featsync.dynamic.opening import shared_rows
from featsync.errors import ConfigError
from featsync.futex import LINE_BYTES
from featsync.optim import rules
from featsync.optim.learning import Learning

__all__ = ["RowOptimizer", "RowWiseAdagrad", "SparseAdagrad", "SparseAdam", "SparseSGD"]

_REDUCTIONS = ("sum", "mean")


class RowOptimizer:
    """Trains the rows of a `featsync.DynamicFeature` that minibatches deliver.

    From now on delivered rows are leaves that require grad. Constructing one is collective: all
    ranks give the same settings. Memory: the states of the rule, beside the table, once a machine.

    Args:
        feature: Whose rows; float, of one optimizer only.
        lr: Learning rate; may be changed between steps, on all ranks alike (`lr`).
        reduce: ``sum`` of the ranks' gradients, or their ``mean`` (÷ ranks of the group, as DDP).
        rule: The arithmetic.

    Raises:
        ConfigError: The feature cannot learn, or ranks disagree.
        CapacityError: There is no shared memory for the states.
    """

    def __init__(self, feature: Any, lr: float, reduce: str, rule: rules.Rule) -> None:
        self._name = type(self).__name__
        where = f"featsync.optim.{self._name}"
        clock = getattr(feature, "featsync_clock", None)
        if not isinstance(clock, FeatureClock):
            raise ConfigError(
                f"{where}: {type(feature).__name__} is no featsync.DynamicFeature: its rows are "
                "not followed when they change"
            )
        if not clock.kind.dtype.is_floating_point:
            raise ConfigError(f"{where}: rows of {clock.kind.dtype} have no gradients; use floats")
        if reduce not in _REDUCTIONS:
            raise ConfigError(f"{where}: reduce = {reduce!r}; it can be {', '.join(_REDUCTIONS)}")
        if not isinstance(lr, int | float) or not lr >= 0:
            raise ConfigError(f"{where}: lr = {lr!r}; it must be a number of at least 0")
        self.lr = float(lr)
        self._clock, self._rule = clock, rule
        self._settings = {"name": self._name, "reduce": reduce, "rule": repr(rule)}
        # For its terms alone: another optimizer has other states, or none.
        clock.room("optimizer", LINE_BYTES, {**self._settings, "lr": self.lr})
        self.states = {
            name: shared_rows(clock, self._beside(name), kind, self._settings)
            for name, kind in rule.states(clock.kind).items()
        }
        divisor = clock.board.num_ranks if reduce == "mean" else 1
        clock.learn(where, Learning(rule, self.states, divisor))

    def step(self, minibatch: Any) -> None:
        """Hand in the gradients of the rows that a minibatch brought; they are used up.

        Rows change when the step is committed, together with the gradients of other ranks.

        Args:
            minibatch: The one that was delivered last, after ``backward()``.

        Raises:
            ConfigError: It is another one, or its rows have no gradients. Nothing has changed.
        """
        where = f"featsync.optim.{self._name}.step"
        driver = self._clock.driver
        if driver is None:
            raise ConfigError(f"{where}: no loop over a loader of this feature is under way")
        if minibatch is None:
            raise ConfigError(f"{where}: None given; give the minibatch that was delivered last")
        driver.check_writer(minibatch)
        found = [(ids, leaf.grad) for ids, leaf in driver.leaves if leaf.grad is not None]
        if not found and any(len(ids) for ids, _ in driver.leaves):
            raise ConfigError(
                f"{where}: the rows of this minibatch have no gradients (or they are used up): "
                "call backward() on a loss that depends on them, once before each step"
            )
        kind = self._clock.kind
        rows = _joined([ids.to("cpu", torch.int64) for ids, _ in found], (0,), torch.int64)
        shape = (0, *kind.shape)
        gradients = _joined([gradient for _, gradient in found], shape, kind.dtype)
        gradients = checked_values(gradients, len(rows), kind, where)
        self._clock.write(driver, rows, gradients, minibatch, self.lr)
        # Only now: a step that was refused leaves the gradients too.
        for _, leaf in driver.leaves:
            leaf.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Copy what is needed to go on; the rows themselves are `DynamicFeature.read`'s."""
        found = self._clock.copy(None, [self._beside(name) for name in self.states])
        states = {name: found[self._beside(name)] for name in self.states}
        return {**self._settings, "lr": self.lr, "states": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, of whatever number of ranks; all ranks load the same, outside loops.

        Raises:
            ConfigError: It is of another optimizer or table. Nothing has changed.
        """
        where = f"featsync.optim.{self._name}.load_state_dict"
        differing = [name for name in self._settings if state.get(name) != self._settings[name]]
        if differing:
            given = {name: state.get(name) for name in differing}
            wanted = {name: self._settings[name] for name in differing}
            raise ConfigError(f"{where}: the state is of {given}, this optimizer of {wanted}")
        if absent := [name for name in ("lr", "states") if name not in state]:
            raise ConfigError(f"{where}: the state has no {' and no '.join(absent)}")
        lr, states = float(state["lr"]), state["states"]
        for name, own in self.states.items():
            found, allowed = _described(states.get(name)), self._allowed(own)
            if found != allowed:
                raise ConfigError(f"{where}: {name} is {found} where {allowed} is allowed")
        if self._clock.driver is not None:
            raise ConfigError(f"{where}: a loop over a loader of this feature is under way")
        self._clock.settle()
        self._clock.rows.assign_beside({self._beside(name): states[name] for name in self.states})
        self.lr = lr

    def _beside(self, name: str) -> str:
        """How a state is called among all that lies beside the rows."""
        return f"{self._name} {name}"

    def _allowed(self, own: torch.Tensor) -> str:
        return f"{(self._clock.num_rows, *own.shape[1:])} {own.dtype}"


def _described(state: Any) -> str:
    if not isinstance(state, torch.Tensor):
        return type(state).__name__
    return f"{tuple(state.shape)} {state.dtype}"


def _joined(parts: list[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """One tensor of all; of this shape where there is none."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty(shape, dtype=dtype)


class SparseSGD(RowOptimizer):
    """``row -= lr · gradient``; see `RowOptimizer`."""

    def __init__(self, feature: Any, lr: float = 0.01, reduce: str = "sum") -> None:
        super().__init__(feature, lr, reduce, rules.Sgd())


class SparseAdagrad(RowOptimizer):
    """Adagrad with a sum for each element; see `RowOptimizer` and `rules.Adagrad`."""

    def __init__(
        self, feature: Any, lr: float = 0.01, reduce: str = "sum", eps: float = 1e-10
    ) -> None:
        super().__init__(feature, lr, reduce, rules.Adagrad(eps))


class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one sum a row; see `RowOptimizer` and `rules.RowWiseAdagrad`."""

    def __init__(
        self, feature: Any, lr: float = 0.01, reduce: str = "sum", eps: float = 1e-10
    ) -> None:
        super().__init__(feature, lr, reduce, rules.RowWiseAdagrad(eps))


class SparseAdam(RowOptimizer):
    """Adam that counts the steps of each row; see `RowOptimizer` and `rules.Adam`."""

    def __init__(
        self,
        feature: Any,
        lr: float = 0.001,
        reduce: str = "sum",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(feature, lr, reduce, rules.Adam(betas, eps))
