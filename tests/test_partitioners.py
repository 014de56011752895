"""Ways to split the nodes of a graph, and what they cost."""

from __future__ import annotations

import numpy as np
import pytest

from featsync.errors import ConfigError
from featsync.partitioners import PARTITIONERS, partition_nodes, remote_share
from support.graphs import hetero3, ring20

pytestmark = pytest.mark.dgl


@pytest.mark.parametrize("graph", [ring20(), hetero3()], ids=["ring20", "hetero3"])
@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("method", PARTITIONERS)
def test_every_node_has_one_owner_and_parts_are_near_in_size(method, num_parts, graph):
    partition = partition_nodes(graph, num_parts, method)

    assert partition.num_rows == graph.total_num_nodes
    assert partition.num_ranks == num_parts
    assert sum(partition.sizes) == graph.total_num_nodes
    assert max(partition.sizes) <= 2 * graph.total_num_nodes / num_parts


def test_hashing_is_the_same_every_time():
    first, again = (partition_nodes(ring20(), 3, "hashed").owners for _ in range(2))

    assert first.tolist() == again.tolist()
    assert len(np.unique(first)) == 3


def test_the_remote_share_counts_edges_between_parts():
    # Of a ring with edges from v - 1 and v - 3, two runs of ten are left by 1 + 3 edges each.
    assert remote_share(ring20(), partition_nodes(ring20(), 2, "contiguous")) == 8 / 40
    assert remote_share(ring20(), partition_nodes(ring20(), 1, "metis")) == 0
    hashed = remote_share(ring20(), partition_nodes(ring20(), 2, "hashed"))
    assert remote_share(ring20(), partition_nodes(ring20(), 2, "metis")) < hashed


def test_what_is_no_way_to_split_is_refused():
    with pytest.raises(ConfigError, match=r"'mettis' is not known.*Did you mean 'metis'"):
        partition_nodes(ring20(), 2, "mettis")
    with pytest.raises(ConfigError, match="21 parts of 20 nodes"):
        partition_nodes(ring20(), 21, "hashed")
