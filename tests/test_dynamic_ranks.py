"""Rows that change, on real ranks: as the sequential program has them, by every worker."""

from __future__ import annotations

import pytest

from support.dynamic_facts import FACTS
from support.facts import Launch, name_of

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]

LAUNCHES = [Launch(ranks, FACTS, timeout_s=100) for ranks in (2, 3)]


@pytest.mark.parametrize("launch", LAUNCHES, ids=name_of)
@pytest.mark.parametrize("fact", FACTS, ids=name_of)
def test_dynamic_features(fact, launch):
    launch.check(fact)
