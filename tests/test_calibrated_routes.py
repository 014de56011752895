"""A profile with a crossover: narrow and wide rows of one minibatch take different ways."""

from __future__ import annotations

import json
import os

import pytest
import torch
import torch.distributed as dist

import featsync
from featsync.profile import VARIABLE, machine_name
from support.graphs import (
    HandMade,
    assert_as_stock,
    planned_loader,
    store_of,
)
from support.loader_workers import end_loader_workers
from support.parts import PARTITIONS, partitioned
from support.ranks import run_ranks

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]

NUM_ROWS = 600
NARROW, WIDE = ("node", None, "narrow"), ("node", None, "wide")
NOTHING = {"message_s": 0.0, "gil_s": 0.0, "row_s": 0.0, "byte_s": 0.0}
# For 10,000 rows of w bytes: 1.1e-4 w by shared memory, 1e-2 + 1e-5 w point to point, which is less
# from 101 bytes on.
CROSSOVER = {
    "schema": 1,
    "machine": machine_name(),
    "rows": 10_000,
    "local": NOTHING,
    "transports": {
        "shared_memory": NOTHING | {"byte_s": 1.1e-8},
        "p2p": NOTHING | {"message_s": 1e-2, "byte_s": 1e-9},
    },
}


def store():
    """Rows of 8 bytes, and of 512."""
    generator = torch.Generator().manual_seed(0)
    return store_of(
        {
            NARROW: torch.randn(NUM_ROWS, 2, generator=generator),
            WIDE: torch.randn(NUM_ROWS, 128, generator=generator),
        }
    )


def train_by_profile(rank, profile):
    if rank == 0:  # its profile is everybody's
        os.environ[VARIABLE] = profile
    found = {}
    for how in PARTITIONS:
        generator = torch.Generator().manual_seed(rank)
        wanted = [torch.randint(0, NUM_ROWS, (200,), generator=generator) for _ in range(6)]
        loader = planned_loader(HandMade(wanted), partitioned(store(), how), ["narrow", "wide"])
        for minibatch in loader:
            assert_as_stock(minibatch, store(), ["narrow", "wide"])
        features = {key.name: one for key, one in featsync.stats(loader).features.items()}
        found[how] = {
            name: (one.transport, one.rows["peer"] > 0, one.why) for name, one in features.items()
        }
        end_loader_workers()
        dist.barrier()
    return found


def test_narrow_rows_come_by_shared_memory_and_wide_ones_point_to_point(tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(CROSSOVER))

    for found in run_ranks(train_by_profile, 2, str(profile)):
        for how in PARTITIONS:
            narrow, wide = found[how]["narrow"], found[how]["wide"]
            assert (narrow[0], wide[0]) == ("shared_memory", "p2p")
            assert wide[1]
            assert "10,000 rows of 8 bytes take" in narrow[2]
            assert "10,000 rows of 512 bytes take" in wide[2]
            assert "this machine's profile" in wide[2]
