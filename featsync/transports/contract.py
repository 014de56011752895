"""What a transport promises: rows of other ranks' parts, where and when they are wanted.

For each minibatch a loader first says which rows it will want (`Transport.announce`, as many
minibatches ahead as it looks), later asks for those that it still wants (`Transport.fetch`). What
is to be done for that comes back as moves, which a worker carries out::

    worker   announce(n+K) │ first of n+1: ask │ own rows │ last of n+1: put in place
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.exchange.engine import Engine
from featsync.move import Move
from featsync.partitioned_table import PartitionedTable

__all__ = ["Fetches", "Pull", "Transport"]


@dataclass(frozen=True, eq=False)
class Pull:
    """Rows that one minibatch wants of one rank's part of one table, each once.

    Attributes:
        table: The table.
        rank: Who holds them; another rank than this.
        rows: ``(n,)`` int64, numbers among the rows of that rank, rising: none comes twice.
        positions: ``(n,)`` int64, where each goes in the feature's delivered rows. What it is
            copied to from there, where it is wanted in several places, is none of a transport's
            business.
    """

    table: PartitionedTable
    rank: int
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Landing:
    """What is still wanted of a `Pull`, and where it goes.

    Attributes:
        pull: What was announced.
        mask: ``(n,)`` bool, which of its rows are wanted; ``None``: all.
        target: ``(num_rows, *row_shape)``, the delivered tensor, indexed by positions.
    """

    pull: Pull
    mask: NDArray[np.bool_] | None
    target: torch.Tensor

    @property
    def rows(self) -> NDArray[np.int64]:
        """The rows that are wanted."""
        return self.pull.rows if self.mask is None else self.pull.rows[self.mask]

    @property
    def positions(self) -> NDArray[np.int64]:
        """Where they go."""
        return self.pull.positions if self.mask is None else self.pull.positions[self.mask]


class Fetches(NamedTuple):
    """What brings the rows of one minibatch.

    Attributes:
        first: To be carried out before this rank's own rows are read, behind what the worker has
            to do still.
        last: After it: the rows are in place when it is done.
    """

    first: Sequence[Move] = ()
    last: Sequence[Move] = ()


class Transport(ABC):
    """Brings the rows of one loader's iteration; used by one thread at a time, but for `close`.

    Args:
        engine: Of the group that the tables are partitioned over.
        session: The iteration's number with that engine; whoever opened it closes it.

    Attributes:
        reads_memory: Whether rows are read straight from the memory of their owner, which costs a
            rank no more than its own: no cache in memory can save anything.
    """

    reads_memory: ClassVar[bool] = False

    def __init__(self, engine: Engine, session: int) -> None:
        self.engine = engine
        self.session = session

    @staticmethod
    @abstractmethod
    def reaches(table: PartitionedTable, rank: int) -> bool:
        """Whether this transport can bring a rank's rows of a table."""

    @abstractmethod
    def announce(self, batch: int, pulls: Sequence[Pull]) -> None:
        """Say which rows a minibatch will want; does not wait. Called in order of minibatches."""

    @abstractmethod
    def fetch(self, batch: int, landings: Sequence[Landing]) -> Fetches:
        """Make the moves that bring rows which were announced; no target is written on return.

        Others may be asked to begin at once; the moves of the minibatch before may not be done.

        Args:
            batch: The minibatch.
            landings: One for each pull that was announced for it, in the same order.
        """
