"""A rank of another machine, at the part of a feature that this machine holds.

To the board, and so to all who merge and wait here, it is a rank like any other: what it wrote lies
in areas, it closes steps, it says what it reads next. One of this machine's ranks, the same for all
of its features, does so for it, on a thread a feature and guest, in the order of its letters::

    begin, excuse, learn, end      as `FeatureClock` does for a rank of this machine
    write  step                    ─▶ an area of its own here
    close  where                   ─▶ its counter on the board
    early  step                    commits before the step are waited for, rows sent
    patch  to                      commits before ``to`` are waited for as far as the guest wants
                                   rows, and what was written of them since is sent again
    read   least                   rows of one whole step, sent
    settle where                   waits until all before is committed
    assign                         rows written at once, outside of loops

Waiting here is as it is for own ranks: with a limit, and by name; the guest is told why.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featsync.dynamic.areas import Areas
from featsync.dynamic.board import AREAS
from featsync.dynamic.letters import Letter, letter, rows_of, values_of
from featsync.dynamic.part import HostPart
from featsync.dynamic.positions import Position, epoch_of
from featsync.errors import FeatsyncError, PlanError
from featsync.exchange.frames import Frame
from featsync.row_items import put_rows

__all__ = ["Guest"]

_LOG = logging.getLogger(__name__)
_NO_ROWS = np.empty(0, np.int64)

Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Early:
    """Rows that were read early.

    Attributes:
        rows: Which.
        step: Up to where all was committed.
        assigned: How often rows had been written outside of loops.
        is_marked: Whether the guest's next commit knew that they are wanted.
    """

    rows: Rows
    step: Position
    assigned: int
    is_marked: bool


class Guest:
    """Carries out the letters of one rank of another machine, on a thread of its own.

    Args:
        part: The rows.
        rank: The guest.
        name: Of the guest, for people.
        answer: Sends it a letter.
    """

    def __init__(
        self, part: HostPart, rank: int, name: str, answer: Callable[[Letter], None]
    ) -> None:
        self._part, self._rank, self._name, self._answer = part, rank, name, answer
        self._areas = Areas(part.board, rank, part.kind)
        self._mail: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._early: dict[int, _Early] = {}
        self._seen: Position = 0
        self._written: list[tuple[Position, Rows]] = []
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="featsync-guest", daemon=True)
        self._thread.start()

    def hear(self, frame: Frame) -> None:
        """Take a letter and return."""
        self._mail.put(frame)

    def leave(self) -> None:
        """No more letters will come; takes no lock that anybody waits with."""
        self._mail.put(None)

    def join(self, timeout: float) -> None:
        """Wait until all letters are carried out, after `leave`."""
        self._thread.join(timeout)

    def _run(self) -> None:
        while (frame := self._mail.get()) is not None:
            ticket = frame.words.get("ticket")
            problem, answer = self._problem, letter("answer")
            if problem is None:
                try:
                    answer = self._actions[frame.words["do"]](frame) or answer
                except Exception as error:  # noqa: BLE001 - the guest is told, whatever it is
                    problem = str(error) if isinstance(error, FeatsyncError) else repr(error)
                    if not isinstance(error, FeatsyncError):
                        _LOG.error("cannot do what %s asks for", self._name, exc_info=error)
                    if ticket is None:
                        # Its step will lack something, here and nowhere else.
                        self._problem = problem
                        self._part.board.give_up(self._rank)
            if ticket is not None:
                words, numbers = answer
                self._answer(({**words, "ticket": ticket, "problem": problem}, numbers))
            self._merge()

    def _merge(self) -> None:
        """Merge what the guest did not need next, and what nobody else here does."""
        board, commits = self._part.board, self._part.commits
        try:
            commits.merge_later()
            if board.closed(self._rank) - board.committed > AREAS // 2:
                # This machine's ranks may be through with the epoch.
                commits.help()
        except Exception:  # noqa: BLE001 - the thread lives on
            # A rank that merged has ended, or the table is given up: all who use it hear of that,
            # this guest with its next letter.
            _LOG.exception("cannot merge what %s wrote", self._name)

    @property
    def _actions(self) -> dict[str, Callable[[Frame], Letter | None]]:
        return {
            "begin": self._begin,
            "excuse": self._excuse,
            "learn": lambda frame: self._part.board.learn(),
            "write": self._write,
            "close": self._close,
            "end": self._end,
            "early": self._read_early,
            "patch": self._patch,
            "read": self._read,
            "settle": self._settle,
            "assign": self._assign,
        }

    def _begin(self, frame: Frame) -> None:
        part = self._part
        with part.lock.hold(part.commits.timeout):
            part.board.excused[self._rank] = 0
        self._seen = part.board.committed
        self._early.clear()
        self._written.clear()

    def _excuse(self, frame: Frame) -> None:
        self._part.board.excused[self._rank] = frame.words["epoch"] + 1

    def _end(self, frame: Frame) -> None:
        self._early.clear()
        self._written.clear()
        self._part.board.end_epoch(self._rank, frame.words["where"])

    def _close(self, frame: Frame) -> None:
        self._part.board.close(self._rank, frame.words["where"])

    def _write(self, frame: Frame) -> None:
        words, rows = frame.words, _some(frame)
        (values,) = values_of(frame, [self._part.kind])
        self._areas.append(
            words["step"], torch.from_numpy(rows), values, words["is_distinct"], words["factor"]
        )

    def _read_early(self, frame: Frame) -> Letter:
        step, rows = frame.words["step"], _some(frame)
        board, commits = self._part.board, self._part.commits
        is_marked = board.closed(self._rank) == step
        if is_marked:
            # Only in time for the commit of that step: later, others may want rows of the next.
            commits.want(rows, step + 1)
        commits.advance(step)
        early = _Early(rows, step, board.assigned, is_marked)
        self._early[frame.words["ticket"]] = early
        return letter("answer", values=[self._part.take(rows)])

    def _patch(self, frame: Frame) -> Letter:
        early = self._early.pop(frame.words["early"], None)
        if early is None:
            raise PlanError("rows are to be patched that were not read: please report it")
        to = frame.words["to"]
        self._catch_up(early.step, to, early.is_marked and to == early.step + 1)
        if early.assigned != self._part.board.assigned:
            with self._part.commits.hold(to):
                return letter("answer", np.arange(len(early.rows)), [self._part.take(early.rows)])
        written = [rows for step, rows in self._written if step >= early.step]
        if not self._early:
            self._written.clear()
        all_rows = np.concatenate(written) if written else _NO_ROWS
        places = self._part.where_among(early.rows, all_rows)
        return letter("answer", places, [self._part.take(early.rows.take(places))])

    def _catch_up(self, since: Position, to: Position, is_later_left: bool) -> None:
        """Wait for commits, and note what they write while it is still there."""
        commits = self._part.commits
        if is_later_left:
            commits.make_ready(to)
        else:
            commits.advance(to)
        steps = range(max(self._seen, since), to)
        self._written += [(step, commits.rows_written(step)) for step in steps]
        self._seen = max(self._seen, to)

    def _settle(self, frame: Frame) -> None:
        where = frame.words["where"]
        self._part.commits.advance(where, frame.words["patience"])
        # A read that was asked for as its loop was left is of an epoch that is over: no patches.
        steps = [e.step for e in self._early.values() if epoch_of(e.step) == epoch_of(where)]
        if steps:
            self._catch_up(min(steps), where, is_later_left=False)

    def _read(self, frame: Frame) -> Letter:
        rows = _some(frame)
        with self._part.commits.hold(frame.words["least"]) as seen:
            found = [self._part.take(rows, what) for what in frame.words["what"]]
        return letter("answer", values=found, seen=seen)

    def _assign(self, frame: Frame) -> None:
        part, rows = self._part, torch.from_numpy(_some(frame))
        (values,) = values_of(frame, [part.kind])
        part.commits.advance(part.board.closed(self._rank))
        part.commits.assign(lambda: put_rows(part.table, rows, values))


def _some(frame: Frame) -> Rows:
    rows: Any = rows_of(frame)
    if rows is None:
        raise PlanError(f"a letter to {frame.words['do']!r} names no rows: please report it")
    checked: Rows = rows
    return checked
