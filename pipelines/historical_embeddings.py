"""A deep GraphSAGE that samples one hop: what lies further comes from a history of each node.

python pipelines/historical_embeddings.py --layers 3
torchrun --nproc-per-node 2 pipelines/historical_embeddings.py

After GNNAutoScale: each layer but the last has a table with its last output for every node. A
minibatch *pulls* the rows of its neighbours, and *pushes* those that it computed for its seeds. The
tables are dynamic features, so the pull happens ahead of time and still shows every push before it.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import Annotated, Any

import dgl.graphbolt as gb
import torch
import torch.distributed as dist
import typer
from loops import join_ranks, leave_ranks, run
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import featsync
from featsync import config as configuration
from featsync.bench.model import SageLayer
from featsync.loading import LoadedDataset, load_dataset

_UNLABELLED = -100  # which cross entropy leaves out


class HistoricalSage(nn.Module):
    """A `SageLayer` for each width; all of them on the same sampled layer."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            SageLayer({None: width}, {}, (None,), following)
            for width, following in itertools.pairwise(widths)
        )

    def forward(
        self, subgraph: Any, features: Tensor, histories: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute the seeds' outputs.

        Args:
            subgraph: The sampled layer, whose first nodes are its seeds.
            features: ``(num_nodes, width)``.
            histories: Of each layer but the last, what was pushed ``(num_nodes, width)``.

        Returns:
            ``(num_seeds, num_outputs)``, and of each layer but the last ``(num_seeds, width)``.
        """
        hidden, fresh = features, []
        for layer, history in zip(self.layers, histories, strict=False):
            output = functional.relu(layer(subgraph, {None: hidden}, {})[None])
            fresh.append(output)
            hidden = torch.cat([output, history[len(output) :]])
        return self.layers[-1](subgraph, {None: hidden}, {})[None], fresh


def main(
    layers: Annotated[int, typer.Option(min=1)] = 2,
    width: Annotated[int, typer.Option(min=1)] = 64,
    epochs: Annotated[int, typer.Option(min=1)] = 4,
    batch_size: Annotated[int, typer.Option(min=1)] = 1024,
    staleness: Annotated[int, typer.Option(min=0)] = 0,
    seed: int = 0,
    threads: int = 1,
) -> None:
    """Train, and print loss and validation accuracy of each epoch."""
    ranks = join_ranks(threads)
    names = [f"history_{number}" for number in range(1, layers)]
    keys = {"node_feature_keys": ["feat", *names]}
    stages = [
        {"sample_neighbor": {"fanouts": [10]}},
        {"plan_feature": keys},
        {"sync_feature": {"staleness": staleness}},
    ]
    settings = configuration.parse(
        {"dataset": "debian", "batch_size": batch_size, "seed": seed, "stages": stages}
    )
    dataset = with_histories(load_dataset(settings), names, width)
    loader = featsync.build(settings, dataset=dataset)
    valid_loader = featsync.build(settings, dataset=dataset, split="valid")

    torch.manual_seed(seed)
    feature_width = dataset.features.size("node", None, "feat")[0]
    model = HistoricalSage([feature_width, *[width] * (layers - 1), dataset.num_classes])
    trained = DistributedDataParallel(model) if ranks.size > 1 else model
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        # Ranks may have different numbers of minibatches.
        with Join([trained]) if ranks.size > 1 else contextlib.nullcontext():
            losses = [
                train_step(minibatch, trained, optimizer, dataset.features, names)
                for minibatch in loader
            ]
        accuracy = validate(model, valid_loader, names)
        if ranks.is_first:
            loss = sum(losses) / len(losses)
            print(f"epoch {epoch}: loss {loss:.4f}, validation accuracy {accuracy:.4f}", flush=True)
    leave_ranks(ranks)


def with_histories(dataset: LoadedDataset, names: list[str], width: int) -> LoadedDataset:
    """Add the tables, and have every node be a seed once an epoch, labelled or not; collective."""
    features = dict(dataset.features._features)
    num_nodes = dataset.graph.total_num_nodes
    for name in names:
        features["node", None, name] = featsync.DynamicFeature(torch.zeros(num_nodes, width))
    labels = torch.full((num_nodes,), _UNLABELLED)
    seeds, known = dataset.items["train"][:]
    labels[seeds] = known
    everybody = gb.ItemSet((torch.arange(num_nodes), labels), names=("seeds", "labels"))
    return replace(
        dataset,
        features=gb.BasicFeatureStore(features),
        items={**dataset.items, "train": everybody},
    )


def outputs(model: nn.Module, minibatch: Any, names: list[str]) -> tuple[Tensor, list[Tensor]]:
    """Give the output for each label of a minibatch, and what there is to push."""
    rows = minibatch.node_features
    histories = [rows[name] for name in names]
    logits, fresh = model(minibatch.sampled_subgraphs[0], rows["feat"], histories)
    return logits[minibatch.compacted_seeds], fresh


def train_step(
    minibatch: Any, model: nn.Module, optimizer: Any, features: Any, names: list[str]
) -> float:
    """Train on a minibatch, and push; give the loss."""
    logits, fresh = outputs(model, minibatch, names)
    loss = functional.cross_entropy(logits, minibatch.labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seeds = minibatch.sampled_subgraphs[0].original_column_node_ids
    for name, rows in zip(names, fresh, strict=True):
        features.update("node", None, name, rows, seeds)
    return loss.item()


def validate(model: nn.Module, loader: Any, names: list[str]) -> float:
    """Give the share of seeds of all ranks that are classified right; pushes nothing."""
    right = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for minibatch in loader:
            logits, _ = outputs(model, minibatch, names)
            hits = (logits.argmax(1) == minibatch.labels).sum()
            right += torch.tensor([float(hits), len(logits)], dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(right)
    return float(right[0] / right[1])


if __name__ == "__main__":
    run(main)
