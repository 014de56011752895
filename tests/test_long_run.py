"""A long run: rows of partitioned tables beside DDP's gradients, each on a group of its own."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import featsync
from featsync.profile import VARIABLE
from support.graphs import HandMade, assert_same, planned_loader, stock_loader, store_of
from support.parts import partitioned
from support.profiles import write_profile
from support.ranks import run_ranks

pytestmark = [pytest.mark.dgl, pytest.mark.multirank]

NUM_STEPS, NUM_ROWS, WINDOW = 2000, 3000, 4
# By these costs narrow rows go through shared memory, and wide ones point to point.
COSTS = {
    "shared_memory": {"message_s": 0.0, "gil_s": 0.0, "row_s": 0.0, "byte_s": 1e-8},
    "p2p": {"message_s": 0.001, "gil_s": 0.001, "row_s": 1e-6, "byte_s": 1e-9},
}
NAMES = {"narrow": "shared_memory", "wide": "p2p"}


def weights_after(loader, group):
    """Train a small model on all features of each minibatch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(102, 4), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = 0
    for minibatch in loader:
        rows = torch.cat([minibatch.node_features[name] for name in NAMES], 1)
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        steps += 1
    assert steps == NUM_STEPS
    return [parameter.detach() for parameter in model.module.parameters()]


def train_by_stock_and_by_featsync(rank, profile):
    os.environ[VARIABLE] = profile
    group = dist.new_group([0, 1])
    generator = torch.Generator().manual_seed(0)
    wide, narrow = (torch.randn(NUM_ROWS, width, generator=generator) for width in (100, 2))
    stock = store_of({("node", None, "wide"): wide, ("node", None, "narrow"): narrow})
    store = partitioned(stock, "owners")
    generator = torch.Generator().manual_seed(1 + rank)
    ids = [torch.randint(0, NUM_ROWS, (16,), generator=generator) for _ in range(NUM_STEPS)]
    loader = planned_loader(HandMade(ids), store, list(NAMES), lookahead=WINDOW, timeout=20.0)

    found = weights_after(loader, group)

    wanted = weights_after(stock_loader(HandMade(ids), stock, list(NAMES)), group)
    for weight, other in zip(found, wanted, strict=True):
        assert weight.isfinite().all()
        assert_same(weight, other)
    features = featsync.stats(loader).features
    assert {key.name: feature.transport for key, feature in features.items()} == NAMES
    sent = {key.name: feature.rows["peer"] for key, feature in features.items()}
    assert sent["wide"] > 6 * NUM_STEPS
    assert sent["narrow"] == 0  # read out of this machine's memory


@pytest.mark.timeout(200)
def test_two_thousand_steps_beside_ddp_end_with_the_weights_of_the_stock_run(tmp_path):
    """By two transports in each minibatch, window 4: nothing stalls, and nothing is mixed up."""
    path = tmp_path / "profile.json"
    write_profile(path, rows=1000, transports=COSTS)

    run_ranks(train_by_stock_and_by_featsync, 2, str(path), timeout_s=180)
