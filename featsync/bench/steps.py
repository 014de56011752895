"""What the trainer does with a minibatch: train a model, be a simulated device, or nothing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from featsync.bench.inputs import Inputs
from featsync.bench.objective import Objective
from featsync.errors import ConfigError

Source = Callable[[Any], Inputs]


class Step(Protocol):
    """One step of training, or what stands for it."""

    def __call__(self, minibatch: Any, source: Source) -> None:
        """Work on one minibatch, fed by ``source``."""
        ...

    def epoch(self) -> contextlib.AbstractContextManager[object]:
        """What an epoch must run in; collective where ranks train together."""
        ...


class TrainStep:
    """Forward, backward and update; gradients are averaged over ranks if there are any."""

    def __init__(
        self, model: nn.Module, objective: Objective, world_size: int, rate: float = 3e-3
    ) -> None:
        self.model: nn.Module = DistributedDataParallel(model) if world_size > 1 else model
        self.objective = objective
        self._optimizer = torch.optim.Adam(model.parameters(), lr=rate)

    def __call__(self, minibatch: Any, source: Source) -> None:
        """Train on one minibatch."""
        self._optimizer.zero_grad(set_to_none=True)
        self.objective.loss(minibatch, self.predict(minibatch, source)).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def predict(self, minibatch: Any, source: Source) -> Any:
        """The model's output for the seeds."""
        inputs = source(minibatch)
        return self.model(minibatch.sampled_subgraphs, inputs.nodes, inputs.edges)

    def epoch(self) -> contextlib.AbstractContextManager[object]:
        """Let ranks that have fewer minibatches wait for the others without stopping them."""
        if isinstance(self.model, DistributedDataParallel):
            return Join([self.model])
        return contextlib.nullcontext()


@dataclass(frozen=True)
class SimulatedStep:
    """A device that is busy for a while; Python is kept busy for a share of it, else it sleeps.

    Attributes:
        seconds: Length of a step.
        python_share: Part of it, 0 to 1, in which the interpreter is busy.
    """

    seconds: float
    python_share: float = 0.0

    def __call__(self, minibatch: Any, source: Source) -> None:
        """Pass the time, in slices of 10 ms, of which each has its share of work."""
        end = time.perf_counter() + self.seconds
        while (left := end - time.perf_counter()) > 0:
            length = min(left, 0.010)
            _spin(length * self.python_share)
            rest = length * (1.0 - self.python_share)
            if rest > 0:
                time.sleep(rest)

    def epoch(self) -> contextlib.AbstractContextManager[object]:
        """Nothing special."""
        return contextlib.nullcontext()


class DrainStep:
    """Takes minibatches as fast as they come."""

    def __call__(self, minibatch: Any, source: Source) -> None:
        """Do nothing."""

    def epoch(self) -> contextlib.AbstractContextManager[object]:
        """Nothing special."""
        return contextlib.nullcontext()


def parse_simulated_step(text: str) -> SimulatedStep:
    """Read ``MS`` or ``MS:SHARE``.

    Raises:
        ConfigError: Neither.

    Example:
        >>> parse_simulated_step("150:0.3")
        SimulatedStep(seconds=0.15, python_share=0.3)
    """
    duration, _, share = text.partition(":")
    with contextlib.suppress(ValueError):
        step = SimulatedStep(float(duration) / 1000, float(share or 0))
        if step.seconds > 0 and 0 <= step.python_share <= 1:
            return step
    raise ConfigError(
        f"--simulate-step = {text!r} is not allowed; give milliseconds over 0, or milliseconds and"
        " the share from 0 to 1 in which Python is busy, such as 150 or 150:0.3"
    )


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Switch a model to evaluation and back, without gradients in between."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
