"""Ids of real minibatches, sampled by GraphBolt for several ranks that share an epoch."""

from __future__ import annotations

from typing import Any, NamedTuple

import dgl.graphbolt as gb
import torch
from id_traces import Ids

from featsync.config import parse
from featsync.loading import load_dataset

DATASETS: dict[str, Any] = {
    "debian": "debian",
    "synthetic": {"synthetic": {"nodes": 1_000_000, "edges": 20_000_000, "width": 1}},
    "tiny": {"synthetic": {"nodes": 4_000, "edges": 40_000, "width": 1}},
}


class Epoch(NamedTuple):
    """How an epoch is sampled.

    Attributes:
        num_ranks: Ranks, to which batches of seeds are dealt in turn.
        steps: Minibatches of each.
        seeds: Of a minibatch.
        fanouts: By hop.
    """

    num_ranks: int
    steps: int
    seeds: int
    fanouts: tuple[int, ...]


class SampledIds(NamedTuple):
    """What the ranks of a job ask for.

    Attributes:
        num_rows: Rows of the table.
        epochs: Of each epoch, rank and step the input nodes, distinct.
    """

    num_rows: int
    epochs: list[list[list[Ids]]]


def sample(dataset: str, epoch: Epoch, num_epochs: int) -> SampledIds:
    """Sample epochs over all nodes, shuffled anew for each.

    Args:
        dataset: A name of `DATASETS`.
        epoch: Its shape; the graph must have nodes for all seeds.
        num_epochs: How many.
    """
    stages = [{"sample_neighbor": {"fanouts": list(epoch.fanouts)}}]
    config = {"dataset": DATASETS[dataset], "batch_size": epoch.seeds, "stages": stages}
    graph = load_dataset(parse(config)).graph
    num_seeds = epoch.num_ranks * epoch.steps * epoch.seeds
    if num_seeds > graph.total_num_nodes:
        raise SystemExit(f"{dataset}: {num_seeds} seeds of {graph.total_num_nodes} nodes")
    epochs = []
    for number in range(num_epochs):
        torch.manual_seed(number)
        seeds = gb.ItemSet(torch.randperm(graph.total_num_nodes)[:num_seeds], names="seeds")
        pipe = gb.ItemSampler(seeds, batch_size=epoch.seeds)
        pipe = pipe.sample_neighbor(graph, list(epoch.fanouts))
        ids = [minibatch.input_nodes.numpy() for minibatch in pipe]
        epochs.append([ids[rank :: epoch.num_ranks] for rank in range(epoch.num_ranks)])
    return SampledIds(graph.total_num_nodes, epochs)
