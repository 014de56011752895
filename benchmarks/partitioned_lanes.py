"""One rank of `bench_partitioned.py`: all pipelines over one split table, in turn."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lanes import Lane, take_turns

import featsync
from featsync.bench.steps import parse_simulated_step
from featsync.bench.training import delivered_source, resident_source, train_step
from featsync.config import Config, Stage, load
from featsync.feature_keys import without_feature_keys
from featsync.loading import load_to_compare

PIPELINES = Path(__file__).parent.parent / "pipelines"
FLOOR, NAIVE, AGAIN = "no features", "all_to_all", "all_to_all again"
TRANSPORTS = ("shared_memory", "p2p", "auto")


@dataclass(frozen=True)
class Setting:
    """What is measured over one table.

    Attributes:
        ranks: How many.
        width: float32 numbers a row.
        nodes: Of the graph; there are 20 edges each.
        batch_size: Seeds a minibatch.
        minibatches: Of each rank an epoch.
    """

    ranks: int
    width: int
    nodes: int = 1_000_000
    batch_size: int = 1024
    minibatches: int = 10

    @property
    def overrides(self) -> Sequence[str]:
        """Of the configurations in ``pipelines/``."""
        share = self.batch_size * self.ranks * self.minibatches / self.nodes
        options = {"nodes": self.nodes, "edges": 20 * self.nodes, "width": self.width}
        options["train_share"] = share
        graph = [f"dataset.synthetic.{name}={value}" for name, value in options.items()]
        return [*graph, f"batch_size={self.batch_size}"]


@dataclass(frozen=True)
class Part:
    """How often, and beside what.

    Attributes:
        rounds: Epochs of each pipeline.
        step: A simulated step, in ms; ``None``: a GraphSAGE is trained.
    """

    rounds: int
    step: str | None = None


def measure(setting: Setting, parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Load, and run all pipelines in turn beside each of the parts' steps; collective.

    Returns:
        Of each part, this rank's seconds by pipeline, and facts.
    """
    importlib.import_module("pipelines.all_to_all")  # registers its stage
    configs = _configs(setting)
    data = load_to_compare(configs[TRANSPORTS[0]])
    return [_run(configs, data, part, setting.ranks) for part in parts]


def _configs(setting: Setting) -> dict[str, Config]:
    featsync_config = load(PIPELINES / "synthetic_partitioned.yaml", setting.overrides)
    naive = load(PIPELINES / "synthetic_all_to_all.yaml", setting.overrides)
    by_transport = {name: _by(name, featsync_config) for name in TRANSPORTS}
    return {FLOOR: without_feature_keys(featsync_config), NAIVE: naive, **by_transport}


def _by(transport: str, config: Config) -> Config:
    *others, last = config.stages
    arguments = {**last.arguments, "transport": transport}
    stages = [*others, Stage(name=last.name, arguments=arguments)]
    return config.model_copy(update={"stages": stages})


def _run(
    configs: dict[str, Config], data: tuple[Any, Any], part: Part, ranks: int
) -> dict[str, Any]:
    dataset, tables = data
    config = configs[NAIVE]
    if part.step is not None:
        names = [FLOOR, NAIVE, *TRANSPORTS]
        busy = parse_simulated_step(part.step)
        steps = dict.fromkeys(names, lambda one: busy(one, lambda _: None))
        context: Any = contextlib.nullcontext
    else:
        names = [FLOOR, NAIVE, *TRANSPORTS, AGAIN]
        train = train_step(config, dataset, ranks)
        delivered, resident = delivered_source(config, dataset), resident_source(config, dataset)
        steps = dict.fromkeys(names, lambda one: train(one, delivered))
        steps[FLOOR] = lambda one: train(one, resident)
        context = train.epoch
    lanes = [
        Lane(name, configs[NAIVE if name == AGAIN else name], dataset, tables, steps[name])
        for name in names
    ]
    take_turns(lanes, part.rounds, lambda: _together(context))
    chosen = featsync.stats(lanes[names.index("auto")].loader)
    rows = {
        name: dict(
            next(iter(featsync.stats(lanes[names.index(name)].loader).features.values())).rows
        )
        for name in TRANSPORTS
    }
    return {
        "seconds": {lane.name: lane.seconds for lane in lanes},
        "cpu_seconds": {lane.name: lane.cpu_seconds for lane in lanes},
        "minibatches": lanes[0].num_minibatches,
        "wrong_rows": sum(lane.wrong_rows for lane in lanes),
        "auto": {str(key): [one.transport, one.why] for key, one in chosen.features.items()},
        "rows": rows,
    }


@contextlib.contextmanager
def _together(context: Any) -> Iterator[None]:
    dist.barrier()
    with context():
        yield
