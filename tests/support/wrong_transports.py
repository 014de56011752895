"""A transport that brings neighbours of the wanted rows; takes all transports' place when imported.

Whatever reads by transports is wrong then, and agrees with itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from featsync.move import Gather
from featsync.transports import TRANSPORTS, Fetches, Landing
from featsync.transports.shared_memory import SharedMemory


class OneRowOff(SharedMemory):
    """Reads the next row of the owner's part."""

    reads_memory = False  # or no transport is asked where memory holds the whole table

    def fetch(self, batch: int, landings: Sequence[Landing]) -> Fetches:
        moves = []
        for move in super().fetch(batch, landings).last:
            assert isinstance(move, Gather)
            rows = torch.remainder(move.rows + 1, len(move.source))
            moves.append(Gather(move.what, move.source, rows, move.target, move.positions))
        return Fetches(last=moves)


for name in TRANSPORTS:
    TRANSPORTS[name] = OneRowOff
