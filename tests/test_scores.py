"""Scores of rows: how likely a minibatch is to contain a node, and how often it did."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featsync import scores
from featsync.datasets import synthetic
from featsync.errors import ConfigError, FeatureError
from featsync.retention import RETENTION
from featsync.scores import inclusion_probability, presampled_counts

fanouts_lists = st.lists(st.integers(-1, 4), max_size=3)


def csc(num_nodes, edges):
    """Edges ``(u, v)``: v is sampled for u."""
    lists = [[v for u, v in edges if u == node] for node in range(num_nodes)]
    indptr = np.cumsum([0] + [len(neighbors) for neighbors in lists])
    return indptr, np.array([v for neighbors in lists for v in neighbors], np.int64)


@st.composite
def graphs(draw, max_nodes=8):
    num_nodes = draw(st.integers(1, max_nodes))
    node = st.integers(0, num_nodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=20))
    seeds = draw(st.lists(node, min_size=1, unique=True))
    return *csc(num_nodes, edges), np.array(seeds)


@st.composite
def forests(draw):
    """Trees whose roots are the seeds, some with loops: there is one way to each node."""
    parents = [
        draw(st.one_of(st.none(), st.integers(0, node - 1))) if node else None
        for node in range(draw(st.integers(1, 10)))
    ]
    edges = [(parent, node) for node, parent in enumerate(parents) if parent is not None]
    edges += [(node, node) for node in draw(st.sets(st.integers(0, len(parents) - 1)))]
    return parents, *csc(len(parents), edges)


def reach(indptr, node, fanout):
    """How likely a node picks a given neighbour in one hop."""
    degree = indptr[node + 1] - indptr[node]
    return 1.0 if fanout < 0 else min(1.0, fanout / degree)


@given(forests(), fanouts_lists, st.integers(1, 12))
def test_exact_where_there_is_one_way_to_each_node(forest, fanouts, batch_size):
    parents, indptr, indices = forest
    seeds = [node for node, parent in enumerate(parents) if parent is None]
    hops = fanouts[::-1]
    came = []  # by node: how likely it came with the seeds, with hop 1, 2, …
    for parent in parents:
        if parent is None:
            came.append([min(1.0, batch_size / len(seeds))] + [0.0] * len(hops))
            continue
        own = [0.0] * (1 + len(hops))
        for start, chance in enumerate(came[parent]):
            for hop in range(start, len(hops)):
                pick = reach(indptr, parent, hops[hop])
                own[hop + 1] += chance * pick
                chance *= 1.0 - pick
        came.append(own)

    result = inclusion_probability(indptr, indices, seeds, batch_size, fanouts)

    np.testing.assert_allclose(result, [sum(chances) for chances in came], atol=1e-12)


@given(graphs(), st.integers(0, 3))
def test_all_neighbours_of_all_seeds_are_what_can_be_reached(graph, num_hops):
    indptr, indices, seeds = graph
    reached = set(seeds.tolist())
    for _ in range(num_hops):
        reached |= {int(v) for u in reached for v in indices[indptr[u] : indptr[u + 1]]}

    result = inclusion_probability(indptr, indices, seeds, len(seeds), [-1] * num_hops)

    assert result.tolist() == [float(node in reached) for node in range(len(indptr) - 1)]


@given(graphs(), fanouts_lists, st.integers(1, 9))
def test_it_is_a_probability_and_more_is_never_less(graph, fanouts, batch_size):
    indptr, indices, seeds = graph

    result = inclusion_probability(indptr, indices, seeds, batch_size, fanouts)

    assert ((result >= 0) & (result <= 1)).all()
    more = [
        inclusion_probability(indptr, indices, seeds, batch_size + 1, fanouts),
        inclusion_probability(indptr, indices, seeds, batch_size, [3, *fanouts]),
        inclusion_probability(indptr, indices, seeds, batch_size, [-1 for _ in fanouts]),
    ]
    for other in more:
        assert (other >= result - 1e-12).all()


@given(graphs(), fanouts_lists, st.randoms())
def test_numbers_of_nodes_and_blocks_of_edges_do_not_matter(graph, fanouts, random):
    indptr, indices, seeds = graph
    expected = inclusion_probability(indptr, indices, seeds, 2, fanouts)
    new_ids = list(range(len(indptr) - 1))
    random.shuffle(new_ids)
    new_ids = np.array(new_ids)
    sources = np.repeat(np.arange(len(new_ids)), np.diff(indptr))
    edges = list(zip(new_ids[sources].tolist(), new_ids[indices].tolist(), strict=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "_CHUNK_EDGES", 3)
        result = inclusion_probability(*csc(len(new_ids), edges), new_ids[seeds], 2, fanouts)

    np.testing.assert_allclose(result[new_ids], expected, atol=1e-12)


def test_tensors_and_mapped_arrays_of_any_integers_are_taken(tmp_path):
    indptr, indices = csc(5, [(0, 1), (0, 2), (0, 3), (2, 3), (3, 4), (4, 0)])
    expected = inclusion_probability(indptr, indices, [0, 2], 1, [2, 2])
    np.save(tmp_path / "indices.npy", indices)
    mapped = np.load(tmp_path / "indices.npy", mmap_mode="r")
    given_fanouts = [torch.tensor([2]), np.int64(2)]

    for result in (
        inclusion_probability(indptr, mapped, np.array([0, 2]), 1, given_fanouts),
        inclusion_probability(
            torch.from_numpy(indptr).int(), torch.from_numpy(indices).int(), torch.tensor([0, 2]),
            1, [2, 2],
        ),
    ):  # fmt: skip
        assert result.tolist() == expected.tolist()


def sampled_batches(indptr, indices, seeds, batch_size, fanouts, rng):
    """One epoch, sampled as GraphBolt does: each hop expands all nodes found so far."""
    order = rng.permutation(seeds)
    for start in range(0, len(order) - batch_size + 1, batch_size):
        nodes = set(order[start : start + batch_size].tolist())
        for fanout in reversed(fanouts):
            for u in list(nodes):
                neighbors = indices[indptr[u] : indptr[u + 1]]
                if fanout < len(neighbors):
                    neighbors = rng.choice(neighbors, fanout, replace=False)
                nodes.update(neighbors.tolist())
        yield np.array(sorted(nodes))


@pytest.mark.parametrize("fanouts", [[3], [2, 3], [1, 2, 3]])
def test_near_to_what_sampling_finds_on_random_graphs(fanouts):
    rng = np.random.default_rng(3)
    num_nodes, num_epochs = 150, 300
    edges = rng.integers(0, num_nodes, (600, 2))
    indptr, indices = csc(num_nodes, edges.tolist())
    seeds = rng.permutation(num_nodes)[:40]
    batches = [
        batch
        for _ in range(num_epochs)
        for batch in sampled_batches(indptr, indices, seeds, 4, fanouts, rng)
    ]
    found = presampled_counts(batches, num_nodes) / len(batches)

    result = inclusion_probability(indptr, indices, seeds, 4, fanouts)

    # 3,000 batches: a frequency is off by 0.01 (one standard deviation) at most.
    assert np.abs(result - found).mean() < 0.012
    assert np.abs(result - found).max() < 0.15
    assert np.corrcoef(result, found)[0, 1] > 0.99


def share_of_uses(score, counts, share):
    """Share of all uses that falls on the best scored rows."""
    best = np.argsort(-score, kind="stable")[: int(share * len(score))]
    return counts[best].sum() / counts.sum()


def test_ranks_a_power_law_graph_as_well_as_counting_does():
    options = synthetic.SyntheticOptions(nodes=3000, edges=20_000, width=1, seed=1)
    data = synthetic.load(options, "node_classification")
    indptr, indices = data.indptr.numpy(), data.indices.numpy()
    seeds, rng, fanouts = np.arange(300), np.random.default_rng(5), [5, 5]

    def count(num_epochs):
        batches = (
            batch
            for _ in range(num_epochs)
            for batch in sampled_batches(indptr, indices, seeds, 10, fanouts, rng)
        )
        return presampled_counts(batches, 3000)

    counted, later = count(2), count(6)
    score = inclusion_probability(data.indptr, data.indices, seeds, 10, fanouts)

    for share in (0.02, 0.1, 0.3):
        assert share_of_uses(score, later, share) >= share_of_uses(counted, later, share) - 0.005
        best = int(share * 3000)
        alike = set(np.argsort(-score)[:best]) & set(np.argsort(-later)[:best])
        assert len(alike) > 0.75 * best


@pytest.mark.dgl
def test_hops_are_in_the_order_of_graphbolts_sampler_and_arrays_are_taken_from_its_graph():
    import dgl.graphbolt as gb

    seeds, middle, far = range(10), range(10, 70), range(70, 190)  # 6 each, then 2 each
    edges = [((node - 10) // 6, node) for node in middle] + [(10 + (v - 70) // 2, v) for v in far]
    graph = gb.fused_csc_sampling_graph(*map(torch.from_numpy, csc(190, edges)))
    torch.manual_seed(1)
    train_set = gb.ItemSet(torch.arange(10), names="seeds")
    datapipe = gb.ItemSampler(train_set, batch_size=5, shuffle=True)
    datapipe = datapipe.sample_neighbor(graph, [1, 3])
    counts = presampled_counts((m.input_nodes for _ in range(100) for m in datapipe), 190)

    score = inclusion_probability(graph.csc_indptr, graph.indices, seeds, 5, [1, 3])

    for layer, chance in ((seeds, 0.5), (middle, 0.5 * (1 - 0.5 * 5 / 6)), (far, 0.125)):
        np.testing.assert_allclose(score[layer], chance)
        assert abs(counts[layer].mean() / 200 - chance) < 0.01


@given(st.integers(1, 9), st.data())
def test_counts_are_those_of_counting(num_rows, data):
    batches = data.draw(st.lists(st.lists(st.integers(0, num_rows - 1), max_size=12), max_size=5))
    counted = Counter(row for batch in batches for row in batch)
    tensors = (torch.tensor(batch, dtype=torch.int32) for batch in batches)

    counts = presampled_counts(tensors, num_rows)

    assert counts.dtype == np.int64
    assert counts.tolist() == [counted[row] for row in range(num_rows)]
    assert presampled_counts(batches, num_rows).tolist() == counts.tolist()


@pytest.mark.parametrize("score", [np.array([5, 0, 9, 7]), np.array([0.5, 0.0, 0.9, 0.7])])
def test_retention_takes_them_as_they_are(score):
    retention = RETENTION["static"](4, 2, 1, score)

    retention.push(np.arange(4))
    retention.settle()

    assert sorted(retention.resident.tolist()) == [2, 3]


GRAPH = ([0, 2, 2, 3], [1, 2, 0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"indptr": [0, 2, 1, 3]}, r"indptr must rise from 0 to the number of edges, 3, one"),
        ({"indptr": [0, 2, 2, 4]}, r"indptr must rise"),
        ({"indptr": [1, 2, 2, 3]}, r"indptr must rise"),
        ({"indptr": []}, r"indptr must rise"),
        ({"indptr": [[0, 3]]}, r"inclusion_probability\.indptr is int64 of shape \(1, 2\)"),
        ({"indices": [1, 2, 3]}, r"indices names node 3 of a graph of 3 nodes"),
        ({"indices": [1, -2, 0]}, r"indices names node -2 of"),
        ({"indices": [1.0, 2.0, 0.0]}, r"inclusion_probability\.indices is float64"),
        ({"seeds": [0, 3]}, r"seeds names node 3 of a graph of 3 nodes"),
        ({"seeds": []}, r"0 seeds in batches of 1; there must be one"),
        ({"batch_size": 0}, r"1 seeds in batches of 0; there must be one"),
        ({"fanouts": [2, -2]}, r"fanouts holds -2; each hop has one number of neighbours, or -1"),
        ({"fanouts": [torch.tensor([2, 1])]}, r"fanouts holds tensor\(\[2, 1\]\)"),
    ],
)
def test_wrong_arguments_are_refused_with_what_was_found(changed, message):
    arguments = {"indptr": GRAPH[0], "indices": GRAPH[1], "seeds": [0], "batch_size": 1}

    with pytest.raises(ConfigError, match=message):
        inclusion_probability(**{**arguments, "fanouts": [2], **changed})


@pytest.mark.parametrize("row", [4, -1])
def test_a_batch_that_names_no_row_is_refused(row):
    with pytest.raises(FeatureError, match=f"uses row {row} of a table of 4 rows"):
        presampled_counts([[0, 1], [row]], 4)
