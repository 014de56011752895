"""Updates and optimizers that are used wrongly, on one rank: clear errors, and nothing changes."""

from __future__ import annotations

import threading

import pytest
import torch

import featsync
from featsync import optim
from featsync.errors import ConfigError, FeatureChangedError, FeatureError
from support.graphs import HandMade, planned_loader, store_of
from support.tensors import same_bits

pytestmark = pytest.mark.dgl

ROWS = torch.arange(10)
GOOD = torch.ones(2, 3)
SOME = torch.tensor([4, 5])


def feature_of(merge="last"):
    return featsync.DynamicFeature(torch.arange(30.0).reshape(10, 3), merge)


def loader_of(feature, num_batches=3, **settings):
    store = store_of({("node", None, "x"): feature})
    return planned_loader(HandMade([ROWS] * num_batches), store, ["x"], **settings)


BAD_UPDATES = {
    "an id behind the table": (
        GOOD,
        torch.tensor([4, 10]),
        FeatureError,
        r"DynamicFeature\.update: id 10 is outside its table of 10 rows \(allowed 0 to 9\)",
    ),
    "a negative id": (GOOD, torch.tensor([4, -1]), FeatureError, r"id -1 is outside.*allowed 0"),
    "ids of floats": (
        GOOD,
        torch.tensor([4.0, 5.0]),
        ConfigError,
        r"ids are \(2,\) torch\.float32; give a tensor \(n,\) of int32 or int64",
    ),
    "a mask": (GOOD, torch.ones(10, dtype=torch.bool), ConfigError, r"ids are \(10,\) torch\.bool"),
    "ids in a list": (GOOD, [4, 5], ConfigError, r"ids are list; give a tensor"),
    "one id without an axis": (GOOD[0], torch.tensor(4), ConfigError, r"ids are \(\) torch\.int64"),
    "ids of two axes": (GOOD, SOME[:, None], ConfigError, r"ids are \(2, 1\)"),
    "wider rows": (
        torch.ones(2, 4),
        SOME,
        ConfigError,
        r"value is \(2, 4\) torch\.float32 where \(2, 3\) torch\.float32 is allowed, one row for",
    ),
    "one row for two ids": (GOOD[:1], SOME, ConfigError, r"\(1, 3\) .* where \(2, 3\)"),
    "a row without its axis": (GOOD[0], SOME[:1], ConfigError, r"\(3,\) .* where \(1, 3\)"),
    "rows for all but one": (torch.ones(9, 3), None, ConfigError, r"\(9, 3\) .* where \(10, 3\)"),
    "another dtype": (
        GOOD.double(),
        SOME,
        ConfigError,
        r"torch\.float64 where \(2, 3\) torch\.float32 is allowed",
    ),
    "whole numbers": (GOOD.long(), SOME, ConfigError, r"torch\.int64 where"),
    "a number": (1.0, SOME, ConfigError, r"value is float; give a tensor"),
    "an array": (GOOD.numpy(), SOME, ConfigError, r"value is ndarray; give a tensor"),
    "nothing": (None, SOME, ConfigError, r"value is NoneType; give a tensor"),
    "a sparse tensor": (
        GOOD.to_sparse(),
        SOME,
        ConfigError,
        r"value is torch\.sparse_coo; give a dense",
    ),
}


@pytest.mark.parametrize("name", BAD_UPDATES)
@pytest.mark.parametrize("merge", ["last", "sum"])
def test_updates_that_do_not_fit_are_refused_and_change_nothing(name, merge):
    """Outside of loops and inside, where the good update of the same step stays."""
    value, ids, error, words = BAD_UPDATES[name]
    feature = feature_of(merge)
    start = feature.read()
    with pytest.raises(error, match=words):
        feature.update(value, ids)
    assert same_bits(feature.read(), start)
    wanted = start.clone()
    wanted[SOME] = GOOD
    for step, minibatch in enumerate(loader_of(feature)):
        assert same_bits(minibatch.node_features["x"], wanted if step > 1 else start)
        with pytest.raises(error, match=words):
            feature.update(value, ids, minibatch=minibatch)
        if step == 1:
            feature.update(GOOD, SOME, minibatch=minibatch)
            with pytest.raises(error, match=words):
                feature.update(value, ids, minibatch=minibatch)
    assert same_bits(feature.read(), wanted)


@pytest.mark.parametrize("ids", [torch.tensor([10]), torch.tensor([-1])], ids=str)
def test_reads_outside_the_table_are_refused(ids):
    with pytest.raises(FeatureError, match=r"outside its table of 10 rows"):
        feature_of().read(ids)


def test_a_row_of_a_static_feature_is_not_updated_unseen():
    """Whoever read its rows ahead says so."""
    store = store_of({("node", None, "x"): torch.zeros(10, 3)})
    loader = planned_loader(HandMade([ROWS] * 3), store, ["x"])
    iterator = iter(loader)
    next(iterator)
    store.update("node", None, "x", GOOD, SOME)
    with pytest.raises(FeatureChangedError, match="was updated inside a loop that reads it ahead"):
        next(iterator)


def test_updates_from_another_thread_are_refused():
    feature = feature_of()
    start = feature.read()
    caught = []

    def update(minibatch):
        try:
            feature.update(GOOD, SOME, minibatch=minibatch)
        except ConfigError as error:
            caught.append(str(error))

    for minibatch in loader_of(feature):
        thread = threading.Thread(target=update, args=(minibatch,))
        thread.start()
        thread.join()
        assert same_bits(minibatch.node_features["x"], start)
    assert len(caught) == 3
    assert "from another thread than the one that iterates" in caught[0]
    assert "Put copy_to before sync_feature" in caught[0]
    assert same_bits(feature.read(), start)


def test_updates_for_another_minibatch_than_the_last_are_refused():
    feature = feature_of()
    start = feature.read()
    others = list(loader_of(feature_of()))
    before = None
    for minibatch in loader_of(feature):
        for wrong in (before, others[-1], HandMade([ROWS])):
            if wrong is not None:
                with pytest.raises(ConfigError, match="not the last one delivered"):
                    feature.update(GOOD, SOME, minibatch=wrong)
        before = minibatch
    with pytest.raises(ConfigError, match=r"no loop over a loader of this feature is under way"):
        feature.update(GOOD, SOME, minibatch=before)
    assert same_bits(feature.read(), start)


BAD_FEATURES = {
    "an unknown merge": (
        torch.zeros(4, 1),
        {"merge": "lest"},
        r"DynamicFeature\.merge = 'lest' is not known; it can be last, mean, sum\. Did you mean",
    ),
    "sums of whole numbers": (
        torch.zeros(4, 1, dtype=torch.int64),
        {"merge": "sum"},
        r"merge='sum' adds and divides, which torch\.int64 rows cannot: use float or complex",
    ),
    "means of booleans": (
        torch.zeros(4, 1, dtype=torch.bool),
        {"merge": "mean"},
        r"merge='mean' adds and divides, which torch\.bool rows cannot",
    ),
    "no tensor": ([[1.0]], {}, r"list given; give a tensor"),
    "no rows": (torch.tensor(1.0), {}, r"give a tensor \(rows, \.\.\.\)"),
    "sparse rows": (torch.zeros(4, 1).to_sparse(), {}, r"torch\.sparse_coo; rows are dense"),
    "bounds for more ranks": (
        torch.zeros(4, 1),
        {"partition": [0, 2, 4]},
        r"is for 2 ranks, but 1 take part",
    ),
}


@pytest.mark.parametrize("name", BAD_FEATURES)
def test_what_makes_no_table_is_refused(name):
    tensor, options, words = BAD_FEATURES[name]
    with pytest.raises(ConfigError, match=words):
        featsync.DynamicFeature(tensor, **options)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"staleness": -1}, "staleness"),
        ({"staleness": 1.5}, "staleness"),
        ({"staleness": "some"}, "staleness"),
    ],
)
def test_a_staleness_that_is_none_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        loader_of(feature_of(), **settings)


def test_all_optimizers_are_public():
    assert {name for name in optim.__all__ if name != "RowOptimizer"} == {
        "SparseSGD",
        "SparseAdagrad",
        "RowWiseAdagrad",
        "SparseAdam",
    }
