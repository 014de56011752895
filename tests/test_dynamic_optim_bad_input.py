"""Optimizers of rows that are used wrongly: clear errors, and nothing changes."""

from __future__ import annotations

import threading

import dgl.graphbolt as gb
import pytest
import torch

import featsync
from featsync import optim
from featsync.errors import ConfigError
from support.graphs import HandMade, planned_loader, store_of
from support.plain_optimizers import PLAIN_RULES
from support.tensors import same_bits

pytestmark = pytest.mark.dgl

NAMES = list(PLAIN_RULES)
ROWS = torch.arange(10)


def trained(name="SparseAdagrad", num_batches=3, **settings):
    """A feature, its optimizer, and a loader."""
    feature = featsync.DynamicFeature(torch.arange(30.0).reshape(10, 3))
    optimizer = getattr(optim, name)(feature, **settings)
    store = store_of({("node", None, "x"): feature})
    return feature, optimizer, planned_loader(HandMade([ROWS] * num_batches), store, ["x"])


def state_of(feature, optimizer):
    return [feature.read(), *optimizer.state_dict()["states"].values()]


def backward(minibatch):
    minibatch.node_features["x"].square().sum().backward()


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def assert_unchanged(feature, optimizer, before):
    for now, then in zip(state_of(feature, optimizer), before, strict=True):
        assert same_bits(now, then)


@pytest.mark.parametrize(
    ("feature", "words"),
    [
        (gb.TorchBasedFeature(torch.zeros(4, 1)), r"TorchBasedFeature is no featsync\.DynamicFea"),
        (torch.zeros(4, 1), r"Tensor is no featsync\.DynamicFeature: its rows are not followed"),
        (None, r"NoneType is no featsync\.DynamicFeature"),
    ],
)
def test_a_feature_that_does_not_change_is_refused(name, feature, words):
    with pytest.raises(ConfigError, match=rf"featsync\.optim\.{name}: {words}"):
        getattr(optim, name)(feature)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.complex64], ids=str)
def test_rows_without_gradients_are_refused(name, dtype):
    feature = featsync.DynamicFeature(torch.zeros(4, 1, dtype=dtype))
    with pytest.raises(ConfigError, match=rf"{name}: rows of {dtype} have no .*gradients; use fl"):
        getattr(optim, name)(feature)
    feature.update(torch.ones(4, 1, dtype=dtype))  # it is as it was: without an optimizer
    assert feature.read().eq(1).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": -0.1}, r"lr = -0\.1; it must be a number of at least 0"),
        ({"lr": float("nan")}, r"lr = nan; it must be"),
        ({"lr": "fast"}, r"lr = 'fast'; it must be a number"),
        ({"reduce": "max"}, r"reduce = 'max'; it can be sum, mean"),
    ],
)
def test_settings_that_are_not_allowed_are_refused(name, settings, words):
    feature = featsync.DynamicFeature(torch.zeros(4, 1))
    with pytest.raises(ConfigError, match=rf"featsync\.optim\.{name}: {words}"):
        getattr(optim, name)(feature, **settings)
    getattr(optim, name)(feature)  # what was refused has left nothing behind


def test_a_second_optimizer_of_the_same_rows_is_refused(name):
    feature, optimizer, loader = trained(name)
    for other in NAMES:
        with pytest.raises(ConfigError, match=rf"trained by featsync\.optim\.{name} already"):
            getattr(optim, other)(feature)
    for minibatch in loader:
        backward(minibatch)
        optimizer.step(minibatch)
    assert feature.read()[1:].ne(torch.arange(30.0).reshape(10, 3)[1:]).all()


def test_an_optimizer_made_inside_a_loop_is_refused(name):
    feature = featsync.DynamicFeature(torch.zeros(10, 3))
    store = store_of({("node", None, "x"): feature})
    for minibatch in planned_loader(HandMade([ROWS] * 2), store, ["x"]):
        with pytest.raises(
            ConfigError, match="a loop over these rows is under way; make it before"
        ):
            getattr(optim, name)(feature)
        assert not minibatch.node_features["x"].requires_grad
    getattr(optim, name)(feature)


def test_a_step_without_backward_and_a_second_step_are_refused(name):
    feature, optimizer, loader = trained(name)
    before = state_of(feature, optimizer)
    for minibatch in loader:
        with pytest.raises(ConfigError, match=r"\.step: the rows .* have no gradients.*backward"):
            optimizer.step(minibatch)
    assert_unchanged(feature, optimizer, before)
    once = {}
    for minibatch in loader:
        backward(minibatch)
        optimizer.step(minibatch)
        with pytest.raises(ConfigError, match=r"have no gradients \(or they are used up\)"):
            optimizer.step(minibatch)
        once.setdefault("rows", minibatch.node_features["x"].grad)
    assert once["rows"] is None


def test_a_step_outside_of_loops_is_refused(name):
    feature, optimizer, loader = trained(name)
    with pytest.raises(ConfigError, match=rf"{name}\.step: no loop over a loader of this feature"):
        optimizer.step(gb.MiniBatch())
    minibatches = list(loader)
    before = state_of(feature, optimizer)
    backward(minibatches[-1])
    with pytest.raises(ConfigError, match=r"no loop over a loader of this feature is under way"):
        optimizer.step(minibatches[-1])
    assert_unchanged(feature, optimizer, before)


def test_a_step_for_another_minibatch_than_the_last_is_refused(name):
    feature, optimizer, loader = trained(name)
    before = state_of(feature, optimizer)
    last = None
    for minibatch in loader:
        backward(minibatch)
        for wrong in (last, gb.MiniBatch(), None):
            with pytest.raises(ConfigError, match=r"not the last one delivered|give the minibatch"):
                optimizer.step(wrong)
        last = minibatch
    assert_unchanged(feature, optimizer, before)


def test_a_step_on_another_thread_is_refused(name):
    feature, optimizer, loader = trained(name)
    before = state_of(feature, optimizer)
    words = []

    def step(minibatch):
        try:
            optimizer.step(minibatch)
        except ConfigError as error:
            words.append(str(error))

    for minibatch in loader:
        backward(minibatch)
        thread = threading.Thread(target=step, args=(minibatch,))
        thread.start()
        thread.join()
    assert len(words) == 3
    assert "from another thread than the one that iterates" in words[0]
    assert_unchanged(feature, optimizer, before)


def test_an_update_inside_a_loop_of_rows_with_an_optimizer_is_refused(name):
    feature, optimizer, loader = trained(name)
    before = state_of(feature, optimizer)
    for minibatch in loader:
        with pytest.raises(ConfigError, match=rf"trained by featsync\.optim\.{name}.*outside of l"):
            feature.update(torch.ones(10, 3), minibatch=minibatch)
    assert_unchanged(feature, optimizer, before)
    feature.update(torch.ones(10, 3))  # outside of loops it is allowed
    assert feature.read().eq(1).all()


def without(state, key):
    return {name: value for name, value in state.items() if name != key}


def test_states_of_something_else_are_refused(name):
    feature, optimizer, loader = trained(name)
    for minibatch in loader:
        backward(minibatch)
        optimizer.step(minibatch)
    good = optimizer.state_dict()
    before = state_of(feature, optimizer)
    wider = trained(name)[1].state_dict()
    wider["states"] = {key: torch.zeros(11, 3) for key in wider["states"]}
    other = next(one for one in NAMES if one != name)
    bad = {
        r"the state is of .* this optimizer of": trained(other)[1].state_dict(),
        r"'reduce': 'mean'": trained(name, reduce="mean")[1].state_dict(),
        r"'name': None": {},
        r"the state has no lr$": without(good, "lr"),
        r"the state has no states$": without(good, "states"),
    }
    if optimizer.states:
        half = {key: value.to(torch.float16) for key, value in good["states"].items()}
        bad[r"is \(11, 3\) torch\.float32 where \(10, .\) "] = wider
        bad[r"torch\.float16 where \(10, .\) torch"] = {**good, "states": half}
        bad[r"is NoneType where"] = {**good, "states": {}}
    for words, state in bad.items():
        with pytest.raises(ConfigError, match=words):
            optimizer.load_state_dict(state)
        assert_unchanged(feature, optimizer, before)
    for _ in loader:
        with pytest.raises(ConfigError, match=r"load_state_dict: a loop .* is under way"):
            optimizer.load_state_dict(good)
    assert_unchanged(feature, optimizer, before)
