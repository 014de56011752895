"""What the Syncer asks of a worker: carry out moves in the order in which they were submitted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from featsync.move import Move


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

    Used by one thread at a time. A list that failed does not stop later ones.
    """

    @abstractmethod
    def submit(self, moves: Sequence[Move]) -> Ticket:
        """Accept moves and return; only `inline` leaves them until they are waited for.

        Raises:
            ConfigError: A move cannot be done by this kind of worker; the message names the feature.
        """

    @abstractmethod
    def close(self) -> None:
        """End the worker's thread or process; idempotent, waits for nothing that can hang.

        May be called from a finalizer: takes no lock that user code can hold.
        """
