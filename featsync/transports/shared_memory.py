"""Transport ``shared_memory``: this rank copies rows out of the memory that a peer shares.

One-sided, for ranks of one machine: the owner's interpreter has no part in it, and there is no
message, so there is nothing to announce and nobody to wait for. Static rows are there before the
first iteration, and stay as they are::

    owner                      any rank of the machine
    part ── shared at build ─▶ mapped, gathered from
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from featsync.move import Gather
from featsync.partitioned_table import PartitionedTable
from featsync.transports.contract import Fetches, Landing, Pull, Transport

__all__ = ["SharedMemory"]


class SharedMemory(Transport):
    """Gathers from parts that this process has mapped."""

    reads_memory = True

    @staticmethod
    def reaches(table: PartitionedTable, rank: int) -> bool:
        """The ranks of this machine."""
        return rank in table.parts.readable

    def announce(self, batch: int, pulls: Sequence[Pull]) -> None:
        """Nobody needs to know."""

    def fetch(self, batch: int, landings: Sequence[Landing]) -> Fetches:
        """Make one gather for each part."""
        return Fetches(
            last=[
                Gather(
                    str(landing.pull.table.key),
                    landing.pull.table.parts.readable[landing.pull.rank],
                    torch.from_numpy(landing.rows),
                    landing.target,
                    torch.from_numpy(landing.positions),
                )
                for landing in landings
            ]
        )
