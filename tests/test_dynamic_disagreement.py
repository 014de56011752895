"""Ranks that disagree about rows that change, or run too far ahead: clear errors on all of them.

Each function before the tests is a fact, see `support.facts`.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import featsync
from featsync.errors import ConfigError, PeerError
from support.facts import Launch, name_of
from support.graphs import HandMade, planned, store_of
from support.tensors import same_bits

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]

ROWS = torch.arange(20)


def pipe_of(feature, num_batches, **settings):
    store = store_of({("node", None, "x"): feature})
    return planned(HandMade([ROWS] * num_batches), store, ["x"], timeout=20.0, **settings)


def a_feature_works(merge="last"):
    """One step after all that was refused."""
    rank = dist.get_rank()
    feature = featsync.DynamicFeature(torch.zeros(20, 2), merge, timeout=20.0)
    for _ in pipe_of(feature, 1):
        feature.update(torch.full((1, 2), 1.0 + rank), torch.tensor([rank]))
    dist.barrier()
    assert feature.read()[:3, 0].tolist() == [1, 2, 0]


def ranks_that_disagree_about_the_rows_are_all_told(rank):
    rows = torch.zeros(20, 2)
    odd = rank == 1
    given = [
        ((rows[:, : 2 - odd],), {}, r"ranks disagree .*rows \(2,\) .*rows \(1,\)"),
        ((rows.to([torch.float32, torch.float64][rank]),), {}, r"float32.*float64"),
        ((rows, ["last", "sum"][rank]), {}, r"merge='last'.*merge='sum'"),
        ((rows[: 20 - odd],), {}, r"ranks bring \[20, 19\] rows where \[20, 20\] were expected"),
        ((rows[:10],), {"partition": [0, 10 + rank, 20]}, r"different partitions"),
        ((rows[: 10 - odd],), {"partition": [0, 10, 20]}, r"bring \[10, 9\] rows where \[10, 10\]"),
    ]
    for arguments, options, words in given:
        start = time.monotonic()
        with pytest.raises(ConfigError, match=words):
            featsync.DynamicFeature(*arguments, timeout=20.0, **options)
        assert time.monotonic() - start < 10
    a_feature_works()


def what_one_rank_gets_wrong_is_its_own_error_and_told_to_the_others(rank):
    rows = torch.zeros(20, 2)
    given = [
        (([rows, [[1.0]]][rank],), {}, "list given; give a tensor"),
        ((rows, ["sum", "some"][rank]), {}, r"merge = 'some' is not known; it can be last, mean"),
        (
            (rows.long() if rank else rows, "sum"),
            {},
            r"merge='sum' adds and divides, which torch\.int64 rows cannot",
        ),
        ((rows[:10],), {"partition": [[0, 10, 20], [0, 10]][rank]}, r"is for 1 ranks, but 2"),
    ]
    for arguments, options, words in given:
        error = ConfigError if rank == 1 else PeerError
        with pytest.raises(error, match=words) as caught:
            featsync.DynamicFeature(*arguments, timeout=20.0, **options)
        assert rank == 1 or caught.value.peer == "rank 1"
    a_feature_works()


def ranks_that_disagree_about_their_optimizer_hear_of_it(rank):
    """Whoever comes second; it may then make the right one."""
    optim = featsync.optim
    pairs = [
        (lambda f: optim.SparseSGD(f, lr=0.1), lambda f: optim.SparseSGD(f, lr=0.1, reduce="mean")),
        (lambda f: optim.SparseSGD(f, lr=0.1), lambda f: optim.SparseSGD(f, lr=0.2)),
        (lambda f: optim.SparseSGD(f), lambda f: optim.SparseAdagrad(f)),
        (lambda f: optim.SparseAdagrad(f), lambda f: optim.RowWiseAdagrad(f)),
        (lambda f: optim.SparseAdam(f), lambda f: optim.SparseAdam(f, betas=(0.8, 0.9))),
        (lambda f: optim.SparseAdagrad(f), lambda f: optim.SparseAdagrad(f, eps=1e-3)),
    ]
    for right, wrong in pairs:
        feature = featsync.DynamicFeature(torch.ones(20, 2), timeout=20.0)
        if rank == 0:
            optimizer = right(feature)
        dist.barrier()
        if rank == 1:
            with pytest.raises(ConfigError, match=r"disagree.*rank 0 has.*rank 1 asks for.*same"):
                wrong(feature)
            optimizer = right(feature)
        for minibatch in pipe_of(feature, 2):
            minibatch.node_features["x"].sum().backward()
            optimizer.step(minibatch)
        dist.barrier()
        assert feature.read().lt(1).all()


def learning_rates_that_differ_in_a_step_are_an_error(rank):
    """Of whoever merges rows of both; the other hears of it. Their table is lost."""
    feature = featsync.DynamicFeature(torch.ones(20, 2), timeout=20.0)
    optimizer = featsync.optim.SparseSGD(feature, lr=0.1)

    def train():
        for step, minibatch in enumerate(pipe_of(feature, 5)):
            minibatch.node_features["x"].sum().backward()
            optimizer.lr = 0.1 + 0.1 * rank * (step == 1)
            optimizer.step(minibatch)

    with pytest.raises((ConfigError, PeerError), match=r"learning rates|failed while it changed"):
        train()
    dist.barrier()


def bad_updates_on_one_rank_leave_the_steps_of_both_as_they_are(rank):
    feature = featsync.DynamicFeature(torch.zeros(20, 2), "sum", timeout=20.0)
    for step, minibatch in enumerate(pipe_of(feature, 4)):
        assert minibatch.node_features["x"].eq(2 * step).all()
        if rank == 1:
            for value, ids in ((torch.ones(1, 3), [3]), (torch.ones(1, 2), [20])):
                with pytest.raises((ConfigError, IndexError)):
                    feature.update(value, torch.tensor(ids), minibatch=minibatch)
        feature.update(minibatch.node_features["x"] + 1, ROWS, minibatch=minibatch)
    dist.barrier()
    assert feature.read().eq(8).all()


def a_staleness_that_is_too_large_is_an_error_of_the_rank_that_is_ahead(rank):
    """Its areas are full: what it has written so far counts, and what failed does not."""
    feature = featsync.DynamicFeature(torch.zeros(20, 2), "sum", timeout=20.0)
    count = 0
    if rank == 0:
        for minibatch in pipe_of(feature, 30, staleness=25):
            if count < 16:
                feature.update(torch.full((20, 2), count + 1.0), minibatch=minibatch)
                count += 1
                continue
            words = r"16 steps of this rank wait for other ranks.*Use a staleness of at most 14"
            with pytest.raises(ConfigError, match=words):
                feature.update(torch.ones(20, 2), minibatch=minibatch)
            assert feature.read().eq(0).all()
            dist.barrier()
            break
    else:
        for minibatch in pipe_of(feature, 5, staleness=25):
            if count == 0:
                feature.update(torch.zeros(0, 2), ROWS[:0], minibatch=minibatch)
                dist.barrier()
            count += 1
    dist.barrier()
    assert same_bits(feature.read(), torch.full((20, 2), 16.0))


FACTS = [
    ranks_that_disagree_about_the_rows_are_all_told,
    what_one_rank_gets_wrong_is_its_own_error_and_told_to_the_others,
    ranks_that_disagree_about_their_optimizer_hear_of_it,
    learning_rates_that_differ_in_a_step_are_an_error,
    bad_updates_on_one_rank_leave_the_steps_of_both_as_they_are,
    a_staleness_that_is_too_large_is_an_error_of_the_rank_that_is_ahead,
]
LAUNCH = Launch(2, FACTS, timeout_s=100)


@pytest.mark.parametrize("fact", FACTS, ids=name_of)
def test_ranks_that_disagree(fact):
    LAUNCH.check(fact)
