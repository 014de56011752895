"""What machines add to the commit protocol of dynamic features, as states and atomic actions.

Each machine holds one row. Ranks that have something to do read both rows in every step, or only
the other machine's, and write some; the others only serve guests, each in a process of its own.
Halves of rows, shares and areas are left to `protocol_model`: here a commit is one action, or two,
if its row is left for later.

A rank acts on two threads. The trainer closes its step, asks for patches, waits for this machine's
commit, and delivers; the worker asks the other machine, reads this one's row, and waits for the
other's. A guest is the thread that does what a rank's letters say, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from support.protocol_model import STALE, RuleBrokenError

ENDED = 99
CLOSE, ASK, READY, WORK, LATER, PATCH, DONE = range(7)  # what the trainer does next
W_ASK, W_LATER, W_READ, W_LAND, W_DONE = range(5)  # what the worker does next


@dataclass(frozen=True)
class Rules:
    """The protocol, and the ways to get it wrong."""

    marks_late: bool = False  # a guest says what is read next though its rank has closed the step
    late_waits_for_all: bool = True  # patches of rows that were not marked: for the whole commit
    merges_before_patches: bool = True  # what was left for later, before others are waited for


class Machine(NamedTuple):
    value: int  # of its row: one bit for each write
    done: int  # commits
    ready: int  # commits whose rows that are wanted next are merged
    later: int  # whose process has the row of commit ``done`` still to merge; -1: nobody
    mark: int  # the step that is known to read the row
    closed: tuple  # of each rank


class Rank(NamedTuple):
    step: int = 0  # delivered
    trainer: int = CLOSE
    worker: int = W_ASK
    near: int = 0
    away: int = 0
    has_asked: bool = False  # for patches
    mail: tuple = ()  # letters to its guest
    early: int = -1  # a step: the guest has read the row for the one after it
    is_marked: bool = False
    is_patched: bool = False


class State(NamedTuple):
    machines: tuple
    ranks: tuple


class Machines:
    """All that can happen.

    Args:
        hosts: The machine of each rank.
        writes: For each rank that has something to do, by step the machines whose rows it writes.
        rules: Of the protocol.
        only_away: Ranks that do not read their own machine's row.
    """

    def __init__(self, hosts, writes, rules, only_away=()):
        self.only_away = only_away
        self.hosts, self.writes, self.rules = hosts, writes, rules
        self.num_steps = len(next(iter(writes.values())))
        self.bits = [
            [
                sum(
                    1 << (step * len(hosts) + rank)
                    for rank, steps in writes.items()
                    if host in steps[step]
                )
                for host in range(2)
            ]
            for step in range(self.num_steps)
        ]
        self.servers = {}
        for rank in writes:
            there = [other for other, host in enumerate(hosts) if host != hosts[rank]]
            own = [other for other, host in enumerate(hosts) if host == hosts[rank]]
            self.servers[rank] = there[own.index(rank) % len(there)]

    def start(self):
        closed = tuple(0 if rank in self.writes else ENDED for rank in range(len(self.hosts)))
        marks = [0, 0]
        for rank in self.writes:
            marks[self.hosts[rank]] |= rank not in self.only_away
        machines = tuple(Machine(0, 0, 0, -1, mark, closed) for mark in marks)
        return State(machines, tuple(Rank() for _ in self.hosts))

    def is_final(self, state):
        return all(state.ranks[rank].trainer == DONE for rank in self.writes)

    def successors(self, state):
        for rank in self.writes:
            yield from self._trainer(state, rank)
            yield from self._worker(state, rank)
            yield from self._guest(state, rank)

    def expected(self, step, host):
        return sum(bits[host] for bits in self.bits[:step])

    # Commits.

    def _advance(self, state, host, process, to, leaves_later=False):
        """The state after this process has helped to commit; ``None``: it has to wait.

        Said to be done is all that is: ``to`` is reached when it need not wait.
        """
        machine = state.machines[host]
        if machine.done >= to or (leaves_later and machine.ready >= to):
            return state
        if machine.ready > machine.done:
            return self._advance_later(state, host, process, to)
        if min(machine.closed) <= machine.done:
            return None
        step, bits = machine.done, self.bits[machine.done][host]
        if leaves_later and bits and machine.mark != step + 1:
            after = machine._replace(ready=step + 1, later=process)
        else:
            after = machine._replace(value=machine.value | bits, done=step + 1, ready=step + 1)
        return self._advance(
            self._with_machine(state, host, after), host, process, to, leaves_later
        )

    def _advance_later(self, state, host, process, to):
        if state.machines[host].later != process:
            return None
        return self._advance(self._merged_later(state, host, process), host, process, to)

    def _merged_later(self, state, host, process):
        machine = state.machines[host]
        if machine.later != process:
            return state
        value = machine.value | self.bits[machine.done][host]
        after = machine._replace(value=value, done=machine.done + 1, later=-1)
        return self._with_machine(state, host, after)

    # Ranks.

    def _trainer(self, state, rank):
        acts = {CLOSE: self._close, ASK: self._ask, READY: self._get_ready, WORK: self._land}
        acts |= {LATER: self._merge, PATCH: self._patch}
        own = state.ranks[rank]
        if own.trainer in acts:
            yield from acts[own.trainer](state, rank, own)

    def _close(self, state, rank, own):
        after = self._closed(state, self.hosts[rank], rank, own.step + 1)
        mail = (*own.mail, ("close", own.step + 1))
        yield "closes", self._with(after, rank, trainer=ASK, mail=mail)

    def _ask(self, state, rank, own):
        if own.worker > W_ASK:
            own = own._replace(mail=(*own.mail, ("patch", own.step + 1)), has_asked=True)
        yield "asks for patches", self._with(state, rank, own, trainer=READY)

    def _get_ready(self, state, rank, own):
        after = self._advance(state, self.hosts[rank], rank, own.step + 1, leaves_later=True)
        if after is not None:
            yield "is ready", self._with(after, rank, trainer=WORK)

    def _land(self, state, rank, own):
        if own.worker == W_DONE:
            if not own.has_asked:
                own = own._replace(mail=(*own.mail, ("patch", own.step + 1)), has_asked=True)
            yield "has its early rows", self._with(state, rank, own, trainer=LATER)

    def _merge(self, state, rank, own):
        after = state
        if self.rules.merges_before_patches and not own.is_patched:
            after = self._merged_later(state, self.hosts[rank], rank)
        yield "merges what it left", self._with(after, rank, trainer=PATCH)

    def _patch(self, state, rank, own):
        if own.is_patched:
            yield "delivers", self._delivered(state, rank)

    def _delivered(self, state, rank):
        own, host = state.ranks[rank], self.hosts[rank]
        step, machine = own.step + 1, state.machines[host]
        near = machine.value if self.bits[step - 1][host] else own.near
        reads_near = rank not in self.only_away
        is_stale = reads_near and near != self.expected(step, host)
        if is_stale or own.away != self.expected(step, 1 - host):
            raise RuleBrokenError(STALE)
        if step == self.num_steps:
            after = self._merged_later(self._closed(state, host, rank, ENDED), host, rank)
            mail = (*own.mail, ("close", ENDED))
            return self._with(after, rank, Rank(step, DONE, W_DONE, mail=mail))
        if reads_near:
            state = self._with_machine(state, host, machine._replace(mark=step + 1))
        return self._with(state, rank, Rank(step, mail=own.mail))

    def _worker(self, state, rank):
        own, host = state.ranks[rank], self.hosts[rank]
        if own.worker == W_ASK:
            mail = (*own.mail, ("early", own.step))
            yield "asks early", self._with(state, rank, worker=W_LATER, mail=mail)
        elif own.worker == W_LATER:
            after = self._merged_later(state, host, rank)
            yield "merges what was left", self._with(after, rank, worker=W_READ)
        elif own.worker == W_READ:
            after = self._advance(state, host, rank, own.step)
            if after is not None:
                near = after.machines[host].value
                yield "reads", self._with(after, rank, worker=W_LAND, near=near)
        elif own.worker == W_LAND and own.early == own.step:
            yield "has it all", self._with(state, rank, worker=W_DONE)

    def _guest(self, state, rank):
        own, host, server = state.ranks[rank], 1 - self.hosts[rank], self.servers[rank]
        if not own.mail:
            return
        (do, step), mail = own.mail[0], own.mail[1:]
        if do == "close":
            after = self._closed(state, host, rank, step)
            after = self._merged_later(after, host, server)
            yield "guest closes", self._with(after, rank, mail=mail)
        elif do == "early":
            is_marked = state.machines[host].closed[rank] == step
            after = state
            if is_marked or self.rules.marks_late:
                machine = state.machines[host]._replace(mark=step + 1)
                after = self._with_machine(state, host, machine)
            after = self._advance(after, host, server, step)
            if after is not None:
                own = own._replace(early=step, is_marked=is_marked, mail=mail)
                own = own._replace(away=after.machines[host].value)
                yield "guest reads", self._with(after, rank, own)
        else:
            leaves_later = own.is_marked or not self.rules.late_waits_for_all
            after = self._advance(state, host, server, step, leaves_later)
            if after is not None:
                away = after.machines[host].value if self.bits[step - 1][host] else own.away
                own = own._replace(is_patched=True, away=away, mail=mail)
                after = self._merged_later(self._with(after, rank, own), host, server)
                yield "guest patches", after

    def _closed(self, state, host, rank, where):
        machine = state.machines[host]
        closed = (*machine.closed[:rank], where, *machine.closed[rank + 1 :])
        return self._with_machine(state, host, machine._replace(closed=closed))

    def _with_machine(self, state, host, machine):
        machines = (*state.machines[:host], machine, *state.machines[host + 1 :])
        return state._replace(machines=machines)

    def _with(self, state, rank, own=None, **changes):
        own = (own or state.ranks[rank])._replace(**changes)
        return state._replace(ranks=(*state.ranks[:rank], own, *state.ranks[rank + 1 :]))
