"""The commit protocol of dynamic features as states and atomic actions.

`Model.successors` gives every action that somebody could do next, so a search over them sees every
order in which ranks, their readers and their merges could come. A value is the set of all writes
that went into it, one bit for each ``(step, rank)``; a row has two halves, so a row that was read
in the middle of a merge shows.

Each action moves something on, and nothing ever moves back: ranks that never get stuck do end.

Which rank merges a share is not kept: a rank that merges would otherwise wait, and merging waits
for nobody, so this allows all that ranks can do, and comes to an end whenever they do.
"""

from __future__ import annotations

from typing import NamedTuple

from support.protocol_programs import RankProgram

READ_AHEAD = 2  # minibatches that a reader holds: the one that is delivered next, and one more
FREE, FINISHED = -1, 99  # states of a share; in between, how many half rows are merged
LOOKED = -1  # a flag that is down, but its rank already goes by what it saw: it should not

TORN = "a row was delivered half old, half new"
STALE = "a row was delivered without writes that it must have"
FUTURE = "a row was delivered with writes that are still to come"
MIXED = "rows of one minibatch are from different commits"
COMMIT_NEEDS_AREA = "an area was written over that a commit needs"
PATCH_NEEDS_AREA = "an area was written over that a patch needs"


class RuleBrokenError(Exception):
    """An action did what must never be."""


class Rank(NamedTuple):
    """A rank in a state."""

    at: int  # which of its actions is next
    flag: int  # 0 while it is down; while up, 1 more than the rows that are still to be read
    num_patched: int  # half rows
    halves: tuple  # of rows that were read and are not delivered yet


def _replaced(items, place, item):
    return (*items[:place], item, *items[place + 1 :])


class Model:
    """All that ranks with a program may do under the rules.

    A state is ``(table, num_committed, shares, ranks)``: half rows, how many commits are complete,
    what is done of the next, and a `Rank` each.
    """

    def __init__(self, program, rules):
        self.rules = rules
        starts = [0]
        for epoch in program.epochs:
            starts.append(starts[-1] + max(map(len, epoch)))
        self.num_steps = starts[-1]
        self.unpatched = set() if rules.reads_across_epochs else set(starts)
        numbers = range(len(program.epochs[0]))
        self.ranks = [RankProgram(rank, program, starts, rules) for rank in numbers]
        self.published = [
            {row for rank in self.ranks for row in rank.written.get(step, ())}
            for step in range(self.num_steps)
        ]
        shares = range(rules.num_shares)
        self.work = [
            [[row for row in sorted(rows) if row % rules.num_shares == share] for share in shares]
            for rows in self.published
        ]
        # What the sequential program has in the table before each step.
        self.expected = [[0] * program.num_rows]
        self.writers = [
            [self._writers(step, row) for row in range(program.num_rows)]
            for step in range(self.num_steps)
        ]
        for step in range(self.num_steps):
            rows = zip(self.expected[-1], self.writers[step], strict=True)
            self.expected.append([value | sum(bit for bit, *_ in row) for value, row in rows])
        self.tables = [
            [tuple(table[row] for row in rank.rows) for table in self.expected]
            for rank in self.ranks
        ]

    def _writers(self, step, row):
        """The writes to a row in a step, whose they are, and when that rank has published them."""
        return [
            (1 << (step * len(self.ranks) + number), number, rank.write_at[step])
            for number, rank in enumerate(self.ranks)
            if row in rank.written.get(step, ())
        ]

    def start(self):
        ranks = (Rank(0, 0, 0, ()),) * len(self.ranks)
        halves = (0,) * (2 * len(self.expected[0]))
        return halves, 0, (FREE,) * self.rules.num_shares, ranks

    def is_final(self, state):
        """All have done all they had to, and all is committed if there is anybody to do it."""
        _, num_committed, _, ranks = state
        if any(own.at + 1 < len(rank.actions) for own, rank in zip(ranks, self.ranks, strict=True)):
            return False
        return num_committed == self.num_steps or not self.rules.do_ended_merge

    def successors(self, state):
        """Each action that is possible: its name, and the state after it."""
        table, num_committed, shares, ranks = state
        yield from self._commit(state)
        for number, own in enumerate(ranks):
            for act in (self._read, self._go_on):
                found = act(state, number, own)
                if found is not None:
                    name, after = found
                    after = (*ranks[:number], after, *ranks[number + 1 :])
                    yield f"rank {number} {name}", (table, num_committed, shares, after)

    def _is_complete(self, state, step):
        _, num_committed, shares, _ = state
        if self.rules.is_claimed_complete and step == num_committed and FREE not in shares:
            return True
        return step < num_committed

    def _commit(self, state):
        """Shares are claimed, merged half row by half row, finished; the last completes all."""
        table, step, shares, ranks = state
        if step == self.num_steps:
            return
        for share, done in enumerate(shares):
            rows = self.work[step][share]
            name = f"share {share} of commit {step}"
            if done == FREE:
                if self._may_claim(step, ranks):
                    yield f"claim {name}", (table, step, _replaced(shares, share, 0), ranks)
            elif done < 2 * len(rows):
                row = rows[done // 2]
                place = 2 * row + done % 2
                merged = table[place]
                for bit, number, write_at in self.writers[step][row]:
                    merged |= bit if ranks[number].at > write_at else 0
                after = (_replaced(table, place, merged), step, _replaced(shares, share, done + 1))
                yield f"merge half {done % 2} of row {row}, {name}", (*after, ranks)
            elif done != FINISHED:
                after = _replaced(shares, share, FINISHED)
                if all(done == FINISHED for done in after):
                    yield f"complete commit {step}", (table, step + 1, (FREE,) * len(after), ranks)
                else:
                    yield f"finish {name}", (table, step, after, ranks)

    def _may_claim(self, step, ranks):
        rules, is_anybody_there, positions = self.rules, False, []
        for own, rank in zip(ranks, self.ranks, strict=True):
            action = rank.actions[own.at]
            positions.append(action.position)
            waits = action.kind == "deliver" or (not action.kind and rules.do_ended_merge)
            is_anybody_there = is_anybody_there or waits
        if rules.closed_by(positions) <= step or not is_anybody_there:
            return False
        return not (rules.claims_heed_flags and any(own.flag > 0 for own in ranks))

    def _read(self, state, number, own):
        """The reader's next action: a row, whole, or the flag that keeps commits off."""
        rules, rank = self.rules, self.ranks[number]
        action = rank.actions[own.at]
        if own.flag == 1:
            return "takes its flag down", own._replace(flag=0)
        held, done = divmod(len(own.halves), rank.num_halves) if rank.rows else (READ_AHEAD, 0)
        minibatch = action.num_delivered + held
        if held == READ_AHEAD or minibatch >= action.may_read:
            return None
        step = rank.minibatches[minibatch]
        if not done and own.flag <= 0:
            if own.flag != LOOKED and not self._may_begin(state, rank, step):
                return None
            if rules.looks_before_flag and not own.flag:
                return "looks whether it may put its flag up", own._replace(flag=LOOKED)
            if rules.staleness and rules.reads_with_flag:
                return f"puts its flag up for step {step}", own._replace(flag=1 + len(rank.rows))
        row = rank.rows[done // 2]
        halves = own.halves + state[0][2 * row : 2 * row + 2]
        after = own._replace(halves=halves, flag=own.flag - bool(own.flag))
        return f"reads row {row} for step {step}", after

    def _may_begin(self, state, rank, step):
        """Whether rows of `step` may be read from now on."""
        rules, shares = self.rules, state[2]
        if not self._is_complete(state, self._read_after(rank, step)):
            return False
        if not rules.staleness or not rules.reads_with_flag:
            return True
        idle = (FREE, FINISHED) if rules.takes_flag_between_shares else (FREE,)
        return all(done in idle for done in shares)

    def _read_after(self, rank, step):
        """The commit that has to be complete before rows of `step` may be read."""
        if step in self.unpatched:
            return step - 1 if self.rules.waits_for_other_ranks_epoch else rank.first_after[step]
        return step - 1 - (self.rules.staleness or 1) - self.rules.reads_too_early

    def _deliver_after(self, rank, step):
        """The commit that has to be complete before `step` may be patched, and delivered."""
        if step in self.unpatched:
            return self._read_after(rank, step)
        return step - 1 - self.rules.staleness - self.rules.delivers_too_early

    def _go_on(self, state, number, own):
        """The rank's own next action, if it need not wait."""
        rank = self.ranks[number]
        kind, step, *_ = rank.actions[own.at]
        if kind == "deliver":
            return self._patch_or_deliver(state, number, own, step)
        if kind == "write" and rank.overwrites[step] is not None:
            if self.rules.waits_for_area and rank.overwrites[step] + 1 >= state[1]:
                return None
            self._check_area(state, rank.overwrites[step])
        return (f"{kind}s step {step}", own._replace(at=own.at + 1)) if kind else None

    def _patch_or_deliver(self, state, number, own, step):
        rules, rank = self.rules, self.ranks[number]
        after = self._deliver_after(rank, step)
        if len(own.halves) < rank.num_halves or not self._is_complete(state, after):
            return None
        if rules.patches and not rules.staleness and step and step not in self.unpatched:
            places = [i for i, row in enumerate(rank.rows) if row in self.published[step - 1]]
            if own.num_patched < 2 * len(places):
                which, half = divmod(own.num_patched, 2)
                row = rank.rows[places[which]]
                value = state[0][2 * row + half]
                halves = _replaced(own.halves, 2 * places[which] + half, value)
                after = own._replace(num_patched=own.num_patched + 1, halves=halves)
                return f"patches half {half} of row {row} for step {step}", after
        self._check_rows(self.tables[number], own.halves[: rank.num_halves], step)
        after = Rank(own.at + 1, own.flag, 0, own.halves[rank.num_halves :])
        return f"delivers step {step}", after

    def _check_area(self, state, step):
        """Nobody may need what a rank published for `step` and now writes over."""
        _, num_committed, _, ranks = state
        if step >= num_committed:
            raise RuleBrokenError(COMMIT_NEEDS_AREA)
        if self.rules.staleness or step + 1 in self.unpatched:
            return
        for own, rank in zip(ranks, self.ranks, strict=True):
            if own.at <= rank.deliver_at.get(step + 1, -1):
                raise RuleBrokenError(PATCH_NEEDS_AREA)

    def _check_rows(self, tables, halves, step):
        """Rows are as before `step` in the sequential program, or so many commits older."""
        values = halves[::2]
        if values != halves[1::2]:
            raise RuleBrokenError(TORN)
        if values in tables[max(0, step - self.rules.staleness) : step + 1]:
            return
        if any(value & ~now for value, now in zip(values, tables[step], strict=True)):
            raise RuleBrokenError(FUTURE)
        histories = zip(values, zip(*tables, strict=True), strict=True)
        is_each_known = all(value in history for value, history in histories)
        raise RuleBrokenError(MIXED if is_each_known and values not in tables else STALE)
