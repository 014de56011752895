"""Loops that train rows on clocks of one process, as a session and its user do; needs no DGL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from featsync import optim
from featsync.dynamic.clock import FeatureClock
from featsync.dynamic.iteration import Iteration
from support.local_clocks import local_clocks, on_threads

# Rows of one rank in one step, and the gradients that its loss has for them.
Part = tuple[torch.Tensor, torch.Tensor]


class Loop:
    """One iteration over a feature's rows; delivers leaves that require grad.

    Args:
        clock: Of the feature.
    """

    def __init__(self, clock: FeatureClock) -> None:
        self._clock, self._is_alive = clock, True
        self._iteration = Iteration(clock, 0, lambda: self._is_alive, trains=True)

    def deliver(self, ids: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """The next minibatch, and its rows."""
        self._iteration.ask()
        self._iteration.arrive()
        leaf = self._clock.read(ids).requires_grad_()
        minibatch = SimpleNamespace(_featsync_step=object())
        self._iteration.deliver(minibatch._featsync_step)
        self._iteration.leaves.append((ids, leaf))
        return minibatch, leaf

    def end(self) -> None:
        """Leave the loop; blocks until what was written is in the table."""
        self._iteration.end()
        self._is_alive = False
        self._clock.settle(patience=30)


def learners(
    num_ranks: int, start: torch.Tensor, name: str, **settings: Any
) -> tuple[list[FeatureClock], list[Any]]:
    """One clock and one optimizer a rank, of one table."""
    clocks = local_clocks(num_ranks, start, "last")
    make = getattr(optim, name)
    return clocks, [make(SimpleNamespace(featsync_clock=clock), **settings) for clock in clocks]


def train(
    clocks: Sequence[FeatureClock],
    optimizers: Sequence[Any],
    steps: Sequence[Sequence[Part]],
    before_step: Callable[[int, Any], None] = lambda step, optimizer: None,
) -> torch.Tensor:
    """Run one epoch on all ranks and return the table after it.

    Args:
        clocks: By rank.
        optimizers: By rank.
        steps: By step and rank what has which gradients.
        before_step: Called with each step's number and optimizer.
    """

    def body(rank: int) -> None:
        loop = Loop(clocks[rank])
        for number, parts in enumerate(steps):
            ids, gradients = parts[rank]
            minibatch, leaf = loop.deliver(ids)
            (leaf * gradients).sum().backward()
            before_step(number, optimizers[rank])
            optimizers[rank].step(minibatch)
        loop.end()

    on_threads(body, len(clocks))
    return clocks[0].read()


def random_steps(
    seed: int,
    num_ranks: int = 1,
    num_steps: int = 5,
    num_rows: int = 11,
    row_shape: tuple[int, ...] = (3,),
    dtype: torch.dtype = torch.float32,
) -> list[list[Part]]:
    """By step and rank some rows, many of them repeatedly, and gradients."""
    random = torch.Generator().manual_seed(seed)
    steps = []
    for _ in range(num_steps):
        parts = []
        for _ in range(num_ranks):
            count = int(torch.randint(1, 2 * num_rows, (1,), generator=random))
            ids = (num_rows * torch.rand(count, generator=random) ** 2).long()
            parts.append((ids, torch.randn(count, *row_shape, generator=random).to(dtype)))
        steps.append(parts)
    return steps


def merged(steps: Sequence[Sequence[Part]]) -> list[list[Part]]:
    """The same for one rank: the parts of all, one after the other."""
    return dealt(steps, 1)


def dealt(steps: Sequence[Sequence[Part]], num_ranks: int) -> list[list[Part]]:
    """The same for another number of ranks, so that the order of entries stays as it is."""
    given = []
    for parts in steps:
        ids = torch.cat([ids for ids, _ in parts])
        gradients = torch.cat([gradients for _, gradients in parts])
        pieces = zip(ids.tensor_split(num_ranks), gradients.tensor_split(num_ranks), strict=True)
        given.append(list(pieces))
    return given
