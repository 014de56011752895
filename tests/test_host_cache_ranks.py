"""One cache for the ranks of a machine: values, sharing, leaving, errors; rows come point to point.

On one machine rows of other ranks are only far if they are asked for by ``p2p``, so that is asked
for here. `test_two_hosts` has the same between machines.
"""

from __future__ import annotations

import itertools
import re
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import featsync
from featsync.errors import ConfigError, FeatureError, PeerError
from featsync.profile import VARIABLE
from featsync.scores import presampled_counts
from support.facts import Launch, name_of
from support.graphs import (
    HandMade,
    assert_as_stock,
    planned,
    planned_loader,
    ring_store,
    store_of,
)
from support.parts import PARTITIONS, partitioned
from support.profiles import write_profile

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]

NUM_ROWS = 2000
SETTINGS = {"transport": "p2p", "device_cache": 0.1, "cache_scope": "host"}


def table(dtype=torch.float32):
    return torch.arange(NUM_ROWS * 3).reshape(NUM_ROWS, 3).to(dtype)


def skewed(num_batches, seed, size=300):
    """Distinct ids in any order, of which low ones come more often."""
    generator = torch.Generator().manual_seed(seed)
    draws = (NUM_ROWS * torch.rand(num_batches, size, generator=generator) ** 2).long()
    return [ids[torch.randperm(len(ids), generator=generator)] for ids in map(torch.unique, draws)]


def drain(loader, stock, num_batches=None, pause_s=0.0):
    """Compare minibatches with a stock store; how many there were."""
    done = 0
    for minibatch in itertools.islice(loader, num_batches):
        assert_as_stock(minibatch, stock, ["x"])
        time.sleep(pause_s)
        done += 1
    return done


# Facts: each runs on all ranks of one launch, and raises where it does not hold.


def rows_are_as_in_stock(rank):
    choices = itertools.product(
        PARTITIONS, ("inline", "thread", "process"), (1, 8), ("window", "static")
    )
    for how, worker, lookahead, retention in choices:
        loader = planned_loader(
            HandMade(skewed(12, rank)),
            partitioned(ring_store(table()), how),
            ["x"],
            worker=worker,
            lookahead=lookahead,
            retention=retention,
            **SETTINGS,
        )
        assert drain(loader, ring_store(table())) == 12
        assert drain(loader, ring_store(table())) == 12
        stats = featsync.stats(loader)
        assert stats.rows == 2 * sum(map(len, skewed(12, rank)))
        assert stats.bytes["cache"] > 0
        assert (
            f"once for the {dist.get_world_size()} ranks of this machine"
            in stats.features[next(iter(stats.features))].why
        )


def other_dtypes_and_repeated_ids_arrive(rank):
    wanted = [torch.cat([ids, ids[:50]]) for ids in skewed(8, rank)]
    for dtype in (torch.bool, torch.float16, torch.int64, torch.complex128):
        stock = ring_store(table(dtype))
        loader = planned_loader(HandMade(wanted), partitioned(stock, "owners"), ["x"], **SETTINGS)
        assert drain(loader, stock) == 8


def what_one_rank_brought_is_there_for_the_others(rank):
    """All want the same rows: of each, one rank asks its owner, and only once while it stays."""
    store = partitioned(ring_store(table()), "owners")
    wanted = skewed(1, seed=7, size=100) * 6
    settings = SETTINGS | {"lookahead": 4}
    loader = planned_loader(HandMade(wanted), store, ["x"], **settings)
    assert drain(loader, ring_store(table())) == 6
    from_peers = torch.tensor(featsync.stats(loader).features[("node", None, "x")].rows["peer"])
    dist.all_reduce(from_peers)
    # Each distinct row is far for all ranks but its owner.
    assert from_peers == len(wanted[0])


def several_features_in_one_minibatch_follow_one_order(rank):
    """Named in another order on each rank, all wanted by all at once."""
    names = [f"x{number}" for number in range(4)]
    tables = {name: table() * (1 + number) for number, name in enumerate(names)}
    stock = store_of({("node", None, name): rows for name, rows in tables.items()})
    store = partitioned(stock, "owners")
    for worker in ("inline", "thread"):
        in_turn = names[rank % 4 :] + names[: rank % 4]
        loader = planned_loader(
            HandMade(skewed(30, seed=3)), store, in_turn, worker=worker, **SETTINGS
        )
        for minibatch in loader:
            assert_as_stock(minibatch, stock, in_turn)


def ranks_may_be_uneven_and_leave_early(rank):
    store = partitioned(ring_store(table()), "owners")
    loader = planned_loader(
        HandMade(skewed(4 + 6 * rank, rank)), store, ["x"], worker="thread", **SETTINGS
    )
    assert drain(loader, ring_store(table())) == 4 + 6 * rank
    num_batches = 2 if rank == 0 else None
    assert drain(loader, ring_store(table()), num_batches) == (
        2 if rank == 0 else 10 + 6 * (rank - 1)
    )
    assert drain(loader, ring_store(table())) == 4 + 6 * rank
    if rank == 0:  # the others are at other things
        pipe = planned(HandMade(skewed(5, 9)), store, ["x"], worker="inline", **SETTINGS)
        assert drain(pipe, ring_store(table())) == 5


def a_loop_nested_in_another_reads_from_home(rank):
    store = partitioned(ring_store(table()), "range")
    outer = planned_loader(HandMade(skewed(4, rank)), store, ["x"], **SETTINGS)
    for minibatch in outer:
        inner = planned(HandMade(skewed(3, 50 + rank)), store, ["x"], **SETTINGS)
        assert drain(inner, ring_store(table())) == 3
        assert featsync.stats(inner).bytes["cache"] == 0
        assert_as_stock(minibatch, ring_store(table()), ["x"])


def after_an_error_the_next_iteration_has_a_new_cache(rank):
    store = partitioned(ring_store(table()), "owners")
    bad = [*skewed(4, rank), torch.tensor([NUM_ROWS])]
    loader = planned_loader(
        HandMade(bad if rank == 0 else skewed(400, rank)), store, ["x"], **SETTINGS
    )
    with pytest.raises(FeatureError if rank == 0 else PeerError) as caught:
        drain(loader, ring_store(table()), pause_s=0.05)  # long enough to hear of it
    assert f"{NUM_ROWS}" in str(caught.value)
    assert rank == 0 or "rank 0" in str(caught.value)
    dist.barrier()
    loader = planned_loader(HandMade(skewed(8, rank)), store, ["x"], **SETTINGS)
    assert drain(loader, ring_store(table())) == 8


def ranks_with_other_settings_are_refused(rank):
    store = partitioned(ring_store(table()), "owners")
    if rank == 0:
        assert drain(planned(HandMade(skewed(2, 0)), store, ["x"], **SETTINGS), ring_store(table()))
    dist.barrier()
    if rank == 1:
        settings = SETTINGS | {"device_cache": 0.2}
        with pytest.raises(ConfigError, match=r"rank 0 has .*'slots a rank': 200.*asks for .*400"):
            drain(planned(HandMade(skewed(2, 0)), store, ["x"], **settings), ring_store(table()))
    dist.barrier()
    store = partitioned(ring_store(table()), "range")
    loader = planned_loader(HandMade(skewed(2, 0)), store, ["x"], retention="lru", **SETTINGS)
    with pytest.raises(ConfigError, match=r"retention = 'lru'.*static or window"):
        drain(loader, ring_store(table()))


def a_given_score_decides_who_stays(rank):
    score = np.arange(NUM_ROWS, dtype=np.float64)
    store = partitioned(ring_store(table()), "owners")
    loader = planned_loader(
        HandMade(skewed(6, rank)), store, ["x"], retention="static", score=score, **SETTINGS
    )
    for _ in range(2):
        assert drain(loader, ring_store(table())) == 6


def some_slots_are_a_rank_s_own_where_peers_are_farther(rank):
    """Costs under which own slots are worth having, and a score that says for which rows."""
    score = presampled_counts([b for seed in range(50, 60) for b in skewed(12, seed)], NUM_ROWS)
    near, peer, home = ({"message_s": 0, "gil_s": 0, "row_s": s, "byte_s": 0} for s in (1, 2, 36))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "profile.json"
        write_profile(path, local=near, transports={"shared_memory": peer, "p2p": home})
        patch.setenv(VARIABLE, str(path))
        group = dist.new_group()  # so that there is a new engine, which reads the profile
        for retention, worker in itertools.product(("window", "static"), ("inline", "thread")):
            loader = planned_loader(
                HandMade(skewed(12, rank)),
                partitioned(ring_store(table()), "owners", group),
                ["x"],
                retention=retention,
                worker=worker,
                score=score,
                process_group=group,
                **(SETTINGS | {"device_cache": 0.6, "lookahead": 8}),
            )
            for _ in range(2):
                assert drain(loader, ring_store(table())) == 12
            (stats,) = featsync.stats(loader).features.values()
            own, shared = re.findall(r"([0-9,]+) rows cached", stats.why)
            assert 0 < int(own) < 0.6 * NUM_ROWS
            assert int(shared.replace(",", "")) == min(
                NUM_ROWS, dist.get_world_size() * (0.6 * NUM_ROWS - int(own))
            )
            assert stats.rows["cache"] > 0


FACTS = (
    rows_are_as_in_stock,
    other_dtypes_and_repeated_ids_arrive,
    what_one_rank_brought_is_there_for_the_others,
    several_features_in_one_minibatch_follow_one_order,
    ranks_may_be_uneven_and_leave_early,
    a_loop_nested_in_another_reads_from_home,
    after_an_error_the_next_iteration_has_a_new_cache,
    ranks_with_other_settings_are_refused,
    a_given_score_decides_who_stays,
    some_slots_are_a_rank_s_own_where_peers_are_farther,
)
LAUNCHES = [Launch(num_ranks, FACTS) for num_ranks in (2, 3)]


@pytest.mark.parametrize("launch", LAUNCHES, ids=name_of)
@pytest.mark.parametrize("fact", FACTS, ids=name_of)
def test_host_cache(launch, fact):
    launch.check(fact)
