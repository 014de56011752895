"""Programs of reads and writes of rows, and what running them one step after the other gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

# Rows and values of one call.
Call = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Program:
    """What ranks read and write.

    Attributes:
        start: ``(num_rows, *row_shape)``, the table at first.
        merge: How entries of one row are merged.
        wants: By rank and step the rows that are read.
        calls: By rank and step what is written afterwards.
    """

    start: torch.Tensor
    merge: str
    wants: Sequence[Sequence[torch.Tensor]]
    calls: Sequence[Sequence[Sequence[Call]]]

    @property
    def num_ranks(self) -> int:
        """How many ranks take part."""
        return len(self.wants)

    @property
    def num_steps(self) -> int:
        """Steps of the rank that has the most."""
        return max(len(steps) for steps in self.wants)


def sequential(program: Program) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """All ranks read a step, all write it, then comes the next.

    Returns:
        What each rank reads in each step; and the table before each step and after the last.
    """
    table = program.start.clone()
    read: list[list[torch.Tensor]] = [[] for _ in program.wants]
    tables = [table]
    for step in range(program.num_steps):
        for rank, wants in enumerate(program.wants):
            if step < len(wants):
                read[rank].append(table[wants[step]])
        calls = [call for steps in program.calls if step < len(steps) for call in steps[step]]
        table = merged(table, calls, program.merge)
        tables.append(table)
    return read, tables


def merged(table: torch.Tensor, calls: Sequence[Call], merge: str) -> torch.Tensor:
    """Merge entries row by row, in plain words: no rounds, no shares."""
    entries: dict[int, list[torch.Tensor]] = {}
    for rows, values in calls:
        for row, value in zip(rows.tolist(), values, strict=True):
            entries.setdefault(row, []).append(value)
    after = table.clone()
    for row, values in entries.items():
        if merge == "last" or len(values) == 1:
            after[row] = values[-1]
            continue
        start = table[row]
        total = torch.zeros_like(start)
        for value in values:
            total = total + (value - start)
        after[row] = start + (total if merge == "sum" else total / len(values))
    return after


def random_program(
    seed: int,
    num_ranks: int,
    merge: str,
    num_steps: int = 5,
    num_rows: int = 23,
    width: int = 3,
    dtype: torch.dtype = torch.float32,
    writes_first: bool = True,
) -> Program:
    """Make a program in which ranks often write the same rows, and some read what nobody writes.

    Args:
        seed: Of all choices.
        num_ranks: How many.
        merge: How entries are merged.
        num_steps: At most; ranks differ.
        num_rows: Of the table.
        width: Of a row.
        dtype: Of its elements.
        writes_first: Whether all write something in their first step.
    """
    random = np.random.default_rng(seed)

    def rows(least: int) -> torch.Tensor:
        # Some rows are popular.
        count = int(random.integers(least, 2 * num_rows))
        return torch.from_numpy((num_rows * random.random(count) ** 2).astype(np.int64))

    def values(count: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal((count, width))).to(dtype)

    wants, calls = [], []
    for rank in range(num_ranks):
        steps = num_steps if rank == 0 else int(random.integers(0, num_steps + 1))
        wants.append([rows(0) for _ in range(steps)])
        of_rank = []
        for step in range(steps):
            is_first = step == 0 and writes_first
            count = int(random.integers(1 if is_first else 0, 3))
            written = [rows(1 if is_first else 0) for _ in range(count)]
            of_rank.append([(ids, values(len(ids))) for ids in written])
        calls.append(of_rank)
    return Program(values(num_rows), merge, wants, calls)
