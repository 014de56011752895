"""Who holds which row: against the plain definition, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from featsync.errors import ConfigError
from featsync.partition import as_partition
from support.strategies import partitions


@given(partitions())
def test_each_row_belongs_to_one_rank_which_numbers_its_rows_by_id(drawn):
    partition, owners = drawn
    of_rank = [[i for i, owner in enumerate(owners) if owner == r] for r in range(6)]

    assert partition.num_rows == len(owners)
    assert list(partition.sizes) == [len(rows) for rows in of_rank[: partition.num_ranks]]
    assert partition.owners.tolist() == owners
    for rank in range(partition.num_ranks):
        assert partition.rows_of(rank).tolist() == of_rank[rank]
    ranks, rows = partition.locate(np.arange(len(owners)))
    assert ranks.tolist() == owners
    assert rows.tolist() == [of_rank[owner].index(i) for i, owner in enumerate(owners)]


@given(partitions(), partitions())
def test_digests_are_equal_for_equal_partitions_only(one, other):
    is_same = (type(one[0]), one[1], one[0].sizes) == (type(other[0]), other[1], other[0].sizes)
    assert (one[0].digest == other[0].digest) == is_same


def test_a_list_is_taken_as_bounds_and_a_tensor_as_owners():
    assert repr(as_partition([0, 1, 4], 2)) == "RangePartition([0, 1, 4])"
    found = as_partition(torch.tensor([0, 1, 1]), 2)
    assert repr(found) == "OwnerPartition(3 rows, [1, 2] by rank)"
    assert as_partition(found, 2) is found


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1, 4, 6], "the bounds leave out rows 0 to 0"),
        ([-1, 4, 6], "the bounds begin with 0"),
        ([0, 5, 3], "rank 1's rows would end at 3, before they begin at 5, so that parts overlap"),
        ([0, 1.5, 3], "bounds are whole numbers"),
        ([0, 3], "is for 1 ranks, but 2 take part: give 3 bounds, or owners from 0 to 1"),
        ([], "one more than there are ranks"),
        (torch.tensor([0, 2, 1, 5]), r"row 1 is given to rank 2 of 2 .* 1 other rows"),
        (torch.tensor([0, -1]), "row 1 is given to rank -1 of 2"),
        (torch.tensor([0.0, 1.0]), "owners have shape"),
        (torch.zeros(2, 2, dtype=torch.int64), "owners have shape"),
        ("hashed", "partition is str; give a list of 3 bounds, or a tensor"),
        (None, "partition is NoneType"),
    ],
)
def test_what_is_no_partition_is_refused(value, words):
    with pytest.raises(ConfigError, match=words):
        as_partition(value, 2)
