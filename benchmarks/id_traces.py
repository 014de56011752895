"""Streams of batches of ids: made up, or recorded with a real sampler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class IdTrace:
    """The batches of ids that one feature is asked for.

    Attributes:
        name: Where it comes from.
        num_rows: Rows of the feature's table.
        batches: Distinct ids each, in the order of the sampler.
    """

    name: str
    num_rows: int
    batches: list[Ids]


def power_law(num_rows: int, draws: int, seed: int) -> Iterator[Ids]:
    """Make batches without end, in which a row of rank r comes as often as r to the power -2/3.

    Args:
        num_rows: Rows of the table; which of them are frequent is random.
        draws: Ids drawn for the largest batch. Batches vary from 40 % of that to all of it, and an
            id that is drawn again stays where it was drawn first, as a sampler has it.
        seed: Seed of everything.
    """
    rng = np.random.default_rng(seed)
    row_of_rank = rng.permutation(num_rows)
    while True:
        size = int(draws * rng.uniform(0.4, 1.0))
        ranks = (num_rows * rng.random(size) ** 3).astype(np.int64)
        distinct, first = np.unique(ranks, return_index=True)
        yield row_of_rank[distinct[np.argsort(first)]]


def load_traces(path: Path) -> list[IdTrace]:
    """Read a file of recorded traces, one of each feature in it.

    The file is an ``.npz``. For each feature key such as ``node/None/feat`` it holds
    ``<key>/ids`` (int64, all batches one after the other), ``<key>/offsets`` (int64, where each
    batch begins, and the end) and ``<key>/num_rows`` (int64, a scalar).
    """
    with np.load(path) as arrays:
        keys = sorted(name[: -len("/ids")] for name in arrays.files if name.endswith("/ids"))
        if not keys:
            raise SystemExit(f"{path} holds no array named <feature key>/ids; found {arrays.files}")
        traces = []
        for key in keys:
            ids = arrays[f"{key}/ids"].astype(np.int64)
            batches = np.split(ids, arrays[f"{key}/offsets"][1:-1])
            num_rows = int(arrays[f"{key}/num_rows"])
            traces.append(IdTrace(f"{path.name}:{key}", num_rows, batches))
    return traces
