"""Several machines, pretended by namespaces: who shares one, and rows between them."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import featsync
from cluster import Cluster, ClusterError, traffic_of, why_impossible
from cluster.link import Link
from featsync.errors import CapacityError, ConfigError, PeerError
from featsync.exchange.addresses import find_addresses
from featsync.exchange.id_code import encode
from featsync.plan import FeatureKey
from featsync.sharing import share_tensors
from featsync.world import World
from support.epochs import epoch, split_batches
from support.facts import assert_established
from support.graphs import (
    HandMade,
    assert_as_stock,
    assert_same,
    planned,
    planned_loader,
    ring_store,
    store_of,
)
from support.host_rows import (
    a_transport_that_reaches_no_other_host_is_an_error_at_once,
    rows_are_as_in_stock_on_a_heterogeneous_graph,
    rows_are_as_in_stock_on_a_homogeneous_graph,
    rows_of_several_dtypes_arrive_bit_for_bit,
    shared_memory_within_a_host_and_messages_between_serve_one_minibatch,
)
from support.hosts import HostRanks
from support.parts import PARTITIONS, partitioned
from support.processes import wait_until

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]

NODE = FeatureKey("node", None, "x")
MIB = 1 << 20


# Facts: each runs on all ranks of one launch, and raises where it does not hold.


def two_by_two_are_two_hosts_though_they_have_one_name(rank):
    world = World.join()
    assert world.host_of_rank == (0, 0, 1, 1)
    assert (world.ranks_of_host, world.first_ranks) == ([(0, 1), (2, 3)][rank // 2], (0, 2))
    names = [None] * 4
    dist.all_gather_object(names, socket.gethostname())
    assert len(set(names)) == 1


def each_host_has_its_own_copy_of_shared_tables(rank):
    world = World.join()
    table = torch.arange(60.0).reshape(20, 3)
    brings = table if world.is_first_of_host else None
    shared = share_tensors({NODE: brings} if brings is not None else None, world)[NODE].tensor
    assert_same(shared, table)
    dist.barrier()
    if world.is_first_of_host:
        shared[0] = 100 + rank
    dist.barrier()
    assert shared[0, 0] == 100 + world.ranks_of_host[0]

    store = featsync.share(ring_store() if world.is_first_of_host else None)
    assert epoch(planned_loader(split_batches(40), store, ["x"], ["w"]), ring_store())


def a_host_with_too_little_shared_memory_is_an_error_on_all_ranks(rank):
    """Host 1 has 16 MiB. Rank 2 would fill it; the others are told what it said."""
    table = torch.zeros(6 * MIB, 1)
    even = [0, 16, 32, 32 + 3 * MIB, 32 + 6 * MIB]
    part = torch.zeros(even[rank + 1] - even[rank], 1)
    too_much = [
        lambda: featsync.share(store_of({NODE: table}) if rank in (0, 2) else None),
        lambda: featsync.PartitionedFeature(part, even),
    ]
    for ask in too_much:
        start = time.monotonic()
        with pytest.raises(CapacityError if rank == 2 else PeerError) as caught:
            ask()
        assert "shared memory of 25,165,824 bytes is not to be had" in str(caught.value)
        assert rank == 2 or caught.value.peer == "rank 2"
        assert time.monotonic() - start < 15
    # Nothing of it stays: most of the room is to be had.
    small = featsync.share(store_of({NODE: table[: 3 * MIB]}) if rank in (0, 2) else None)
    assert len(small.read("node", None, "x")) == 3 * MIB


def the_address_is_one_that_other_hosts_reach(rank):
    """Whatever names stand for here: that of both hosts, ``vm`` or so, mostly for a loopback."""
    world, own = World.join(), Link.address(rank // 2)
    first = Link.address(0)
    no_way = (ConfigError, PeerError)
    cases = [
        ({"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": "127.0.0.1"}, [own]),
        ({"MASTER_ADDR": first}, [own]),
        # As where host 0 calls itself by a name that stands for 127.0.1.1.
        ({"MASTER_ADDR": first if rank >= 2 else "127.0.0.1"}, [own]),
        ({"MASTER_ADDR": "127.0.0.1"}, "the names of all machines stand for loopbacks"),
        ({"GLOO_SOCKET_IFNAME": "eth0" if rank else "eth9"}, "'eth9': that network interface has"),
        ({"MASTER_ADDR": first if rank else "no.such.host"}, "the way to 'no.such.host' is not"),
    ]
    for variables, found in cases:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("GLOO_SOCKET_IFNAME")
            patch.delenv("MASTER_ADDR")
            for name, value in variables.items():
                patch.setenv(name, value)
            if isinstance(found, list):
                assert find_addresses(world, 20.0) == found
            else:
                with pytest.raises(no_way, match=found):
                    find_addresses(world, 20.0)


def an_epoch_sends_its_rows_and_ids_and_little_else(rank):
    """40,000 rows of 512 bytes each way, and the ids by which they are asked for."""
    num_rows, num_batches = 60_000, 8
    x = torch.randn(num_rows, 128, generator=torch.Generator().manual_seed(0))
    bounds = [0, num_rows // 2, num_rows]
    feature = featsync.PartitionedFeature(x[bounds[rank] : bounds[rank + 1]], bounds)
    wanted = [
        [torch.randperm(num_rows, generator=generator)[:10_000] for _ in range(num_batches)]
        for generator in (torch.Generator().manual_seed(seed) for seed in (1, 2))
    ]
    remote = [[i[(i < bounds[1]) == bool(r)] for i in wanted[r]] for r in (0, 1)]
    id_bytes = [sum(len(encode(i.sort().values.numpy())[1]) for i in remote[r]) for r in (0, 1)]
    row_bytes = [512 * sum(map(len, remote[r])) for r in (0, 1)]
    loader = planned_loader(
        HandMade(wanted[rank]), store_of({NODE: feature}), ["x"], transport="p2p"
    )
    dist.barrier()
    before = traffic_of()
    for minibatch, ids in zip(loader, wanted[rank], strict=True):
        assert_same(minibatch.node_features["x"], x[ids])
    dist.barrier()
    received = traffic_of().since(before).received
    assert featsync.stats(loader).bytes["peer"] == row_bytes[rank]
    assert row_bytes[rank] <= received <= 1.05 * (row_bytes[rank] + id_bytes[1 - rank])


def rows_in_one_direction_do_not_wait_for_rows_in_the_other(rank):
    """A few rows that rank 0 asks for are there before the 64 MiB that it sends have arrived."""
    x = torch.zeros(2 * MIB, 16)
    half = len(x) // 2
    feature = featsync.PartitionedFeature(x[:half], [0, half, len(x)])
    engine, arrived = feature.featsync_parts.engine, []
    wait, before = engine.wait, engine.served.rows_read

    def wait_and_note(*arguments):
        yield from wait(*arguments)
        arrived.append(time.monotonic())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "wait", wait_and_note)
        if rank == 0:
            assert wait_until(lambda: engine.served.rows_read == before + half, 30)
            feature.read(torch.arange(half, half + 10))
        else:
            feature.read(torch.arange(half))
    moments = [None, None]
    dist.all_gather_object(moments, arrived[0])
    assert moments[0] < moments[1]


def a_rank_that_is_done_serves_the_others_until_they_are(rank):
    """Rank 0 ends its program, as torchrun's are ended: no ``spawn`` that waits for it."""
    if rank == 0:
        featsync.PartitionedFeature(torch.arange(10.0), [0, 10, 20])
        return
    feature = featsync.PartitionedFeature(torch.arange(10.0, 20.0), [0, 10, 20])
    assert wait_until((Path(os.environ["TEST_FOLDER"]) / "answer.0").exists, 30)
    for _ in range(10):
        assert_same(feature.read(torch.arange(20)), torch.arange(20.0))
        time.sleep(0.05)


def a_network_of_its_own_makes_no_host(rank):
    """Hosts 0 and 1 have their processes in common, and with them their memory; host 2 not."""
    world = World.join()
    assert world.host_of_rank == (0, 0, 1)
    assert find_addresses(world, 20.0) == [Link.address(rank)]
    names = [None] * 3
    dist.all_gather_object(names, socket.gethostname())
    assert names == ["host0", "host0", "host2"]


def the_engine_needs_no_interface_named(rank):
    """Gloo does: its own choice is what the host's name stands for, which is a loopback."""
    x = torch.arange(60.0).reshape(20, 3)
    bounds = [0, 5, 12, 20]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GLOO_SOCKET_IFNAME")
        feature = featsync.PartitionedFeature(x[bounds[rank] : bounds[rank + 1]], bounds)
    assert_same(feature.read(torch.arange(19, -1, -1)), x.flip(0))


def rows_find_their_way_whatever_ranks_have_in_common(rank):
    """By the engine of all, and by one of the two that share memory and no network.

    The stock loader's ``iter()`` is collective among all ranks, so the pipe runs without it.
    """
    near = dist.new_group([0, 1])
    for group in (None, near) if rank < 2 else (None,):
        for how in PARTITIONS:
            store = partitioned(ring_store(), how, group)
            for transport in ("auto", "p2p"):
                pipe = planned(
                    HandMade([torch.randperm(20) for _ in range(5)]), store, ["x"],
                    transport=transport, process_group=group,
                )  # fmt: skip
                for _ in range(2):
                    for minibatch in pipe:
                        assert_as_stock(minibatch, ring_store(), ["x"])


SAME_ROWS = [
    rows_are_as_in_stock_on_a_homogeneous_graph,
    rows_are_as_in_stock_on_a_heterogeneous_graph,
    rows_of_several_dtypes_arrive_bit_for_bit,
]
FACTS = {
    "2x1": [
        *SAME_ROWS,
        a_transport_that_reaches_no_other_host_is_an_error_at_once,
        an_epoch_sends_its_rows_and_ids_and_little_else,
        rows_in_one_direction_do_not_wait_for_rows_in_the_other,
        a_rank_that_is_done_serves_the_others_until_they_are,
    ],
    "2x2": [
        two_by_two_are_two_hosts_though_they_have_one_name,
        the_address_is_one_that_other_hosts_reach,
        *SAME_ROWS,
        shared_memory_within_a_host_and_messages_between_serve_one_minibatch,
        each_host_has_its_own_copy_of_shared_tables,
        a_host_with_too_little_shared_memory_is_an_error_on_all_ranks,
    ],
    "3x1": [
        a_network_of_its_own_makes_no_host,
        the_engine_needs_no_interface_named,
        rows_find_their_way_whatever_ranks_have_in_common,
    ],
}
SHAPES = {
    "2x1": {"hosts": 2},
    "2x2": {"hosts": 2, "shm": ["64m", "16m"]},
    "3x1": {"hosts": 3, "own_names": True, "sharing_processes": [1]},
}


def establish(rank, shape):
    """All facts in turn; the first that does not hold ends the launch."""
    for fact in FACTS[shape]:
        dist.barrier()
        fact(rank)


def launch(shape):
    with Cluster(**SHAPES[shape]) as cluster:
        run = HostRanks(
            cluster, int(shape[-1]), establish, shape,
            torchrun=shape == "2x2", together=shape != "2x1", timeout_s=150,
        )  # fmt: skip
        try:
            run.results()
        except (AssertionError, ClusterError) as error:
            return str(error)
    return None


@pytest.fixture(scope="module")
def launches():
    if (reason := why_impossible(3)) is not None:
        pytest.skip(reason)
    return {}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("shape", "fact"),
    [(shape, fact) for shape, facts in FACTS.items() for fact in facts],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_on_several_hosts(launches, shape, fact):
    if shape not in launches:
        launches[shape] = launch(shape)
    assert_established(launches[shape], fact, FACTS[shape])
