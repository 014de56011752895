"""What the training scripts share: joining the ranks, one epoch of training, one of validation."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import typer

from featsync.bench.steps import TrainStep, evaluation
from featsync.errors import ConfigError

_PAUSE_S = 0.1


@dataclass(frozen=True)
class Ranks:
    """Which process this is, and of how many."""

    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """Whether this is the process that prints."""
        return self.rank == 0


def run(main: Callable[..., None]) -> None:
    """Run a script's main function; a mistake in its input is one message, without a traceback."""
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    try:
        app()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def join_ranks(threads: int) -> Ranks:
    """Join the other processes that torchrun started; without torchrun there are none."""
    torch.set_num_threads(threads)
    if "WORLD_SIZE" not in os.environ:
        return Ranks(0, 1)
    dist.init_process_group("gloo")
    return Ranks(dist.get_rank(), dist.get_world_size())


def leave_ranks(ranks: Ranks) -> None:
    """Leave in order."""
    if ranks.size > 1:
        # A thread of gloo may be about to free the tensors of the last call, for which it needs the
        # interpreter's lock. Destroying the group holds that lock while it waits for this thread:
        # without a pause, in which the lock is free, both wait for ever.
        time.sleep(_PAUSE_S)
        dist.destroy_process_group()


def train_epoch(trainer: TrainStep, loader: Iterable[Any], feed: Callable[[Any], Any]) -> float:
    """Train on all minibatches of this rank; give the seconds it took.

    Ranks may have different numbers of minibatches: ``trainer.epoch()`` is DDP's ``Join``.
    """
    started = time.perf_counter()
    with trainer.epoch():
        for minibatch in loader:
            trainer(minibatch, feed)
    return time.perf_counter() - started


def validate(trainer: TrainStep, loader: Iterable[Any], feed: Callable[[Any], Any]) -> float:
    """Give the mean score of all seeds of all ranks."""
    total = torch.zeros(2, dtype=torch.float64)
    # Without DDP around it, since ranks may have different numbers of minibatches here as well.
    model = getattr(trainer.model, "module", trainer.model)
    with evaluation(model):
        for minibatch in loader:
            inputs = feed(minibatch)
            output = model(minibatch.sampled_subgraphs, inputs.nodes, inputs.edges)
            total += torch.tensor(trainer.objective.score(minibatch, output), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total[0] / total[1])
