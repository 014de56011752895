"""Classify packages, with an embedding that is learned for each node that has no features.

python pipelines/learnable_embeddings.py
python pipelines/learnable_embeddings.py --dataset debian-files --learn folder --learn file
torchrun --nproc-per-node 2 pipelines/learnable_embeddings.py --optimizer adam

The rows of the embeddings are read ahead like any feature, and each step changes those that it
read. The ranks of a machine share one copy of the table and of the optimizer's state.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import dgl.graphbolt as gb
import torch
import torch.distributed as dist
import typer
import yaml
from loops import Ranks, join_ranks, leave_ranks, run, train_epoch, validate
from torch import nn

import featsync
from featsync import config as configuration
from featsync import optim
from featsync.bench.model import GraphSage
from featsync.bench.objective import OBJECTIVES
from featsync.bench.steps import TrainStep
from featsync.bench.training import delivered_source, model_shape, node_types
from featsync.config import Config
from featsync.errors import unknown_name
from featsync.loading import LoadedDataset, load_dataset

OPTIMIZERS = {
    "sgd": optim.SparseSGD,
    "adagrad": optim.SparseAdagrad,
    "rowwise_adagrad": optim.RowWiseAdagrad,
    "adam": optim.SparseAdam,
}
# Which node types have no features of their own, unless --learn says otherwise.
WITHOUT_FEATURES = {"debian": ("maintainer", "tag"), "debian-files": ("folder",)}

DatasetName = Annotated[str, typer.Option(help="As in a configuration: a name, or YAML.")]
Learn = Annotated[list[str] | None, typer.Option(help="A node type to learn; repeat it.")]
Optimizer = Annotated[str, typer.Option(help=f"Of the embeddings: {', '.join(OPTIMIZERS)}.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the results.")]


@dataclass(frozen=True)
class Epoch:
    """What one epoch of all ranks gave.

    Attributes:
        loss: Mean over all minibatches.
        accuracy: Of the validation nodes.
        seconds: Of training.
        rows_per_second: Rows of embeddings that were delivered and then changed.
        private_mb: Memory that the ranks have for themselves, all together.
    """

    loss: float
    accuracy: float
    seconds: float
    rows_per_second: float
    private_mb: float


class EmbeddingStep(TrainStep):
    """Train the model as ever, and after it the embeddings that the minibatch brought."""

    def __init__(
        self, model: nn.Module, objective: Any, world_size: int, sparse: Mapping[str, Any]
    ) -> None:
        super().__init__(model, objective, world_size)
        self.sparse = sparse
        self.losses: list[float] = []
        self.num_rows = 0

    def __call__(self, minibatch: Any, source: Any) -> None:
        """Train on one minibatch."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.objective.loss(minibatch, self.predict(minibatch, source))
        loss.backward()
        self._optimizer.step()
        for node_type, optimizer in self.sparse.items():
            optimizer.step(minibatch)
            self.num_rows += len(minibatch.node_features.get((node_type, "embedding"), ()))
        self.losses.append(loss.item())


def main(  # noqa: PLR0913 - the options of the command line
    dataset: DatasetName = "debian",
    learn: Learn = None,
    optimizer: Optimizer = "adagrad",
    rate: float = 0.05,
    width: Annotated[int, typer.Option(min=1)] = 64,
    epochs: Annotated[int, typer.Option(min=1)] = 3,
    batch_size: Annotated[int, typer.Option(min=1)] = 1024,
    lookahead: Annotated[int, typer.Option(min=1)] = 2,
    worker: str = "thread",
    staleness: Annotated[int, typer.Option(min=0)] = 0,
    seed: int = 0,
    threads: int = 1,
    json_file: Json = None,
) -> None:
    """Train, and print loss, accuracy, speed and memory of each epoch."""
    ranks = join_ranks(threads)
    if optimizer not in OPTIMIZERS:
        raise unknown_name("--optimizer", optimizer, OPTIMIZERS)
    base = {
        "dataset": dataset_of(dataset),
        "batch_size": batch_size,
        "seed": seed,
        "share": ranks.size > 1,
    }
    stages = [{"sample_neighbor": {"fanouts": [5, 5]}}]
    loaded = load_dataset(configuration.parse({**base, "stages": stages}))
    learned = learned_types(loaded, base["dataset"], learn)
    loaded = with_embeddings(loaded, learned, width, seed, ranks)

    keys = {name: ["embedding" if name in learned else "feat"] for name in node_types(loaded)}
    stages += [
        {"plan_feature": {"node_feature_keys": keys, "lookahead": lookahead}},
        {"sync_feature": {"worker": worker, "staleness": staleness}},
    ]
    settings = configuration.parse({**base, "stages": stages})
    # The mean of the ranks' gradients, which is what DDP takes for the model.
    sparse = {
        name: OPTIMIZERS[optimizer](embedding(loaded, name), lr=rate, reduce="mean")
        for name in learned
    }
    if ranks.is_first:
        report_tables(loaded, sparse)
    epochs_done = list(train(settings, loaded, sparse, epochs, ranks))
    if ranks.is_first and json_file is not None:
        json_file.write_text(json.dumps([asdict(epoch) for epoch in epochs_done]))
    leave_ranks(ranks)


def dataset_of(text: str) -> Any:
    """Read ``--dataset``; with the node types where a dataset has them as an option."""
    spec = yaml.safe_load(text)
    name, options = next(iter(spec.items())) if isinstance(spec, dict) and spec else (spec, {})
    return {name: {"heterogeneous": True, **options}} if name == "debian" else spec


def learned_types(dataset: LoadedDataset, spec: Any, wanted: Sequence[str] | None) -> list[str]:
    """Which node types get embeddings.

    Raises:
        ConfigError: A type is not there.
    """
    known = [name for name in node_types(dataset) if name is not None]
    name = next(iter(spec)) if isinstance(spec, dict) else spec
    chosen = list(wanted or WITHOUT_FEATURES.get(name, known))
    for node_type in chosen:
        if node_type not in known:
            raise unknown_name("--learn", node_type, known)
    return chosen


def with_embeddings(
    dataset: LoadedDataset, learned: Sequence[str], width: int, seed: int, ranks: Ranks
) -> LoadedDataset:
    """Put an embedding in the place of the features of some node types; collective."""
    given = dataset.features._features
    features = {key: feature for key, feature in given.items() if key[1] not in learned}
    for node_type in learned:
        num_nodes = dataset.graph.num_nodes[node_type]
        rows = torch.empty(num_nodes, width)
        if ranks.is_first:  # whose rows are everybody's; those of the others cost no memory
            torch.nn.init.normal_(rows, std=0.1, generator=torch.Generator().manual_seed(seed))
        features["node", node_type, "embedding"] = featsync.DynamicFeature(rows)
    return replace(dataset, features=gb.BasicFeatureStore(features))


def embedding(dataset: LoadedDataset, node_type: str) -> Any:
    """Give the `featsync.DynamicFeature` of a node type."""
    return dataset.features._features["node", node_type, "embedding"]


def train(
    settings: Config, dataset: LoadedDataset, sparse: Mapping[str, Any], epochs: int, ranks: Ranks
) -> Iterator[Epoch]:
    """Train and validate; collective."""
    loaders = [featsync.build(settings, dataset=dataset, split=name) for name in ("train", "valid")]
    torch.manual_seed(settings.seed)
    model = GraphSage(model_shape(settings, dataset))
    step = EmbeddingStep(model, OBJECTIVES[settings.task](), ranks.size, sparse)
    feed = delivered_source(settings, dataset)
    for number in range(epochs):
        step.losses, step.num_rows = [], 0
        seconds = train_epoch(step, loaders[0], feed)
        accuracy = validate(step, loaders[1], feed)
        loss, minibatches, rows, memory = sum_over_ranks(
            sum(step.losses), len(step.losses), step.num_rows, private_mb()
        )
        epoch = Epoch(loss / minibatches, accuracy, seconds, rows / seconds, memory)
        if ranks.is_first:
            report(number, epoch)
        yield epoch


def sum_over_ranks(*values: float) -> list[float]:
    """Add up each value over all ranks; collective."""
    totals = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(totals)
    return totals.tolist()


def private_mb() -> float:
    """Memory of this process alone, without what is shared or mapped from files."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:")) / 1024


def report_tables(dataset: LoadedDataset, sparse: Mapping[str, Any]) -> None:
    """Print what lies in memory once on the machine, however many ranks there are."""
    for node_type, optimizer in sparse.items():
        feature = embedding(dataset, node_type)
        row = feature.size().numel()
        table_mb = feature.count() * row * 4 / 1e6
        states = optimizer.states.values()
        state_mb = sum(state.numel() * state.element_size() for state in states) / 1e6
        print(
            f"{feature.count():,} embeddings of {node_type}, width {row}: "
            f"{table_mb:,.0f} MB, the optimizer's state {state_mb:,.0f} MB",
            flush=True,
        )


def report(number: int, epoch: Epoch) -> None:
    """Print one epoch."""
    print(
        f"epoch {number}: {epoch.seconds:.2f} s, loss {epoch.loss:.4f}, validation accuracy "
        f"{epoch.accuracy:.4f}, {epoch.rows_per_second:,.0f} rows/s, private memory "
        f"{epoch.private_mb:,.0f} MB",
        flush=True,
    )


if __name__ == "__main__":
    run(main)
