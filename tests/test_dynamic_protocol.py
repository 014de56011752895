"""The commit protocol of dynamic features, in every order that its ranks' actions could take.

A search over all states of a small model, about 550 000 in all: two or three ranks, up to four
steps, two or three rows of two halves. It must find nothing in the protocol as it is, and something
in each that lacks one of its rules.
"""

from __future__ import annotations

from collections import deque
from itertools import combinations_with_replacement, product
from typing import NamedTuple

import pytest

from support.protocol_model import (
    COMMIT_NEEDS_AREA,
    FUTURE,
    MIXED,
    PATCH_NEEDS_AREA,
    STALE,
    TORN,
    Model,
    RuleBrokenError,
)
from support.protocol_programs import Program, Rules

DEADLOCK = "all wait for each other"

NONE, FIRST, SECOND, BOTH = (), (0,), (1,), (0, 1)
ALL = (0, 1, 2)


def one_epoch(*ranks, **kwargs):
    return Program((ranks,), **kwargs)


TWO = one_epoch((BOTH, BOTH, BOTH), (BOTH, BOTH, BOTH))
TURNS = one_epoch((FIRST, SECOND, NONE), (FIRST, NONE, BOTH))
FOUR_STEPS = one_epoch((FIRST, BOTH, SECOND, BOTH), (SECOND, FIRST, NONE, BOTH))
UNEVEN = one_epoch((BOTH, BOTH, BOTH), (BOTH,))
LONE = one_epoch((BOTH, BOTH, BOTH), ())
LEAVES = one_epoch((BOTH, BOTH, BOTH), (BOTH, BOTH), leaves=(1,))
LISTENS = one_epoch((BOTH, BOTH, BOTH), (BOTH, BOTH, BOTH), reads=(BOTH, NONE))
THREE_ROWS = one_epoch((ALL, (0, 1), NONE), ((1, 2), ALL, NONE), num_rows=3, reads=(ALL, (2, 0)))
THREE_RANKS = one_epoch(
    (BOTH, BOTH, NONE), (FIRST, SECOND), (SECOND,), reads=((0, 1), (1, 0), (0,)), leaves=(2,)
)
BUSY_RANKS = one_epoch(
    (BOTH, BOTH, BOTH), (BOTH, BOTH, BOTH), (FIRST, SECOND, BOTH), reads=((0, 1), (1,), (0,))
)
EPOCHS = Program((((BOTH,), (BOTH,)), ((FIRST, BOTH), (BOTH, BOTH))))
UNEVEN_EPOCHS = Program((((BOTH, BOTH), (BOTH,)), ((FIRST, BOTH), (SECOND, BOTH))))
EPOCHS_OF_ONE = Program((((BOTH,), ()), ((FIRST,), (SECOND,)), ((SECOND,), (BOTH,))))


class Found(NamedTuple):
    """What a search came to."""

    rule: str  # that was broken, if any
    trace: list  # the actions that led there, as few as can be
    states: dict


def search(program, rules):
    """Go through all states of a program."""
    return search_states(Model(program, rules))


def search_states(model):
    """Go through all states of a model, the nearest first, until a rule is broken."""
    before = {model.start(): None}
    waiting = deque(before)
    while waiting:
        state = waiting.popleft()
        is_stuck = not model.is_final(state)
        try:
            for _, after in model.successors(state):
                is_stuck = False
                if after not in before:
                    before[after] = state
                    waiting.append(after)
        except RuleBrokenError as error:
            return Found(str(error), trace_to(state, before, model), before)
        if is_stuck:
            return Found(DEADLOCK, trace_to(state, before, model), before)
    return Found("", [], before)


def trace_to(state, before, model):
    names = []
    while before[state] is not None:
        successors = model.successors(before[state])
        names.append(next(name for name, after in successors if after == state))
        state = before[state]
    return names[::-1]


@pytest.mark.parametrize(
    ("program", "rules", "num_states"),
    [
        (TWO, Rules(), 9_531),
        (TURNS, Rules(), 1_956),
        (FOUR_STEPS, Rules(), 14_828),
        (UNEVEN, Rules(), 804),
        (UNEVEN, Rules(do_ended_merge=False), 756),
        (UNEVEN, Rules(num_shares=1), 405),
        (LONE, Rules(), 499),
        (LEAVES, Rules(), 11_847),
        (LISTENS, Rules(), 895),
        (THREE_ROWS, Rules(num_shares=3), 53_520),
        (THREE_RANKS, Rules(), 30_074),
        (BUSY_RANKS, Rules(), 35_589),
        (TWO, Rules(waits_for_area=True), 9_531),
        (EPOCHS, Rules(), 2_578),
        (EPOCHS, Rules(counts_areas_through_epochs=False), 2_578),
        (EPOCHS, Rules(reads_across_epochs=True), 9_886),
        (UNEVEN_EPOCHS, Rules(), 2_966),
        (EPOCHS_OF_ONE, Rules(do_ended_merge=False), 248),
        (TWO, Rules(staleness=1), 4_360),
        (FOUR_STEPS, Rules(staleness=1), 6_019),
        (UNEVEN, Rules(staleness=1), 939),
        (UNEVEN, Rules(staleness=1, do_ended_merge=False), 891),
        (LONE, Rules(staleness=1), 421),
        (LEAVES, Rules(staleness=1), 4_237),
        (LISTENS, Rules(staleness=1), 1_843),
        (THREE_ROWS, Rules(staleness=1, num_shares=3), 10_885),
        (THREE_RANKS, Rules(staleness=1), 40_609),
        (UNEVEN_EPOCHS, Rules(staleness=1), 3_161),
        (FOUR_STEPS, Rules(staleness=2, num_areas=3), 23_286),
        (FOUR_STEPS, Rules(staleness=1, num_areas=3, waits_for_area=True), 6_019),
    ],
)
def test_every_order_of_actions_delivers_the_right_rows_and_ends(program, rules, num_states):
    found = search(program, rules)

    assert (found.rule, found.trace) == ("", [])
    assert len(found.states) == num_states


@pytest.mark.parametrize("staleness", [0, 1])
def test_every_program_of_two_ranks_and_up_to_two_steps_delivers_the_right_rows(staleness):
    """A step writes to no row, the first, or both. Which rank is which makes no difference."""
    steps = [steps for n in range(3) for steps in product((NONE, FIRST, BOTH), repeat=n)]
    for ranks in combinations_with_replacement(steps, 2):
        found = search(one_epoch(*ranks), Rules(staleness))
        assert (found.rule, found.trace) == ("", []), ranks


def held_for_step_2(staleness):
    """What ranks hold for step 2, and have not patched yet, when they wait for its delivery."""
    deliver_at = Model(TWO, Rules(staleness)).ranks[0].deliver_at[2]
    return {
        rank.halves
        for _, _, _, ranks in search(TWO, Rules(staleness)).states
        for rank in ranks
        if rank.at == deliver_at and len(rank.halves) == 4 and not rank.num_patched
    }


def test_early_reads_do_meet_merges_of_the_commit_that_they_are_patched_for():
    """So what the search found right was put right. Step 0's two writes are bits 0 and 1."""
    before, after = 0b0011, 0b1111
    row_0 = {halves[:2] for halves in held_for_step_2(staleness=0)}
    assert row_0 == {(before, before), (after, before), (after, after)}


def test_with_staleness_reads_show_the_newest_table_or_the_one_before_it():
    before, after = 0b0011, 0b1111
    assert held_for_step_2(staleness=1) == {(before,) * 4, (after,) * 4}


def but(program, rule, staleness=0, **rules):
    """A protocol that gets something wrong, and the rule that the search finds broken."""
    return program, Rules(staleness, **rules), rule


def all_but_one(positions):
    return sorted(positions)[1]


BROKEN = {
    "a commit begins before all have closed": but(TWO, TORN, closed_by=all_but_one),
    "a commit begins before all have closed, with staleness": but(
        TWO, STALE, 1, closed_by=all_but_one
    ),
    "a commit begins before all have closed, with staleness, and nothing is lost": but(
        one_epoch((BOTH,), (NONE,)), FUTURE, 1, closed_by=all_but_one
    ),
    "a commit begins when two of three have closed": but(THREE_RANKS, TORN, closed_by=all_but_one),
    "who ended is waited for": but(UNEVEN, DEADLOCK, are_ended_closed=False),
    "who does nothing is waited for": but(LONE, DEADLOCK, are_ended_closed=False),
    "a commit is complete once all of it is claimed": but(TWO, STALE, is_claimed_complete=True),
    "a commit is complete once all of it is claimed, and who reads nothing goes on": but(
        LISTENS, COMMIT_NEEDS_AREA, 1, is_claimed_complete=True
    ),
    "an early read begins one commit too early": but(TURNS, MIXED, reads_too_early=1),
    "a read begins one commit too early, with staleness": but(TWO, STALE, 1, reads_too_early=1),
    "nothing is patched": but(TWO, STALE, patches=False),
    "step n + 1 goes on, and closes, before commit n": but(TWO, STALE, delivers_too_early=1),
    "who reads nothing goes on before commit n - 1, with staleness": but(
        LISTENS, COMMIT_NEEDS_AREA, 1, delivers_too_early=1
    ),
    "the next step uses the same area": but(TWO, PATCH_NEEDS_AREA, num_areas=1),
    "the next step uses the same area, with staleness": but(TWO, COMMIT_NEEDS_AREA, 1, num_areas=1),
    "there are two areas for a staleness of two": but(FOUR_STEPS, COMMIT_NEEDS_AREA, 2),
    "an update waits for its area, as it need not with staleness": but(
        FOUR_STEPS, DEADLOCK, 1, waits_for_area=True
    ),
    "first minibatches of epochs are patched, and areas begin anew": but(
        EPOCHS, PATCH_NEEDS_AREA, reads_across_epochs=True, counts_areas_through_epochs=False
    ),
    "an epoch begins before what others did in the last is committed": but(
        UNEVEN_EPOCHS, STALE, waits_for_other_ranks_epoch=False
    ),
    "reads put no flag up": but(TWO, TORN, 1, reads_with_flag=False),
    "claims do not heed flags": but(TWO, TORN, 1, claims_heed_flags=False),
    "a flag goes up between two shares": but(TWO, MIXED, 1, takes_flag_between_shares=True),
    "a flag goes up only some time after the look": but(TWO, TORN, 1, looks_before_flag=True),
}


@pytest.mark.parametrize(("program", "rules", "rule"), BROKEN.values(), ids=BROKEN)
def test_the_search_finds_what_is_wrong_when(program, rules, rule):
    found = search(program, rules)
    assert (found.rule, bool(found.trace)) == (rule, True)
