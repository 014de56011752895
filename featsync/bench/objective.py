"""What is learned from the seeds: a loss, and a score to validate with, by task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from featsync.bench.model import NodeType, source_of, target_of
from featsync.config import Task


class Objective(Protocol):
    """Turns the model's output for one minibatch into a loss or a score."""

    def loss(self, minibatch: Any, output: Mapping[NodeType, Tensor]) -> Tensor:
        """Mean loss over the seeds, a scalar; 0 without seeds."""
        ...

    def score(self, minibatch: Any, output: Mapping[NodeType, Tensor]) -> tuple[float, int]:
        """Sum of the seeds' scores, and how many seeds that are."""
        ...


class NodeClassification:
    """Cross entropy; scored by how many seeds got the right class."""

    def loss(self, minibatch: Any, output: Mapping[NodeType, Tensor]) -> Tensor:
        """Mean cross entropy."""
        logits, labels = self._pair(minibatch, output)
        return functional.cross_entropy(logits, labels) + _touch(output)

    def score(self, minibatch: Any, output: Mapping[NodeType, Tensor]) -> tuple[float, int]:
        """Seeds classified right."""
        logits, labels = self._pair(minibatch, output)
        return float((logits.argmax(1) == labels).sum()), len(labels)

    def _pair(self, minibatch: Any, output: Mapping[NodeType, Tensor]) -> tuple[Tensor, Tensor]:
        by_type = _typed(minibatch.labels)
        positions = _typed(minibatch.compacted_seeds)
        # Seeds in another field than `seeds` are not reordered by the sampler.
        chosen = [
            output[name] if positions.get(name) is None else output[name][positions[name]]
            for name in by_type
        ]
        return torch.cat(chosen), torch.cat(list(by_type.values())).long()


class LinkPrediction:
    """Binary cross entropy of dot products; scored by the area under the ROC curve."""

    def loss(self, minibatch: Any, output: Mapping[NodeType, Tensor]) -> Tensor:
        """Mean binary cross entropy over positive and negative pairs."""
        products, labels = self._pair(minibatch, output)
        return functional.binary_cross_entropy_with_logits(products, labels) + _touch(output)

    def score(self, minibatch: Any, output: Mapping[NodeType, Tensor]) -> tuple[float, int]:
        """Area under the curve of this minibatch, weighted by its pairs."""
        products, labels = self._pair(minibatch, output)
        return area_under_curve(products, labels) * len(labels), len(labels)

    def _pair(self, minibatch: Any, output: Mapping[NodeType, Tensor]) -> tuple[Tensor, Tensor]:
        labels = _typed(minibatch.labels)
        products = []
        for relation, pairs in _typed(minibatch.compacted_seeds).items():
            sources = output[source_of(relation)][pairs[:, 0]]
            targets = output[target_of(relation)][pairs[:, 1]]
            products.append((sources * targets).sum(1))
        return torch.cat(products), torch.cat([labels[name] for name in labels]).float()


OBJECTIVES: dict[Task, type[NodeClassification] | type[LinkPrediction]] = {
    "node_classification": NodeClassification,
    "link_prediction": LinkPrediction,
}


def area_under_curve(values: Tensor, labels: Tensor) -> float:
    """Share of (positive, negative) pairs that ``values`` orders right; ties count half.

    Example:
        >>> area_under_curve(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([1.0, 0.0, 1.0]))
        0.5
    """
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    # The mean rank of equal values, from 1.
    ranks = (counts.cumsum(0) - (counts - 1) / 2.0)[inverse].double()
    positive = labels > 0
    num_positive = int(positive.sum())
    num_negative = len(labels) - num_positive
    if not num_positive or not num_negative:
        return 0.5
    least = num_positive * (num_positive + 1) / 2
    return float((ranks[positive].sum() - least) / (num_positive * num_negative))


def _touch(output: Mapping[NodeType, Tensor]) -> Tensor:
    """Zero, but it depends on every output: DDP wants a gradient for every parameter."""
    return torch.stack([value.sum() for value in output.values()]).sum() * 0.0


def _typed(value: Any) -> Mapping[str | None, Any]:
    return value if isinstance(value, Mapping) else {None: value}
