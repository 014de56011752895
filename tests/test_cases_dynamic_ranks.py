"""Rows that change, on two ranks: cases 26 to 29, 31 and 32.

Each function before the tests is a fact, see `support.facts`.
"""

from __future__ import annotations

import dgl.graphbolt as gb
import pytest
import torch
import torch.distributed as dist

import featsync
from featsync.errors import ConfigError
from support.dynamic_programs import merged
from support.epochs import split_batches
from support.facts import Launch, name_of
from support.graphs import HandMade, planned, planned_loader, store_of
from support.loader_workers import end_loader_workers, forked_workers
from support.plain_optimizers import PLAIN_RULES, PlainOptimizer
from support.tensors import same_bits

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]

NUM_BATCHES = 10
NOTHING = torch.empty(0, dtype=torch.int64)


def store_for(feature):
    return store_of({("node", None, "x"): feature})


def of_all_ranks(value):
    """What each rank gives, by rank."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def rows_written(which, inputs, i):
    """After minibatch i: all rows, its own, or only what the next one needs."""
    if which == "all":
        return torch.arange(20)
    return inputs[i] if which == "own" else inputs[(i + 1) % NUM_BATCHES]


def reads_what_was_written(loader, feature, which, start):
    """One epoch: after minibatch i each rank writes i + 1; what is read is checked bit for bit."""
    rank = dist.get_rank()
    inputs = of_all_ranks([minibatch.input_nodes for minibatch in split_batches(40)])
    table = feature.read()
    count = 0
    for i, minibatch in enumerate(loader):
        found = minibatch.node_features["x"]
        assert same_bits(found, table[minibatch.input_nodes]), f"{which}, minibatch {i}"
        if which == "all" and i:
            assert found.eq(start + i).all()
        table = table.clone()
        for of_rank in inputs:
            table[rows_written(which, of_rank, i)] = start + i + 1.0
        rows = rows_written(which, inputs[rank], i)
        feature.update(torch.full((len(rows), 1), start + i + 1.0), rows, minibatch=minibatch)
        count += 1
    assert count == NUM_BATCHES
    dist.barrier()
    assert same_bits(feature.read(), table)


def minibatch_i_reads_what_was_written_before_it(rank):
    """Case 26: windows 1, 2, 4 and 8, without loader workers; two epochs."""
    for lookahead in (1, 2, 4, 8):
        for which in ("all", "own", "next"):
            feature = featsync.DynamicFeature(torch.zeros(20, 1), timeout=20.0)
            loader = planned_loader(
                split_batches(40), store_for(feature), ["x"], lookahead=lookahead
            )
            for epoch in range(2):
                reads_what_was_written(loader, feature, which, 10 * epoch)


def minibatches_of_loader_workers_read_what_was_written_before(rank):
    """Case 26: two workers."""
    with forked_workers():
        for lookahead, which in ((1, "all"), (2, "own"), (4, "next"), (8, "all")):
            feature = featsync.DynamicFeature(torch.zeros(20, 1), timeout=20.0)
            source = split_batches(40)
            loader = planned_loader(
                source, store_for(feature), ["x"], num_workers=2, lookahead=lookahead
            )
            reads_what_was_written(loader, feature, which, 0)
            end_loader_workers()


def copy_to_behind_the_stage_is_refused_on_every_rank(rank):
    """Case 26."""
    for num_items in (8, 40):
        feature = featsync.DynamicFeature(torch.zeros(20, 1), timeout=20.0)
        pipe = planned(split_batches(num_items), store_for(feature), ["x"])
        for i, minibatch in enumerate(gb.DataLoader(pipe.copy_to(torch.device("cpu")))):
            assert minibatch.node_features["x"].eq(0).all()
            if i + 1 < num_items // 4:
                with pytest.raises(ConfigError, match="reads ahead"):
                    feature.update(torch.ones(20, 1))
        dist.barrier()
        assert feature.read().eq(0).all()


def no_update_is_lost(rank):
    """Case 27: 3,000 steps, in each of which both ranks read, add and write one row."""
    one = torch.tensor([1])
    feature = featsync.DynamicFeature(torch.zeros(2, 1), "sum", timeout=20.0)
    pipe = planned(HandMade([one] * 3000), store_for(feature), ["x"], worker="inline")
    for minibatch in pipe:
        feature.update(minibatch.node_features["x"] + 1, one)
    dist.barrier()
    assert feature.read().flatten().tolist() == [0, 6000]

    feature = featsync.DynamicFeature(torch.zeros(2, 1), timeout=20.0)
    for _ in planned(HandMade([one]), store_for(feature), ["x"]):
        for _ in range(3000):
            feature.update(feature.read(one) + 1, one)
            feature.commit()
    dist.barrier()
    assert feature.read().flatten().tolist() == [0, 3000]


def is_whole(rows):
    return bool(rows.eq(rows[:, :1]).all())


def a_wide_row_is_never_torn_in_steps(rank):
    """Case 27: of rows 4,096 wide, in minibatches of both ranks and by reads inside steps."""
    for staleness in (0, 2):
        feature = featsync.DynamicFeature(torch.zeros(2, 4096), timeout=20.0)
        one = torch.tensor([1])
        pipe = planned(HandMade([one] * 500), store_for(feature), ["x"], staleness=staleness)
        for step, minibatch in enumerate(pipe):
            found = minibatch.node_features["x"]
            assert is_whole(found)
            assert 0 <= step - found[0, 0].item() <= staleness
            feature.update(torch.full((1, 4096), step + 0.5), one, minibatch=minibatch)
            assert is_whole(feature.read(one))
            feature.update(torch.full((1, 4096), step + 1.0), one, minibatch=minibatch)
        dist.barrier()
        assert feature.read(one).eq(500).all()


def a_wide_row_is_never_torn_for_who_only_reads(rank):
    """Case 27: one rank reads as fast as it can what the other writes."""
    feature = featsync.DynamicFeature(torch.zeros(2, 4096), "last", timeout=20.0)
    one, steps = torch.tensor([1]), 1000
    if rank == 0:
        for minibatch in planned(HandMade([one] * steps), store_for(feature), ["x"]):
            feature.update(minibatch.node_features["x"] + 1, one)
    else:
        assert list(planned(HandMade([]), store_for(feature), ["x"])) == []
        other = planned(HandMade([one] * 500), store_for(feature), ["x"], staleness="any")
        for minibatch in other:
            assert is_whole(minibatch.node_features["x"])
        last, versions = -1.0, 0
        while last < steps:
            rows = feature.read(one)
            assert is_whole(rows)
            assert rows[0, 0] >= last
            versions += rows[0, 0].item() > last
            last = rows[0, 0].item()
        assert versions > 10
    dist.barrier()
    assert feature.read(one).eq(steps).all()


def one_id_of_two_ranks_is_merged_alike_on_all(rank):
    """Case 28: rank 0 writes 1 and rank 1 writes 2 to id 3 in one step; before it holds 10."""
    for merge, wanted in (("last", 2.0), ("sum", -7.0), ("mean", 1.5)):
        feature = featsync.DynamicFeature(torch.full((5, 1), 10.0), merge, timeout=20.0)
        wants = [torch.arange(5)] * 2
        for step, minibatch in enumerate(planned(HandMade(wants), store_for(feature), ["x"])):
            now = 10 if step == 0 else wanted
            assert minibatch.node_features["x"].flatten().tolist() == [10, 10, 10, now, 10]
            if step == 0:
                feature.update(torch.tensor([[1.0 + rank]]), torch.tensor([3]))
        dist.barrier()
        assert feature.read()[3] == wanted


def a_whole_table_that_one_rank_updates_is_seen_by_all(rank):
    """Case 29: in a step, and outside of loops."""
    for writer in (0, 1):
        feature = featsync.DynamicFeature(torch.zeros(20, 2), timeout=20.0)
        value = torch.arange(40.0).reshape(20, 2)
        for step, minibatch in enumerate(planned(split_batches(40), store_for(feature), ["x"])):
            assert same_bits(minibatch.node_features["x"], step * value[minibatch.input_nodes])
            with pytest.raises(ConfigError, match=r"\(19, 2\) .* where \(20, 2\)"):
                feature.update(value[1:])
            if rank == writer:
                feature.update((step + 1) * value)
            else:
                feature.update(value[:0], NOTHING)
        dist.barrier()
        assert same_bits(feature.read(), 10 * value)
        dist.barrier()
        if rank == writer:
            feature.update(-value)
        dist.barrier()
        for minibatch in planned(split_batches(40), store_for(feature), ["x"]):
            assert same_bits(minibatch.node_features["x"], -value[minibatch.input_nodes])


def node_memory_is_that_of_the_sequential_program(rank):
    """Case 31: both ranks' events touch some nodes alike in a step."""
    for merge in ("last", "sum", "mean"):
        feature = featsync.DynamicFeature(torch.zeros(20, 8), merge, timeout=20.0)
        seeds = [(torch.arange(2) + 2 * i + rank) % 20 for i in range(15)]
        inputs = [torch.cat([nodes, (nodes - 1) % 20, (nodes - 3) % 20]) for nodes in seeds]
        events = of_all_ranks(list(zip(seeds, inputs, strict=True)))
        table = feature.read()
        pipe = planned(HandMade(inputs), store_for(feature), ["x"], lookahead=4)
        for step, minibatch in enumerate(pipe):
            rows = minibatch.node_features["x"]
            assert same_bits(rows, table[inputs[step]])
            feature.update(rows[:2] + 1, seeds[step], minibatch=minibatch)
            of_step = [of_rank[step] for of_rank in events]
            table = merged(table, [(own, table[wide][:2] + 1) for own, wide in of_step], merge)
        dist.barrier()
        assert same_bits(feature.read(), table)


def embeddings_are_those_of_one_process(rank):
    """Case 32: (20, 4), lr 0.1, 10 steps, against one process with merged gradients."""
    torch.manual_seed(0)
    start, target = torch.randn(20, 4), torch.randn(20, 4)
    wants = [torch.randint(0, 20, (9 + rank,)) for _ in range(10)]
    everybodys = of_all_ranks(wants)
    for name in PLAIN_RULES:
        for reduce in ("sum", "mean"):
            feature = featsync.DynamicFeature(start, timeout=20.0)
            optimizer = getattr(featsync.optim, name)(feature, lr=0.1, reduce=reduce)
            plain = PlainOptimizer(name, start.clone(), 0.1)
            divisor = len(everybodys) if reduce == "mean" else 1
            for step, minibatch in enumerate(planned(HandMade(wants), store_for(feature), ["x"])):
                rows = minibatch.node_features["x"]
                torch.testing.assert_close(rows, plain.table[wants[step]], rtol=0, atol=1e-6)
                (rows - target[wants[step]]).square().sum().backward()
                optimizer.step(minibatch)
                ids = torch.cat([of_rank[step] for of_rank in everybodys])
                plain.step(ids, 2 * (plain.table[ids] - target[ids]) / divisor)
            dist.barrier()
            torch.testing.assert_close(feature.read(), plain.table, rtol=0, atol=1e-6)


DELIVERED = [
    minibatch_i_reads_what_was_written_before_it,
    minibatches_of_loader_workers_read_what_was_written_before,
    copy_to_behind_the_stage_is_refused_on_every_rank,
    one_id_of_two_ranks_is_merged_alike_on_all,
    a_whole_table_that_one_rank_updates_is_seen_by_all,
    node_memory_is_that_of_the_sequential_program,
    embeddings_are_those_of_one_process,
]
MANY_STEPS = [
    no_update_is_lost,
    a_wide_row_is_never_torn_in_steps,
    a_wide_row_is_never_torn_for_who_only_reads,
]
FACTS = [*DELIVERED, *MANY_STEPS]
LAUNCHES = [Launch(2, DELIVERED, timeout_s=120), Launch(2, MANY_STEPS, timeout_s=150)]


@pytest.mark.parametrize(
    ("launch", "fact"), [(one, fact) for one in LAUNCHES for fact in one.facts], ids=name_of
)
def test_dynamic_rows_of_two_ranks(launch, fact):
    launch.check(fact)
