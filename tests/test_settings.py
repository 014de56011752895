"""Arguments of the stages: what is allowed, and what the refusal of anything else says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from featsync.errors import ConfigError
from featsync.plan import FeatureKey
from featsync.retention import MAX_WINDOW, RETENTION
from featsync.settings import CACHE_SCOPES, PlannerSettings, SyncerSettings
from featsync.transports import TRANSPORTS
from featsync.workers import WORKERS
from support.strategies import NODE, OTHER


def refusal(settings, **arguments):
    with pytest.raises(ConfigError) as caught:
        settings(**arguments)
    return str(caught.value)


def test_defaults_are_allowed():
    assert PlannerSettings() == PlannerSettings(2, "window", None, 0, "rank")
    assert SyncerSettings() == SyncerSettings("auto", "thread", None, 0, 60.0, None)


@pytest.mark.parametrize("retention", sorted(RETENTION))
def test_every_policy_can_be_named(retention):
    assert PlannerSettings(retention=retention).retention == retention


@pytest.mark.parametrize("worker", sorted(WORKERS))
def test_every_worker_can_be_named(worker):
    assert SyncerSettings(worker=worker).worker == worker


@pytest.mark.parametrize("lookahead", [0, -1, 1.0, True, "2", None])
def test_lookahead_is_a_whole_number_of_at_least_one(lookahead):
    assert PlannerSettings(lookahead=1).lookahead == 1

    assert refusal(PlannerSettings, lookahead=lookahead) == (
        f"plan_feature.lookahead = {lookahead!r}: it must be a whole number, 1 or more"
    )


def test_a_cache_limits_how_far_ahead_it_can_look():
    assert PlannerSettings(lookahead=MAX_WINDOW + 1).lookahead == MAX_WINDOW + 1
    assert PlannerSettings(lookahead=MAX_WINDOW, device_cache=0.1).lookahead == MAX_WINDOW
    assert PlannerSettings(lookahead=999, device_cache=0.1, retention="none").lookahead == 999

    message = refusal(PlannerSettings, lookahead=MAX_WINDOW + 1, device_cache=0.1)

    assert message == "plan_feature.lookahead = 65: with a device_cache it must be at most 64"


@pytest.mark.parametrize("staleness", [-1, 1.5, False, "some", None])
def test_staleness_is_a_whole_number_or_any(staleness):
    assert SyncerSettings(staleness="any").staleness == "any"
    assert SyncerSettings(staleness=3).staleness == 3

    assert refusal(SyncerSettings, staleness=staleness) == (
        f"sync_feature.staleness = {staleness!r}: it must be a whole number, 0 or more"
    )


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan"), True, "60", None])
def test_timeout_is_a_number_of_seconds_over_zero(timeout):
    assert SyncerSettings(timeout=1).timeout == 1

    assert refusal(SyncerSettings, timeout=timeout) == (
        f"sync_feature.timeout = {timeout!r}: it must be a number of seconds over 0"
    )


NAMES = {
    "plan_feature.retention": (PlannerSettings, sorted(RETENTION), "windw", "window"),
    "plan_feature.cache_scope": (PlannerSettings, sorted(CACHE_SCOPES), "hots", "host"),
    "sync_feature.transport": (
        SyncerSettings,
        sorted(["auto", *TRANSPORTS]),
        "shared-memory",
        "shared_memory",
    ),
    "sync_feature.worker": (SyncerSettings, sorted(WORKERS), "threads", "thread"),
}


@pytest.mark.parametrize("where", NAMES)
def test_a_name_that_is_not_known_is_refused_with_what_was_meant(where):
    settings, allowed, wrong, meant = NAMES[where]
    _, argument = where.split(".")

    assert refusal(settings, **{argument: wrong}) == (
        f"{where} = {wrong!r} is not known; it can be {', '.join(allowed)}. Did you mean {meant!r}?"
    )


@pytest.mark.parametrize("where", NAMES)
@pytest.mark.parametrize("name", ["zzz", 3, {}, [1]])
def test_what_is_like_no_name_is_refused_without_a_guess(where, name):
    settings, allowed, _, _ = NAMES[where]
    _, argument = where.split(".")

    assert refusal(settings, **{argument: name}) == (
        f"{where} = {name!r} is not known; it can be {', '.join(allowed)}."
    )


def test_nothing_and_lists_of_names_are_refused_with_the_name_that_was_meant():
    for name, meant in ((None, "none"), (["window"], "window")):
        assert refusal(PlannerSettings, retention=name).endswith(f"Did you mean {meant!r}?")


def test_a_cache_size_is_checked_when_the_stage_is_built():
    assert PlannerSettings(device_cache="512MiB").device_cache == "512MiB"

    message = refusal(PlannerSettings, device_cache="512")

    assert message.startswith("plan_feature.device_cache = '512': it must be rows (1000), a")


def test_a_device_is_checked_when_the_stage_is_built():
    assert SyncerSettings(device="cpu").device == "cpu"

    message = refusal(SyncerSettings, device="gpu")

    assert message == "sync_feature.device = 'gpu' is not a device; it can be cpu, cuda or cuda:N"


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        PlannerSettings().lookahead = 0


@pytest.mark.parametrize("score", [torch.arange(4.0), np.arange(4.0)])
def test_one_score_serves_every_feature(score):
    settings = PlannerSettings(score=score)

    for key in (NODE, OTHER):
        found = settings.score_of(key, 4)
        assert isinstance(found, np.ndarray)
        assert found.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_scores_by_feature_serve_the_features_they_name():
    settings = PlannerSettings(score={"node/None/feat": torch.arange(4.0)})

    assert settings.score_of(NODE, 4).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert settings.score_of(OTHER, 4) is None


def test_without_a_score_use_is_counted():
    assert PlannerSettings().score_of(NODE, 4) is None


@pytest.mark.parametrize("score", [torch.zeros(3), torch.zeros(4, 1), np.float32(1.0)])
def test_a_score_has_one_number_a_row(score):
    with pytest.raises(ConfigError) as caught:
        PlannerSettings(score=score).score_of(NODE, 4)

    assert str(caught.value) == (
        f"plan_feature.score of node/None/feat has shape {tuple(score.shape)}; it must be (4,), "
        "one number a row. Give a mapping such as {'node/None/feat': score} for several features."
    )


def test_a_score_of_a_feature_that_is_not_asked_for_says_which_was_meant():
    settings = PlannerSettings(score={"node/None/fea": torch.zeros(3)})

    with pytest.raises(ConfigError, match=r"plan_feature\.score.*Did you mean 'node/None/feat'"):
        settings.check_scores([FeatureKey("node", None, "feat")])
