"""The part of a feature that another machine holds, as one rank sees it; see `Guest`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.dynamic.letters import Letter, Wire, letter
from featsync.dynamic.positions import Position
from featsync.errors import PeerError, PlanError
from featsync.exchange.frames import Frame
from featsync.row_kind import RowKind

__all__ = ["AwayPart"]

_LOOK_S = 0.5

Rows = NDArray[np.int64]


class AwayPart:
    """Writes letters to the rank that serves this one there, and waits for answers.

    What is *told* has no answer: if it fails, so does the next that is *asked*. Asking gives a
    ticket and returns; `wait` blocks. Rows are numbered within the part.

    Args:
        wire: To that rank.
        name: Of that rank, for people.
        watch: Begins to wait for it; what it returns raises once the wait is in vain.
        kind: What a row is.
    """

    def __init__(
        self,
        wire: Wire,
        name: str,
        watch: Callable[[], Callable[[], None]],
        kind: RowKind,
    ) -> None:
        self._wire, self.name, self._watch = wire, name, watch
        self.kind = kind
        self._tickets = itertools.count()
        self._changed = threading.Condition()
        self._answers: dict[int, Frame] = {}
        self._awaited: set[int] = set()

    def hear(self, frame: Frame) -> None:
        """Take an answer and return."""
        with self._changed:
            ticket = frame.words["ticket"]
            self._answers[ticket] = frame
            if ticket not in self._awaited:
                self._answers.pop(ticket, None)  # which whoever forgot it may have done by now
            self._changed.notify_all()

    def begin(self) -> None:
        """Tell that this rank takes part from here on."""
        self._wire.send(letter("begin"))

    def excuse(self, epoch: int) -> None:
        """Tell that this rank has nothing to do in an epoch; safe in a finalizer."""
        self._wire.post(letter("excuse", epoch=epoch))

    def learn(self) -> None:
        """Tell that this rank trains the rows by an optimizer."""
        self._wire.send(letter("learn"))

    def write(
        self, step: Position, rows: Rows, values: torch.Tensor, is_distinct: bool, factor: float
    ) -> None:
        """Tell what this rank writes in a step; see `Areas.append`."""
        words = {"step": step, "is_distinct": is_distinct, "factor": factor}
        self._wire.send(letter("write", rows, [values], **words))

    def close(self, where: Position) -> None:
        """Tell that this rank has ended its steps up to there."""
        self._wire.send(letter("close", where=where))

    def end_epoch(self, where: Position) -> None:
        """Tell that this rank has ended its epoch; safe in a finalizer."""
        self._wire.post(letter("end", where=where))

    def ask_early(self, step: Position, rows: Rows) -> int:
        """Ask for rows as they are once all before a step is committed, or a little later.

        Args:
            step: That this rank is in; the rows are for the next.
            rows: ``(n,)``, distinct, ascending.

        Returns:
            A ticket, for `wait` and `ask_patch`.
        """
        return self._ask(letter("early", rows, step=step))

    def ask_patch(self, early: int, to: Position) -> int:
        """Ask for those of the rows that were written before a position, since they were read."""
        return self._ask(letter("patch", early=early, to=to))

    def ask_rows(self, rows: Rows, least: Position, what: Sequence[str]) -> int:
        """Ask for rows of one whole step.

        Args:
            rows: ``(n,)``.
            least: A position up to which all has to be committed.
            what: Names of what lies beside the rows; "" for themselves.
        """
        return self._ask(letter("read", rows, least=least, what=list(what)))

    def ask_settled(self, where: Position, patience: float) -> int:
        """Ask to be told when all before a position is committed."""
        return self._ask(letter("settle", where=where, patience=patience))

    def ask_assigned(self, rows: Rows, values: torch.Tensor) -> int:
        """Ask to write rows at once; they are distinct."""
        return self._ask(letter("assign", rows, [values]))

    @property
    def num_awaited(self) -> int:
        """Answers that somebody waits for, or that are here and were not taken."""
        return len(self._awaited | self._answers.keys())

    def is_answered(self, ticket: int) -> bool:
        """Whether `wait` would not block."""
        return ticket in self._answers

    def wait(self, ticket: int) -> Frame:
        """Block until what was asked for is done.

        Raises:
            PeerError: It cannot be, or the rank that serves this one there has ended.
            PeerTimeoutError: That rank gave no sign of life, or did not answer for very long.
            PlanError: It was forgotten meanwhile.
        """
        look = self._watch()
        try:
            with self._changed:
                while ticket not in self._answers:
                    if ticket not in self._awaited:
                        raise PlanError("a loop was left while its rows were waited for")
                    self._changed.wait(_LOOK_S)
                    if ticket not in self._answers:
                        look()
                frame = self._answers[ticket]
        finally:
            self.forget(ticket)
        if (problem := frame.words["problem"]) is not None:
            what = f"{self.name} could not serve rows of its machine: {problem}"
            raise PeerError(what, self.name)
        return frame

    def forget(self, ticket: int) -> None:
        """Nobody needs an answer any more; takes no lock."""
        self._awaited.discard(ticket)
        self._answers.pop(ticket, None)

    def _ask(self, question: Letter) -> int:
        words, numbers = question
        with self._changed:
            ticket = next(self._tickets)
            self._awaited.add(ticket)
        self._wire.send(({**words, "ticket": ticket}, numbers))
        return ticket
