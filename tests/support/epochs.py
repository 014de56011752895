"""Whole epochs: every minibatch compared with stock, its seeds, and the weights that it trains."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import dgl.graphbolt as gb
import numpy as np
import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterDataPipe

from support.graphs import assert_as_stock, ring20, ring_store, seeds_of, stock_loader
from support.loader_workers import end_loader_workers


def ring_seeds(num_batches: int = 10) -> list[list[int]]:
    """Seeds of the minibatches of `ring_batches`."""
    return [[2 * i % 20, (2 * i + 1) % 20] for i in range(num_batches)]


def split_batches(num_items: int, **options: Any) -> IterDataPipe[Any]:
    """Minibatches of ring20 of two seeds each, split over the ranks."""
    items = gb.ItemSet(torch.arange(num_items) % 20, names="seed_nodes")
    return gb.DistributedItemSampler(items, batch_size=2, **options).sample_neighbor(
        ring20(), [2, 2]
    )


def plain_batches(rank: int, shuffle: bool) -> IterDataPipe[Any]:
    """Minibatches of ring20 of two seeds each, by a sampler that knows of no ranks."""
    items = gb.ItemSet(torch.arange(20), names="seed_nodes")
    sampler = gb.ItemSampler(items, batch_size=2, shuffle=shuffle)
    sampler._rng = np.random.default_rng(5 + rank)  # as unalike as stock's own
    return sampler.sample_neighbor(ring20(), [2, 2])


def epoch(loader: Iterable[Any], store: Any, **keys: Any) -> list[Any]:
    """Seeds of one epoch, each minibatch as stock reads it for its own ids.

    Args:
        loader: Of minibatches.
        store: Of stock features.
        keys: ``nodes`` and ``edges``; those of the ring where there are none.
    """
    keys = keys or {"nodes": ["x"], "edges": ["w"]}
    seeds = []
    for minibatch in loader:
        assert_as_stock(minibatch, store, **keys)
        seeds.append(seeds_of(minibatch))
    return seeds


def stock_epoch(source: IterDataPipe[Any], num_workers: int = 0) -> list[Any]:
    """Seeds of one epoch of the stock loader."""
    loader = stock_loader(source, ring_store(), ["x"], num_workers=num_workers)
    seeds = [seeds_of(minibatch) for minibatch in loader]
    end_loader_workers()
    return seeds


def ddp() -> DistributedDataParallel:
    """A model of one weight and one bias."""
    return DistributedDataParallel(torch.nn.Linear(1, 1))


def train(loader: Iterable[Any]) -> list[torch.Tensor]:
    """Weights after two epochs of a model that every rank steps alike."""
    torch.manual_seed(0)
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        with Join([model]):
            for minibatch in loader:
                optimizer.zero_grad()
                model(minibatch.node_features["x"]).square().mean().backward()
                optimizer.step()
    return [parameter.detach().clone() for parameter in model.module.parameters()]
