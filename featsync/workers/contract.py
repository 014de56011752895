"""What the Syncer asks of a worker: carry out moves in the order in which they were submitted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from featsync.move import Move
from featsync.pool import private_block
from featsync.table import Table


class Ticket(ABC):
    """One submitted list of moves."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the moves are done.

        Raises:
            FeatureError: A row number lies outside its table; the message names feature, id, size.
            PeerError: A helper process died or gave no sign of life in time.
            Exception: Whatever a foreign ``read`` raised, as it was raised.
        """

    @property
    @abstractmethod
    def seconds(self) -> float:
        """How long the moves took; 0.0 before they are done."""


class Worker(ABC):
    """Carries out moves, one list after the other, in the order of submission.

    Made by ``WORKERS[name](device, timeout)``. Used by one thread at a time. A list that failed
    does not stop later ones.

    Attributes:
        runs_calls: Whether it can run code of this process (`Call`), not only copy rows.
        runs_ahead: Whether it works while its caller does something else.
    """

    runs_calls = True
    runs_ahead = True

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Make a block, ``(num_bytes,)`` uint8, of memory that this worker can fill."""
        return private_block(num_bytes)

    def admit(self, table: Table) -> None:  # noqa: B027 - most workers serve every table
        """Accept a table as a source of later moves.

        Raises:
            ConfigError: This kind of worker cannot read it; the message names the feature.
        """

    @abstractmethod
    def submit(self, moves: Sequence[Move], is_watched: bool = False) -> Ticket:
        """Accept moves and return; only `inline` leaves them until they are waited for.

        Args:
            moves: In the order to be done.
            is_watched: Whether moves among them wait for other ranks. They watch over these
                themselves, and name who is late, so their ticket is waited for without a limit.

        Raises:
            ConfigError: This kind of worker cannot do a move; the message names the feature.
        """

    def carry_out(self) -> None:  # noqa: B027 - most workers do so anyway
        """Have what was submitted done even if nobody waits for it: another rank does."""

    @abstractmethod
    def close(self) -> None:
        """End the worker's thread or process; idempotent, waits for nothing that can hang.

        May be called from a finalizer: takes no lock that user code can hold.
        """
