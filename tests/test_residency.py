"""Caches: driven by one session at a time, and emptied when the table changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from featsync.clock import StepClock
from featsync.errors import ConfigError
from featsync.plan import Want
from featsync.residency import CacheSettings, check_settings
from featsync.retention import RETENTION
from featsync.row_kind import RowKind
from featsync.table import ForeignTable, TensorTable, Version
from support.sessions import deliveries, mover, open_session, residency, table, wrong_rows
from support.strategies import NODE, table_of

CACHING = [name for name in sorted(RETENTION) if name != "none"]
BATCH = {NODE: Want((torch.tensor([1, 2, 3]),))}


@pytest.fixture
def home():
    return table_of(9, (2,), torch.float32)


@pytest.fixture
def cache(home):
    return residency(NODE, home, 5)


def fill(cache, home):
    """One epoch, after which the cache holds rows."""
    tables = {NODE: home}
    for _ in deliveries(open_session(tables, {NODE: cache}, mover(tables)), [BATCH] * 2, 2):
        pass
    assert held(cache) == [1, 2, 3]


def held(cache):
    return sorted(row for row in cache.retention.resident.tolist() if row >= 0)


def test_a_cache_is_driven_by_the_first_session_until_that_ends(home, cache):
    version = table(NODE, home).version
    first, second = StepClock(), StepClock()

    assert cache.drive(first.is_running, version)
    assert not cache.drive(second.is_running, version)
    first.stop()
    assert cache.drive(second.is_running, version)
    assert not cache.drive(first.is_running, version)


def test_a_session_that_may_not_drive_forgets_nothing(home, cache):
    version = table(NODE, home).version
    clock = StepClock()
    cache.drive(clock.is_running, version)
    cache.retention.push(np.array([1, 2]))

    cache.drive(StepClock().is_running, version)

    assert cache.retention.hits().tolist() == [-1, -1]  # the batch is still known


def test_rows_survive_the_epoch_and_known_uses_do_not(home, cache):
    fill(cache, home)
    session = open_session({NODE: home}, {NODE: cache}, mover([NODE]))
    session.window.push(BATCH)

    session.close()
    session = open_session({NODE: home}, {NODE: cache}, mover([NODE]))

    assert held(cache) == [1, 2, 3]
    session.window.push(BATCH)
    assert session.window.plan().features[NODE].fetch.num_cached == 3


def written_in_place(home):
    home[8] = 0.0
    return home


def replaced(home):
    return home.clone()


@pytest.mark.parametrize("change", [written_in_place, replaced])
@pytest.mark.parametrize("policy", CACHING)
def test_a_table_that_changed_between_epochs_empties_the_cache(policy, change, home):
    cache = residency(NODE, home, 5, policy)
    fill(cache, home)

    home = change(home)
    session = open_session({NODE: home}, {NODE: cache}, mover([NODE]))

    assert held(cache) == []
    for wants, rows in deliveries(session, [BATCH] * 2, 2):
        assert wrong_rows(rows, wants, {NODE: home}) == []


def test_a_table_at_the_address_of_an_earlier_one_is_another_table():
    now = {"is": torch.zeros(4, 2)}
    home = TensorTable(NODE, lambda: now["is"])
    before, number = home.version, id(now["is"])
    for _ in range(1000):  # until Python gives the number of the tensor that is gone again
        now["is"] = None
        now["is"] = torch.ones(4, 2)
        if id(now["is"]) == number:
            break

    assert home.version != before
    assert home.version == home.version


def test_versions_tell_tensors_and_writes_apart(home):
    version = table(NODE, home).version

    assert table(NODE, home).version == version
    assert table(NODE, home.clone()).version != version
    assert version != "a version"
    home.add_(1)
    assert table(NODE, home).version != version


def test_a_tensor_of_inference_mode_has_a_version():
    with torch.inference_mode():
        home = torch.zeros(3, 2)

    assert table(NODE, home).version == table(NODE, home).version


@pytest.mark.parametrize(
    ("other", "fits"),
    [
        (torch.ones(9, 2), True),
        (torch.ones(10, 2), False),
        (torch.ones(8, 2), False),
        (torch.ones(9, 3), False),
        (torch.ones(9, 2, 1), False),
        (torch.ones(9, 2, dtype=torch.float64), False),
        (torch.ones(9, 2, dtype=torch.int32), False),
    ],
)
def test_a_cache_fits_tables_of_its_rows_and_dtype_only(cache, other, fits):
    kind = RowKind(tuple(other.shape[1:]), other.dtype)
    assert cache.fits(len(other), kind) == fits


def test_a_distrusted_cache_is_empty_for_the_next_session(home, cache):
    fill(cache, home)

    cache.distrust()
    open_session({NODE: home}, {NODE: cache}, mover([NODE]))

    assert held(cache) == []


def test_closing_twice_does_not_cost_the_next_session_its_rows(home, cache):
    tables = {NODE: home}
    left = open_session(tables, {NODE: cache}, mover(tables))
    left.window.push(BATCH)
    left.window.plan()
    left.close()
    fill(cache, home)

    left.close()
    open_session(tables, {NODE: cache}, mover(tables))

    assert held(cache) == [1, 2, 3]


@pytest.mark.parametrize(
    "other",
    [CacheSettings(6, "window", 2), CacheSettings(5, "lru", 2), CacheSettings(5, "window", 3)],
)
def test_loaders_of_one_cache_must_agree(cache, other):
    check_settings(cache.key, cache.settings, CacheSettings(5, "window", 2))

    with pytest.raises(ConfigError) as caught:
        check_settings(cache.key, cache.settings, other)

    message = str(caught.value)
    assert "node/None/feat is cached already, by another loader" in message
    assert str(cache.settings) in message
    assert str(other) in message
    assert "give both the same device_cache, retention and lookahead" in message


def test_a_table_knows_its_rows_and_their_bytes():
    home = table(NODE, torch.zeros(7, 2, 3, dtype=torch.float16))

    assert home.num_rows == 7
    assert home.kind.num_bytes == 12
    assert home.segment is None
    assert "node" in repr(home)
    assert "read" not in repr(ForeignTable(NODE, lambda ids: ids))


def test_a_table_of_scalars_has_rows_of_one_item():
    assert table(NODE, torch.zeros(7, dtype=torch.float64)).kind.num_bytes == 8


def test_versions_hold_no_table_alive(home):
    kept = table(NODE, torch.zeros(2)).version

    assert isinstance(kept, Version)
    assert kept.tensor() is None
