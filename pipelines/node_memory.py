"""A memory for each node of a stream of events, and who meets whom next: a small TGN.

Each node has a row in three tables:

- ``memory``: what is remembered of it; changed by the message in its mailbox when it is next seen,
- ``mail``: its mailbox, the last message: both memories of the last event that it took part in,
- ``clock``: up to when its memory goes, and the time of that message (-1: there is none yet).

The model computes; it reads rows and says what to write, and knows nothing of where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

TABLES = ("memory", "mail", "clock")
_NO_MAIL = -1.0
_TIME_WIDTH = 8
_LONGEST_S = 1e9  # half a human life
_SCALE = 0.1  # the logarithm of seconds is at most about 20


def start_tables(num_nodes: int, width: int, seed: int) -> dict[str, Tensor]:
    """Make the tables at the start of a stream.

    Memories are random, small and all different: else two nodes that nothing happened to could not
    be told apart, and no message would say who it is from.

    Returns:
        ``memory`` ``(num_nodes, width)`` and ``mail`` ``(num_nodes, 2 * width)`` float32, ``clock``
        ``(num_nodes, 2)`` float64.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        "memory": torch.randn(num_nodes, width, generator=generator) * 0.3,
        "mail": torch.zeros(num_nodes, 2 * width),
        "clock": torch.tensor([0.0, _NO_MAIL], dtype=torch.float64).repeat(num_nodes, 1),
    }


class NodeMemory(nn.Module):
    """Bring memories up to date, and say how likely pairs of nodes meet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # From a second to decades. No buffer, which DDP would send around in each step.
        self._rates = torch.logspace(0, -np.log10(_LONGEST_S), _TIME_WIDTH)
        self.update = nn.GRUCell(2 * width + _TIME_WIDTH, width)
        self.decode = nn.Sequential(
            nn.Linear(3 * width + 2, 2 * width), nn.ReLU(), nn.Linear(2 * width, 1)
        )

    def forward(
        self, rows: Mapping[str, Tensor], pairs: Tensor, times: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Judge pairs of nodes.

        Args:
            rows: Of each table, the rows of the ``(num_nodes,)`` nodes of the minibatch.
            pairs: ``(num_pairs, 2)`` int64, positions among those nodes.
            times: ``(num_pairs,)`` float64, when they would meet.

        Returns:
            ``(num_pairs,)`` logits, and ``(num_nodes, width)``, the memories up to date.
        """
        memory = self._current(rows)
        own, other = memory[pairs[:, 0]], memory[pairs[:, 1]]
        idle = torch.log1p(times[:, None] - rows["clock"][:, 1][pairs]).float() * _SCALE
        logits = self.decode(torch.cat([own, other, own * other, idle], dim=1))
        return logits.squeeze(1), memory

    def _current(self, rows: Mapping[str, Tensor]) -> Tensor:
        since, mail_time = rows["clock"].unbind(1)
        passed = (mail_time - since).float()[:, None] * self._rates
        changed = self.update(torch.cat([rows["mail"], passed.cos()], dim=1), rows["memory"])
        return torch.where((mail_time == _NO_MAIL)[:, None], rows["memory"], changed)


def rows_after(
    rows: Mapping[str, Tensor], memory: Tensor, pairs: Tensor, times: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the events of a minibatch leave behind: memories up to date, and new mail.

    Args:
        rows: The rows that were read.
        memory: ``(num_nodes, width)``, the memories up to date.
        pairs: ``(num_events, 2)`` int64, positions of the nodes that met, in order of time.
        times: ``(num_events,)`` float64.

    Returns:
        ``(num_written,)`` int64, positions of the nodes that met anybody, and the rows of each
        table to write there. Of several events of one node the last counts.
    """
    nodes, others = pairs.flatten(), pairs.flip(1).flatten()
    # By hand, since which of two equal positions an indexed assignment keeps is not defined.
    last = torch.full((len(memory),), -1).scatter_reduce(
        0, nodes, torch.arange(len(nodes)), "amax", include_self=True
    )
    written = torch.nonzero(last >= 0).squeeze(1)
    last = last[written]
    read_up_to = rows["clock"][written, 1].clamp(min=0.0)
    return written, {
        "memory": memory[written],
        "mail": torch.cat([memory[written], memory[others[last]]], dim=1),
        "clock": torch.stack([read_up_to, times.repeat_interleave(2)[last]], dim=1),
    }


def average_precision(scores: Tensor, labels: Tensor) -> float:
    """Mean, over the positives, of the precision among all that score at least as high.

    Args:
        scores: ``(num_scores,)``.
        labels: ``(num_scores,)``, 1 for positives and 0 for negatives.

    Returns:
        From 0 to 1; NaN without positives.

    Example:
        >>> average_precision(torch.tensor([0.9, 0.8, 0.7]), torch.tensor([1, 0, 1]))
        0.8333333333333333
    """
    if not labels.any():
        return float("nan")
    order = np.argsort(-scores.numpy(), kind="stable")
    sorted_scores = scores.numpy()[order]
    positives = np.cumsum(labels.numpy()[order].astype(np.float64))
    # Equal scores are one threshold: all of them are in, or none.
    ends = np.append(np.flatnonzero(np.diff(sorted_scores)), len(sorted_scores) - 1)
    found = np.diff(positives[ends], prepend=0.0)
    return float((positives[ends] / (ends + 1) * found).sum() / positives[-1])
