"""What makes no partitioned table is found at the start: clear errors on all ranks, and no wait.

Each function before the tests is a fact, see `support.facts`.
"""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import featsync
from featsync import parts
from featsync.errors import ConfigError, FeatureError, PeerError
from featsync.partitioned_store import partitioned_store, split_nodes
from featsync.profile import VARIABLE
from support.facts import Launch, name_of
from support.graphs import (
    HandMade,
    assert_as_stock,
    assert_same,
    planned_loader,
    ring20,
    ring_store,
    store_of,
)
from support.parts import PARTITIONS, WAYS, part_of, partitioned
from support.processes import wait_until
from support.profiles import write_profile

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]


def a_profile_that_one_rank_cannot_use_is_told_to_all(rank):
    """Another machine's, another schema's, and none at all; rank 1 alone was told to use it."""
    even = [0, 10, 20]
    mine = torch.arange(10.0 * rank, 10.0 * rank + 10).reshape(10, 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        if rank == 1:
            os.environ[VARIABLE] = str(path)
        for changes, words in (
            (None, "cannot be read: No such file"),
            ({"machine": "another"}, "was measured on 'another', and this is"),
            ({"schema": 2}, "is no profile of this version: schema"),
        ):
            if changes is not None:
                write_profile(path, **changes)
            error = ConfigError if rank == 1 else PeerError
            with pytest.raises(error, match=words) as caught:
                featsync.PartitionedFeature(mine, even)
            assert rank == 1 or caught.value.peer == "rank 1"
    os.environ.pop(VARIABLE, None)
    feature = featsync.PartitionedFeature(mine, even)
    assert_same(feature.read(torch.arange(20)), torch.arange(20.0).reshape(20, 1))


def parts_that_make_no_table_are_refused_on_every_rank(rank):
    """Bad input: all ranks are told the same, nobody waits, and the next one works."""
    world = dist.get_world_size()
    x = torch.arange(20.0).reshape(20, 1)
    even = [20 * i // world for i in range(world + 1)]
    mine = part_of(x, even, rank, world)
    owners = torch.arange(20) % world
    bad = [
        (mine[: len(mine) - (rank == 1)], even, "parts leave rows out or overlap: rank 1 brings"),
        (mine.to([torch.float32, torch.float64][rank == 1]), even, "disagree about what a row is"),
        (mine.expand(-1, 1 + (rank == 1)), even, "disagree about what a row is"),
        (mine, [0, *even[1:-1], 20 + rank], "gave another partition than rank 0"),
        (mine, owners + 1, f"row {world - 1} is given to rank {world} of {world}"),
        (mine, [5, *even[1:]], "the bounds leave out rows 0 to 4"),
        (mine, even[:-1], f"is for {world - 1} ranks, but {world} take part"),
    ]
    for part, partition, words in bad:
        with pytest.raises(ConfigError, match=words):
            featsync.PartitionedFeature(part, partition)
    with pytest.raises((ConfigError, PeerError), match="local_rows is"):
        featsync.PartitionedFeature(mine if rank else None, even)
    feature = featsync.PartitionedFeature(mine, even)
    assert_same(feature.read(torch.arange(20)), x)
    with pytest.raises(ConfigError, match="cannot be updated"):
        feature.update(x)
    with pytest.raises(FeatureError, match="id 20 is outside"):
        feature.read(torch.tensor([20]))


def a_part_that_was_in_vain_is_let_go(rank):
    """One rank cannot attach to what the others have served by then."""
    world = dist.get_world_size()
    even = [20 * i // world for i in range(world + 1)]
    mine = part_of(torch.arange(20.0).reshape(20, 1), even, rank, world)
    engine = featsync.PartitionedFeature(mine, even).featsync_parts.engine
    gc.collect()
    assert wait_until(lambda: not engine.served.tables)  # what was made before is gone

    def gone(offer):
        raise PeerError("it is not there any more", "rank 0")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(parts, "attach", gone)
        for _ in range(3):
            with pytest.raises(PeerError, match="it is not there any more") as caught:
                featsync.PartitionedFeature(mine, even)
            assert rank == 1 or caught.value.peer == "rank 1"
    assert wait_until(lambda: not engine.served.tables)


def features_that_ranks_build_in_another_order_are_refused(rank):
    """Equal in kind and partition, only their names tell them apart."""
    world = dist.get_world_size()
    even = [20 * i // world for i in range(world + 1)]
    x = torch.arange(20.0).reshape(20, 1)
    tables = {"x": x, "y": -x}
    order = ["x", "y"] if rank == 0 else ["y", "x"]
    for name in order:
        with pytest.raises(ConfigError, match="build different features") as caught:
            featsync.PartitionedFeature(part_of(tables[name], even, rank, world), even, name=name)
        first, second = ("x", "y") if name == order[0] else ("y", "x")
        assert f"(rank 0 {first!r}, rank 1" in str(caught.value)
        assert f" {second!r}). Build" in str(caught.value)
    part = part_of(x, even, rank, world)
    with pytest.raises(ConfigError, match=r"build different features.*rank 1 one without a name"):
        featsync.PartitionedFeature(part, even, name=None if rank == 1 else "x")
    nodes = split_nodes(ring20(), "contiguous")
    with pytest.raises(ConfigError, match=r"build different features.*rank 0 'node/None/x'"):
        partitioned_store(store_of({("node", None, key): tables[key] for key in order}), nodes)
    for name in tables:
        part = part_of(tables[name], even, rank, world)
        feature = featsync.PartitionedFeature(part, even, name=name)
        assert_same(feature.read(torch.arange(20)), tables[name])


def ranks_may_differ_in_their_settings(rank):
    """Each rank asks in its own way, and serves whatever way it is asked."""
    settings = [
        {"transport": "p2p", "lookahead": 1},
        {"transport": "shared_memory", "lookahead": 7, "device_cache": 5},
        {"transport": "auto", "lookahead": 3, "worker": "inline", "retention": "lru"},
    ]
    ids = [torch.randperm(20)[: 5 + rank] for _ in range(6 + rank)]
    for how in PARTITIONS:
        store = partitioned(ring_store(), how)
        for turn in range(len(settings)):
            mine = settings[(rank + turn) % len(settings)]
            for minibatch in planned_loader(HandMade(ids), store, ["x"], **mine):
                assert_as_stock(minibatch, ring_store(), ["x"])


def ranks_may_differ_in_their_keys(rank):
    """A rank that wants one feature less, or wants it on its own, makes nobody wait."""
    keys = [["x"], ["x", "y"], ["y"]][rank % 3]
    x = torch.arange(20.0).reshape(20, 1)
    stock = store_of({("node", None, "x"): x, ("node", None, "y"): x.half()})
    ids = [torch.randperm(20) for _ in range(4)]
    for how, transport in itertools.product(PARTITIONS, WAYS):
        store = partitioned(stock, how)
        for minibatch in planned_loader(HandMade(ids), store, keys, transport=transport):
            assert_as_stock(minibatch, stock, keys)


FACTS = [
    parts_that_make_no_table_are_refused_on_every_rank,
    a_part_that_was_in_vain_is_let_go,
    features_that_ranks_build_in_another_order_are_refused,
    ranks_may_differ_in_their_settings,
    ranks_may_differ_in_their_keys,
]
# The first needs ranks that have no engine yet.
LAUNCHES = [
    Launch(2, [a_profile_that_one_rank_cannot_use_is_told_to_all, *FACTS]),
    Launch(3, FACTS),
]


@pytest.mark.parametrize(
    ("launch", "fact"),
    [(launch, fact) for launch in LAUNCHES for fact in launch.facts],
    ids=name_of,
)
def test_partitioned_tables(launch, fact):
    launch.check(fact)
