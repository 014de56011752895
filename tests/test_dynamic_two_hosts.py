"""Rows that change on ranks of several machines, pretended by namespaces."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist

import featsync
from cluster import Cluster, ClusterError, why_impossible
from featsync.world import World
from support.dynamic_facts import FACTS, X, loader_of, run
from support.dynamic_programs import random_program
from support.facts import assert_established, establish
from support.hosts import HostRanks
from support.tensors import same_bits

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]


def each_machine_holds_its_part_once(rank):
    """Rows dealt out at random: one part a machine, and what a rank reads of others is counted."""
    world = World.join()
    program = random_program(11, world.size, "sum", num_rows=400, num_steps=6)
    owners = torch.randint(0, world.size, (400,), generator=torch.Generator().manual_seed(3))
    own = program.start[owners == rank]
    feature = featsync.DynamicFeature(own, "sum", partition=owners)
    hosts = torch.tensor(world.host_of_rank)
    is_near = hosts[owners] == hosts[rank]
    assert len(feature.featsync_clock.table) == int(is_near.sum())
    loader = loader_of(feature, program.wants[rank])
    run(rank, program, loader, feature)
    rows = featsync.stats(loader).features[X].rows
    # Each of a minibatch's rows is sent once.
    assert rows["peer"] == sum(len(ids[~is_near[ids]].unique()) for ids in program.wants[rank])


def rows_are_learned_as_on_one_machine(rank):
    """Adagrad, a checkpoint after two epochs, and two epochs more, from it and without."""
    world = World.join()
    start = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(rank)
    wants = [torch.randint(0, 30, (12,), generator=random) for _ in range(4)]

    def learner(rows, state=None):
        feature = featsync.DynamicFeature(rows)
        optimizer = featsync.optim.SparseAdagrad(feature, lr=0.1)
        if state is not None:
            optimizer.load_state_dict(state)
        return feature, optimizer, loader_of(feature, wants)

    def train(feature, optimizer, loader):
        for minibatch in loader:
            (minibatch.node_features["x"] ** 2).sum().backward()
            optimizer.step(minibatch)
        feature.commit()

    feature, optimizer, loader = learner(start)
    for _ in range(2):
        train(feature, optimizer, loader)
    rows, state = feature.read(), optimizer.state_dict()
    assert len(state["states"]["sum"]) == 30
    again, its_optimizer, its_loader = learner(rows, state)
    for _ in range(2):
        train(feature, optimizer, loader)
        train(again, its_optimizer, its_loader)
    assert same_bits(feature.read(), again.read())
    found = [None] * world.size
    dist.all_gather_object(found, (feature.read(), optimizer.state_dict()["states"]["sum"]))
    assert all(same_bits(r, found[0][0]) and same_bits(s, found[0][1]) for r, s in found)
    assert not same_bits(rows, feature.read())


def a_file_holds_the_rows_of_all_machines(rank):
    feature = featsync.DynamicFeature(torch.arange(40.0).reshape(20, 2))
    feature.update(torch.full((1, 2), -1.0), torch.tensor([rank * 6]))
    dist.barrier()
    path = f"{os.environ['TEST_FOLDER']}/rows.{dist.get_world_size()}.npy"
    feature.flush(path)
    dist.barrier()
    assert same_bits(torch.from_numpy(np.load(path)), feature.read())


ALL = [
    *FACTS,
    each_machine_holds_its_part_once,
    rows_are_learned_as_on_one_machine,
    a_file_holds_the_rows_of_all_machines,
]
SHAPES = {"2x1": {"hosts": 2}, "2x2": {"hosts": 2}}


def launch(shape):
    with Cluster(**SHAPES[shape]) as cluster:
        ranks = HostRanks(cluster, int(shape[-1]), establish, ALL, timeout_s=150)
        try:
            ranks.results()
        except (AssertionError, ClusterError) as error:
            return str(error)
    return None


@pytest.fixture(scope="module")
def launches():
    if (reason := why_impossible(2)) is not None:
        pytest.skip(reason)
    return {}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fact", ALL, ids=lambda fact: fact.__name__)
def test_dynamic_features(launches, shape, fact):
    if shape not in launches:
        launches[shape] = launch(shape)
    assert_established(launches[shape], fact, ALL)
