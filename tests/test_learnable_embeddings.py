"""The example of learnable embeddings: it learns, on one rank and two, and says what is wrong."""

from __future__ import annotations

import pytest

from support.programs import results_of, run_program

pytestmark = pytest.mark.dgl

SMALL = ("--dataset", "{debian: {width: 4}}", "--width", 8, "--batch-size", 4096, "--epochs", 2)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_embeddings_are_learned(tmp_path, optimizer):
    first, second = results_of(
        tmp_path, "learnable_embeddings.py", *SMALL, "--optimizer", optimizer
    )

    assert second["loss"] < first["loss"]
    assert second["rows_per_second"] > 0
    assert second["private_mb"] > 0


@pytest.mark.multirank
def test_two_ranks_learn_together(tmp_path):
    everything = ("--learn", "package", "--learn", "maintainer", "--learn", "tag")

    first, second = results_of(tmp_path, "learnable_embeddings.py", *SMALL, *everything, ranks=2)

    assert second["loss"] < first["loss"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--learn", "packages"), "Did you mean 'package'?"),
        (("--optimizer", "adagard"), "Did you mean 'adagrad'?"),
        (("--dataset", "debain"), "Did you mean 'debian'?"),
    ],
)
def test_a_wrong_option_says_what_is_meant(options, message):
    done = run_program("learnable_embeddings.py", *options)

    assert done.returncode == 2
    assert message in done.stderr
