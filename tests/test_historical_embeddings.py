"""The example of historical embeddings runs and learns, on one rank and on two."""

from __future__ import annotations

import re

import pytest

from support.programs import run_program

pytestmark = pytest.mark.dgl


def losses(*options, ranks=1):
    small = ("--batch-size", 8192, "--width", 8, "--epochs", 2)
    done = run_program("historical_embeddings.py", *small, *options, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


@pytest.mark.parametrize("layers", [1, 3])
def test_it_learns(layers):
    first, second = losses("--layers", layers)

    assert second < first


@pytest.mark.multirank
def test_two_ranks_learn_together():
    first, second = losses(ranks=2)

    assert second < first
