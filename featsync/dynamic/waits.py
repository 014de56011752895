"""Waiting for the ranks that share a table: with a limit, and by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from featsync.dynamic.board import Board
from featsync.errors import PeerError, PeerTimeoutError
from featsync.host_lock import HostLock

__all__ = ["PATIENCE", "Neighbours", "Waits"]

PATIENCE = 30.0  # times the timeout, for ranks that live

Watch = Callable[[int], Callable[[], None]]


@dataclass(frozen=True)
class Neighbours:
    """The other ranks that a table is shared with.

    Attributes:
        rank: This one.
        name_of: Names a rank for people.
        watch: Begins to wait for a rank; what it returns raises once the wait is in vain.
        timeout: Seconds without a sign of life after which a rank is given up.
    """

    rank: int
    name_of: Callable[[int], str]
    watch: Watch
    timeout: float


class Waits:
    """Waits for signals of a board.

    Args:
        board: Of the feature.
        lock: Guards it.
        others: Who advances the signals.
    """

    def __init__(self, board: Board, lock: HostLock, others: Neighbours) -> None:
        self._board, self._lock, self._others = board, lock, others

    def check(self) -> None:
        """Raise if the table is lost.

        Raises:
            PeerError: A rank failed in the middle of a commit.
        """
        if (rank := self._board.broken_by) is not None:
            name = self._others.name_of(rank)
            raise PeerError(
                f"{name} failed while it changed rows: some hold a step's values and some do not, "
                "so nobody may use the table any more. Look at that rank first, and go on from a "
                "checkpoint.",
                name,
            )

    def wait(
        self, signal: int, at_least: int, rank: int, what: str, patience: float = PATIENCE
    ) -> None:
        """Block until a rank has advanced a signal; see `wait_for_all`."""
        self.wait_for_all(signal, at_least, lambda: [rank], what, patience)

    def wait_for_all(
        self,
        signal: int,
        at_least: int,
        ranks: Callable[[], Sequence[int]],
        what: str,
        patience: float = PATIENCE,
    ) -> None:
        """Block until a signal is advanced for which some ranks have to do something.

        Args:
            signal: Which.
            at_least: Count to wait for.
            ranks: Who still has to do it; asked again and again.
            what: What they are to do, in words.
            patience: How many times the timeout to wait for ranks that live.

        Raises:
            PeerError: One of them has ended, or the table is lost.
            PeerTimeoutError: It gave no sign of life, or did not come for very long.
        """
        signals = self._board.signals
        if signals.value(signal) >= at_least:
            return
        looks = {rank: self._others.watch(rank) for rank in ranks()}
        limit = patience * self._others.timeout

        def check() -> None:
            self.check()
            with self._lock.hold(self._others.timeout):
                self._board.settle()
            for rank in ranks():
                if rank not in looks:
                    looks[rank] = self._others.watch(rank)
                looks[rank]()

        if not signals.wait(signal, at_least, limit, check):
            name = " and ".join(map(self._others.name_of, ranks()))
            raise PeerTimeoutError(
                f"waited {limit:g} s for {name} to {what}: it lives, but does not. All ranks that "
                "train take part in every epoch: if that one has nothing to write, an update of "
                "no rows in the first step says so. For validation beside training, give "
                "sync_feature(staleness='any').",
                name,
            )
