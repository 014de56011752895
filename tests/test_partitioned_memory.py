"""Partitioned tables where shared memory is small: case 24."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import featsync
from featsync.errors import CapacityError, PeerError
from support.graphs import HandMade, assert_as_stock, planned_loader, store_of
from support.parts import PARTITIONS, WAYS, part_of, partition_of
from support.processes import in_small_shm

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]


def too_large_and_then_a_table_that_fits(rank):
    large = torch.zeros(1, 64).expand(50_000, 64)
    with pytest.raises(CapacityError if rank == 0 else PeerError) as caught:
        featsync.PartitionedFeature(large, [0, 50_000, 100_000])
    words = str(caught.value)
    assert "25,600,000 bytes is not to be had" in words
    assert "bytes are free of 8,388,608" in words
    assert "--shm-size" in words
    assert rank == 0 or words.startswith("rank 0 could not make room for parts")
    x = torch.arange(5000.0 * 64).reshape(5000, 64)
    stock = store_of({("node", None, "x"): x})
    ids = torch.randperm(5000)[:700]
    for how in PARTITIONS:
        partition = partition_of(how, 5000, 2)
        feature = featsync.PartitionedFeature(part_of(x, partition, rank, 2), partition)
        store = store_of({("node", None, "x"): feature})
        for transport in WAYS:
            for minibatch in planned_loader(HandMade([ids] * 3), store, ["x"], transport=transport):
                assert_as_stock(minibatch, stock, ["x"])


def test_a_small_dev_shm_is_an_error_of_all_ranks_and_what_fits_still_fits():
    """Case 24: 8 MiB; a table (100000, 64) of float32; before anything is written, no SIGBUS."""
    folder = Path(__file__).parent
    done = in_small_shm(
        f"""
        import sys
        sys.path[:0] = [{str(folder)!r}, {str(folder.parent)!r}]
        from support.ranks import run_ranks
        import {__name__} as facts
        run_ranks(facts.{too_large_and_then_a_table_that_fits.__name__}, 2, timeout_s=90)
        """
    )

    assert done.returncode == 0, done.stderr
