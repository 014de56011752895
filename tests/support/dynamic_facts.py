"""Facts about rows that change, on real ranks: they are as the sequential program has them."""

from __future__ import annotations

import dataclasses
import random
import time
from contextlib import suppress

import torch
import torch.distributed as dist

import featsync
from featsync.plan import FeatureKey
from support.dynamic_programs import random_program, sequential
from support.graphs import HandMade, planned, planned_loader, store_of
from support.tensors import same_bits

X = FeatureKey("node", None, "x")


def feature_of(program, **options):
    return featsync.DynamicFeature(program.start, program.merge, timeout=20.0, **options)


def loader_of(feature, wants, **settings):
    store = store_of({tuple(X): feature})
    return planned_loader(HandMade(wants), store, ["x"], timeout=20.0, **settings)


def pipe_of(feature, wants, **settings):
    """The stages alone: under a process group a gb.DataLoader is iterated by all ranks or none."""
    return planned(HandMade(wants), store_of({tuple(X): feature}), ["x"], timeout=20.0, **settings)


def run(rank, program, loader, feature, lag=0):
    """One epoch; ranks are slow and fast by turns."""
    reads, tables = sequential(program)
    pauses = random.Random(rank)
    count = 0
    for step, minibatch in enumerate(loader):
        found = minibatch.node_features["x"]
        wanted = program.wants[rank][step]
        allowed = tables[max(0, step - lag) : step + 1]
        assert any(same_bits(found, table[wanted]) for table in allowed), f"step {step}"
        if lag == 0:
            assert same_bits(found, reads[rank][step])
            assert same_bits(feature.read(), tables[step])
        for rows, values in program.calls[rank][step]:
            feature.update(values, rows, minibatch=minibatch)
        time.sleep(0.004 * pauses.random())
        count += 1
    assert count == len(program.wants[rank])
    feature.commit()
    dist.barrier()  # a rank without minibatches waits for nobody
    assert same_bits(feature.read(), tables[-1])
    return tables[-1]


def following(seed, merge, start):
    """A program that begins where another ended."""
    program = random_program(seed, dist.get_world_size(), merge, num_steps=6)
    return dataclasses.replace(program, start=start)


def programs_run_as_one_after_the_other(rank):
    for i, merge in enumerate(("last", "sum", "mean")):
        for worker in ("inline", "thread", "process"):
            program = random_program(10 * i + len(worker), dist.get_world_size(), merge)
            feature = feature_of(program)
            loader = loader_of(feature, program.wants[rank], worker=worker, lookahead=1 + 3 * i)
            run(rank, program, loader, feature)


def epochs_follow_one_another(rank):
    program = random_program(77, dist.get_world_size(), "sum")
    feature = feature_of(program)
    source = HandMade(program.wants[rank])
    loader = planned_loader(source, store_of({tuple(X): feature}), ["x"], lookahead=8)
    start = run(rank, program, loader, feature)
    for seed in range(3):
        program = following(seed, "sum", start)
        source.input_nodes = program.wants[rank]
        start = run(rank, program, loader, feature)


def stale_rows_stay_within_the_bound(rank):
    for lag in (1, 2, 3):
        for worker in ("inline", "thread", "process"):
            program = random_program(lag, dist.get_world_size(), "mean", num_steps=8)
            feature = feature_of(program)
            loader = loader_of(
                feature, program.wants[rank], worker=worker, staleness=lag, lookahead=4
            )
            run(rank, program, loader, feature, lag)
            assert 0 <= featsync.stats(loader).features[X].staleness <= lag


def parts_of_all_ranks_make_one_table(rank):
    size = dist.get_world_size()
    program = random_program(5, size, "sum")
    owners = torch.randint(0, size, (len(program.start),), generator=torch.Generator())
    dist.broadcast(owners, 0)
    own = program.start[owners == rank]
    feature = featsync.DynamicFeature(own, "sum", partition=owners)
    run(rank, program, loader_of(feature, program.wants[rank]), feature)


def leaving_a_loop_ends_the_epoch_and_the_next_is_whole(rank):
    program = random_program(21, dist.get_world_size(), "sum", num_steps=6)
    feature = feature_of(program)
    loader = loader_of(feature, [torch.arange(23)] * 6)
    for step, minibatch in enumerate(loader):
        feature.update(minibatch.node_features["x"] + 1, torch.arange(23))
        if step == rank:
            break
    feature.commit()
    # Ranks left after rank + 1 steps; each step added one for every rank that took part in it.
    size = dist.get_world_size()
    added = sum(range(1, size + 1))
    torch.testing.assert_close(feature.read(), program.start + added)
    dist.barrier()
    with suppress(ZeroDivisionError):
        for minibatch in loader:
            feature.update(minibatch.node_features["x"] + 1, torch.arange(23))
            raise ZeroDivisionError
    feature.commit()
    torch.testing.assert_close(feature.read(), program.start + added + size)


def nested_and_other_loaders_read_the_last_committed_step(rank):
    feature = featsync.DynamicFeature(torch.zeros(4, 2), "sum")
    train = loader_of(feature, [torch.arange(4)] * 3)
    other = pipe_of(feature, [torch.arange(4)] * (2 + rank))
    for step, minibatch in enumerate(train):
        for inner in other:
            assert inner.node_features["x"].eq(step * dist.get_world_size()).all()
        feature.update(minibatch.node_features["x"] + 1, torch.arange(4), minibatch=minibatch)
    feature.commit()
    dist.barrier()
    # Validation on one rank alone, after which all train again.
    if rank == 0:
        found = [minibatch.node_features["x"][0, 0].item() for minibatch in other]
        assert found == [3.0 * dist.get_world_size()] * 2
    for minibatch in train:
        feature.update(minibatch.node_features["x"] + 1, torch.arange(4), minibatch=minibatch)
    feature.commit()
    dist.barrier()
    assert feature.read().eq(6 * dist.get_world_size()).all()


def reading_of_any_step_needs_nobody(rank):
    feature = featsync.DynamicFeature(torch.zeros(4, 512), "sum")
    train = pipe_of(feature, [torch.arange(4)] * 4)
    other = pipe_of(feature, [torch.arange(4)] * 30, staleness="any")
    if rank == 0:
        empty = pipe_of(feature, [])
        assert list(empty) == []  # this rank takes no part in the epoch
        for minibatch in other:
            rows = minibatch.node_features["x"]
            assert rows.eq(rows[0, 0]).all()  # of one whole step
    else:
        for minibatch in train:
            feature.update(minibatch.node_features["x"] + 1, torch.arange(4))
    feature.commit()
    dist.barrier()
    assert feature.read().eq(4 * (dist.get_world_size() - 1)).all()


FACTS = [
    programs_run_as_one_after_the_other,
    epochs_follow_one_another,
    stale_rows_stay_within_the_bound,
    parts_of_all_ranks_make_one_table,
    leaving_a_loop_ends_the_epoch_and_the_next_is_whole,
    nested_and_other_loaders_read_the_last_committed_step,
    reading_of_any_step_needs_nobody,
]
