"""What every transport has to do: run these checks on your own before you add it.

Plain functions that raise ``AssertionError``; they need no test framework. `check_transport` runs
them all, on ranks of this process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.device import CpuDevice
from featsync.exchange.engine import Engine
from featsync.exchange.split import split_by_rank
from featsync.partition import OwnerPartition
from featsync.partitioned_table import PartitionedTable
from featsync.plan import FeatureKey
from featsync.testing.local_ranks import local_engines, local_tables
from featsync.testing.rows import bits, random_bits
from featsync.transports.contract import Landing, Pull, Transport

__all__ = ["check_transport"]

_NUM_ROWS = 60
_NUM_IDS = 40
_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
_SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (2, 3), (0,))

Mask = NDArray[np.bool_] | None
Tables = Mapping[FeatureKey, torch.Tensor]


def check_transport(transport: type[Transport], num_ranks: int = 3) -> None:
    """Run all checks.

    Args:
        transport: The class.
        num_ranks: Ranks of this process to run it on, at least 2.

    Raises:
        AssertionError: It breaks a promise; the message says which.
    """
    for check in (_every_kind_of_row, _ahead_and_masked, _several_iterations, _left_early):
        with local_engines(num_ranks) as engines:
            check(transport, engines)


class _Iteration:
    """One iteration of one rank over some tables."""

    def __init__(
        self,
        transport: type[Transport],
        engine: Engine,
        wholes: Tables,
        tables: Sequence[PartitionedTable],
    ) -> None:
        self._engine, self._wholes, self._tables = engine, wholes, tables
        self._session = engine.open_session()
        self._transport = transport(engine, self._session)
        self._announced: dict[int, list[Pull]] = {}

    def announce(self, batch: int, num_ids: int = _NUM_IDS) -> None:
        """Want random rows of all tables."""
        generator = torch.Generator().manual_seed(1000 * self._engine.world.rank + batch)
        pulls = []
        for table in self._tables:
            ids = torch.randint(0, _NUM_ROWS, (num_ids,), generator=generator)
            for part in split_by_rank(str(table.key), [ids], table.parts.partition):
                if part.rank != self._engine.world.rank:
                    assert self._transport.reaches(table, part.rank)
                    pulls.append(Pull(table, part.rank, part.rows, part.positions))
        self._announced[batch] = pulls
        self._transport.announce(batch, pulls)

    def fetch(self, batch: int, mask_of: Callable[[int], Mask] = lambda _: None) -> None:
        """Fetch what was announced, and compare; what is masked out stays as it was."""
        landings = [
            Landing(pull, mask_of(len(pull.rows)), self._target(pull))
            for pull in self._announced.pop(batch)
        ]
        fetches = self._transport.fetch(batch, landings)
        moved = [bits(landing.target).any() for landing in landings]
        assert not any(moved), "fetch() has moved rows; it makes the moves and leaves them undone"
        CpuDevice().execute([*fetches.first, *fetches.last])
        for landing in landings:
            wanted = torch.zeros_like(landing.target)
            ids = landing.pull.table.parts.partition.rows_of(landing.pull.rank)[landing.rows]
            whole = self._wholes[landing.pull.table.key]
            wanted[torch.from_numpy(landing.positions)] = whole[torch.from_numpy(ids)]
            assert torch.equal(bits(landing.target), bits(wanted)), (
                f"rows of {landing.pull.table.key} ({wanted.dtype}) of rank {landing.pull.rank} "
                "are not what they should be, or lie elsewhere"
            )

    def close(self) -> None:
        """End the iteration."""
        self._engine.close_session(self._session)

    @staticmethod
    def _target(pull: Pull) -> torch.Tensor:
        return torch.zeros((_NUM_IDS, *pull.table.kind.shape), dtype=pull.table.kind.dtype)


def _every_kind_of_row(transport: type[Transport], engines: Sequence[Engine]) -> None:
    """Rows of every dtype and shape arrive bit for bit; a minibatch may want none."""
    for iteration in _iterations(transport, engines, _tables(_DTYPES, _SHAPES)):
        iteration.announce(0)
        iteration.announce(1, num_ids=0)
        iteration.announce(2, num_ids=1)
        for batch in range(3):
            iteration.fetch(batch)
        iteration.close()


def _ahead_and_masked(transport: type[Transport], engines: Sequence[Engine]) -> None:
    """Minibatches are announced ahead; of some, only a part is still wanted, or nothing."""
    masks: list[Callable[[int], Mask]] = [
        lambda _: None,
        lambda n: np.arange(n) % 3 == 0,
        lambda n: np.zeros(n, np.bool_),
        lambda n: np.ones(n, np.bool_),
    ]
    iterations = _iterations(transport, engines, _tables(_DTYPES[:4], ((3,),)))
    for batch in range(12 + 5):
        for iteration in iterations:
            if batch < 12:
                iteration.announce(batch)
            if batch >= 5:
                iteration.fetch(batch - 5, masks[batch % 4])
    for iteration in iterations:
        iteration.close()


def _several_iterations(transport: type[Transport], engines: Sequence[Engine]) -> None:
    """Iterations of one rank, nested in each other, do not mix up their rows."""
    tables = _tables((torch.int64,), ((2,),))
    outer = _iterations(transport, engines, tables)
    for iteration in outer:
        iteration.announce(0)
    for inner in _iterations(transport, engines, tables):
        inner.announce(0, num_ids=7)
        inner.fetch(0)
        inner.close()
    for iteration in outer:
        iteration.fetch(0)
        iteration.close()


def _left_early(transport: type[Transport], engines: Sequence[Engine]) -> None:
    """What an abandoned iteration announced reaches no later one."""
    tables = _tables((torch.float32,), ((4,),))
    for iteration in _iterations(transport, engines, tables):
        for batch in range(4):
            iteration.announce(batch)
        iteration.fetch(0)
        iteration.close()
    for iteration in _iterations(transport, engines, tables):
        iteration.announce(0, num_ids=9)
        iteration.fetch(0)
        iteration.close()


def _tables(dtypes: Sequence[torch.dtype], shapes: Sequence[tuple[int, ...]]) -> Tables:
    """Tables of random bits."""
    return {
        FeatureKey("node", str(shape), str(dtype)): random_bits(dtype, (_NUM_ROWS, *shape))
        for dtype in dtypes
        for shape in shapes
    }


def _iterations(
    transport: type[Transport], engines: Sequence[Engine], wholes: Tables
) -> list[_Iteration]:
    """Split tables over the ranks, and begin an iteration on each of them."""
    owners = np.random.default_rng(0).integers(0, len(engines), _NUM_ROWS)
    partition = OwnerPartition(owners, len(engines))
    by_rank = zip(
        *(local_tables(key, whole, partition, engines) for key, whole in wholes.items()),
        strict=True,
    )
    return [
        _Iteration(transport, engine, wholes, tables)
        for engine, tables in zip(engines, by_rank, strict=True)
    ]
