"""Programs of ranks that write to a dynamic feature, and the rules that their protocol sets.

Steps are counted through all epochs here: ``(epoch, step)`` is the step that many after the first
of its epoch, and every epoch is as long as its longest rank. A rank that leaves an epoch before the
others then stands at the first step of the next, which is what ``(epoch + 1, 0)`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Program(NamedTuple):
    """What ranks do: ``epochs[epoch][rank][step]`` are the rows that the rank writes."""

    epochs: tuple
    num_rows: int = 2
    reads: tuple = ()  # rows that each rank reads in every step, in its order; if empty, all
    leaves: tuple = ()  # ranks that read one more minibatch of the last epoch, and leave before it


@dataclass(frozen=True)
class Rules:
    """The protocol, and the ways to get it wrong."""

    staleness: int = 0
    num_shares: int = 2
    num_areas: int = 2
    do_ended_merge: bool = True  # or have left for good
    counts_areas_through_epochs: bool = True  # or begin with the first at each epoch
    reads_across_epochs: bool = False  # the first minibatch is patched as all others are
    waits_for_area: bool = False  # an update does, for invariant 5; this never lasts when exact
    # What follows is wrong in any other setting.
    closed_by: Callable = min  # of the positions of all ranks: how far all have closed
    are_ended_closed: bool = True
    is_claimed_complete: bool = False
    reads_too_early: int = 0  # in commits
    delivers_too_early: int = 0  # in commits
    waits_for_other_ranks_epoch: bool = True
    patches: bool = True
    reads_with_flag: bool = True
    claims_heed_flags: bool = True
    takes_flag_between_shares: bool = False
    looks_before_flag: bool = False


class Action(NamedTuple):
    """What a rank does itself, and where it stands until it has done so."""

    kind: str
    step: int
    position: int
    num_delivered: int
    may_read: int  # minibatches that its reader may have read: those up to this epoch's last


class RankProgram:
    """One rank's actions in their order, and what its reader reads beside them."""

    def __init__(self, rank, program, starts, rules):
        self.rows = program.reads[rank] if program.reads else tuple(range(program.num_rows))
        self.num_halves = 2 * len(self.rows)
        self.written = {}
        self.overwrites = {}  # which step's area each step uses again
        self.first_after = {}  # first steps of epochs, and the rank's own last step before
        self.minibatches = []
        self.actions = []
        areas, position = {}, 0
        for (start, end), epoch in zip(pairwise(starts), program.epochs, strict=True):
            steps = list(range(start, start + len(epoch[rank])))
            for step, rows in zip(steps, epoch[rank], strict=True):
                number = step - start
                if rules.counts_areas_through_epochs:
                    number = len(self.written)
                self.overwrites[step] = areas.get(number % rules.num_areas)
                areas[number % rules.num_areas] = step
                self.written[step] = rows
            if end == starts[-1] and rank in program.leaves:
                steps.append(start + len(steps))
            num_before = len(self.minibatches)
            self.first_after[start] = max(self.minibatches, default=-1)
            self.minibatches += steps
            for number, step in enumerate(steps[: len(epoch[rank])], num_before):
                for kind in ("deliver", "write", "close"):
                    self._add(kind, step, position, number + (kind != "deliver"))
                position = step + 1
            self._add("end", end, position, num_before + len(epoch[rank]))
            position = end if rules.are_ended_closed else position
        self._add("", end, position, len(self.written))
        self.deliver_at = self._places("deliver")
        self.write_at = self._places("write")

    def _add(self, kind, step, position, num_delivered):
        self.actions.append(Action(kind, step, position, num_delivered, len(self.minibatches)))

    def _places(self, kind):
        return {action.step: i for i, action in enumerate(self.actions) if action.kind == kind}
