"""What a rank sends to the others and gets from them: messages and bytes, by what they are for."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Amount", "Meter", "Traffic"]


class Amount(NamedTuple):
    """Messages, and the bytes of all of them together."""

    messages: int = 0
    num_bytes: int = 0

    def __sub__(self, earlier: Amount) -> Amount:
        """What came since."""
        return Amount(self.messages - earlier.messages, self.num_bytes - earlier.num_bytes)


@dataclass(frozen=True)
class Traffic:
    """What went over the links of one rank so far, by kind.

    ``announce``: ids of rows that will be wanted. ``order``: which of them to send now. ``sent``:
    the answer, that they are under way and how they are arranged. ``rows``: themselves.
    ``dynamic``: all about rows that change, with the rows. Other kinds
    are seldom: ``forget`` at the end of an iteration, signs of life, errors.

    Bytes are those on the sockets, with all headers of featsync, none of TCP's; of ``rows`` those
    that were handed to the backend, which adds some of its own. Rows that are read out of shared
    memory are no message.

    Attributes:
        sent: By kind.
        received: By kind.
    """

    sent: Mapping[str, Amount] = field(default_factory=dict)
    received: Mapping[str, Amount] = field(default_factory=dict)

    def __sub__(self, earlier: Traffic) -> Traffic:
        """What went since ``earlier``."""
        return Traffic(
            _difference(self.sent, earlier.sent), _difference(self.received, earlier.received)
        )


class Meter:
    """Counts; methods may be called by any thread, but not by a finalizer: they take a lock."""

    def __init__(self) -> None:
        self._sent: dict[str, Amount] = {}
        self._received: dict[str, Amount] = {}
        self._counting = threading.Lock()

    def count_sent(self, kind: str, num_bytes: int, messages: int = 1) -> None:
        """Something was sent."""
        with self._counting:
            _add(self._sent, kind, num_bytes, messages)

    def count_received(self, kind: str, num_bytes: int, messages: int = 1) -> None:
        """Something came."""
        with self._counting:
            _add(self._received, kind, num_bytes, messages)

    def read(self) -> Traffic:
        """What was counted so far; stays as it is."""
        with self._counting:
            return Traffic(dict(self._sent), dict(self._received))


def _add(amounts: dict[str, Amount], kind: str, num_bytes: int, messages: int) -> None:
    before = amounts.get(kind, Amount())
    amounts[kind] = Amount(before.messages + messages, before.num_bytes + num_bytes)


def _difference(now: Mapping[str, Amount], earlier: Mapping[str, Amount]) -> Mapping[str, Amount]:
    return {kind: amount - earlier.get(kind, Amount()) for kind, amount in now.items()}
