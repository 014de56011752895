"""What machines add to the commit protocol, in every order that its actions could take.

See `test_dynamic_protocol`, which is about one machine.
"""

from __future__ import annotations

import pytest

from support.machines_model import Machines, Rules
from support.protocol_model import STALE
from test_dynamic_protocol import DEADLOCK, search_states

NONE, HERE, THERE, BOTH = (), (0,), (1,), (0, 1)
APART = [0, 1]
PAIRS = [0, 0, 1, 1]


def of(hosts, writes, only_away=()):
    return {"hosts": hosts, "writes": writes, "rules": Rules(), "only_away": only_away}


BUSY = of(APART, {0: [BOTH] * 3, 1: [BOTH] * 3})
# Nobody reads its own machine's row, and its guest is in another process: all is left for later.
CROSSED = of(PAIRS, {0: [BOTH] * 3, 3: [BOTH] * 3}, {0, 3})


@pytest.mark.parametrize(
    "program",
    [
        BUSY,
        CROSSED,
        of(APART, {0: [HERE, NONE, BOTH], 1: [NONE, THERE, HERE]}),
        of(APART, {0: [NONE] * 3, 1: [HERE, BOTH, NONE]}, {1}),
        of(APART, {0: [BOTH] * 2, 1: [BOTH] * 2}, {0, 1}),
        of(PAIRS, {0: [BOTH] * 2, 2: [BOTH] * 2}, {2}),
        of(PAIRS, {0: [BOTH, NONE, HERE], 3: [THERE, BOTH, BOTH]}, {3}),
        of(PAIRS, {0: [BOTH] * 2, 1: [BOTH] * 2}),
        of([0, 0, 1], {1: [THERE, BOTH], 2: [BOTH, HERE]}),
    ],
)
def test_every_order_of_actions_delivers_the_right_rows_and_ends(program):
    found = search_states(Machines(**program))
    assert (found.rule, found.trace) == ("", [])
    assert len(found.states) > 500


BROKEN = {
    "a guest marks rows too late": (BUSY, STALE, {"marks_late": True}),
    "rows that were not marked are patched when others are ready": (
        CROSSED, STALE, {"late_waits_for_all": False},
    ),
    "patches are waited for before all is merged": (
        CROSSED, DEADLOCK, {"merges_before_patches": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("program", "rule", "wrong"), BROKEN.values(), ids=BROKEN)
def test_the_search_finds_what_is_wrong_when(program, rule, wrong):
    found = search_states(Machines(**{**program, "rules": Rules(**wrong)}))
    assert (found.rule, bool(found.trace)) == (rule, True)
