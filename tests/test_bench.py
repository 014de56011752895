"""The bench harness: what it counts, and the parts that it is made of."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from featsync.bench.check_rows import RowCheck, count_different_rows
from featsync.bench.measure import cpu_seconds, time_epoch
from featsync.bench.steps import SimulatedStep, parse_simulated_step
from featsync.errors import ConfigError

pytestmark = pytest.mark.dgl


# ---- rows and seconds ----
@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ([[1.0, 2.0], [3.0, float("nan")]], 0),
        ([[1.0, 2.0], [3.5, float("nan")]], 1),
        ([[1.0, 2.5], [0.0, 0.0]], 2),
        ([[1.0], [3.0]], 2),
        ([[1.0, 2.0]], 2),
    ],
)
def test_rows_are_compared_by_their_bits_and_shape(found, wrong):
    expected = torch.tensor([[1.0, 2.0], [3.0, float("nan")]])

    assert count_different_rows(torch.tensor(found), expected) == wrong


def test_another_dtype_is_wrong_and_no_rows_are_right():
    rows = torch.zeros(3, 2)

    assert count_different_rows(rows.double(), rows) == 3
    assert count_different_rows(-rows, rows) == 3
    assert count_different_rows(rows[:0], rows[:0]) == 0
    assert count_different_rows(rows[:, :0], rows[:, :0]) == 0
    assert RowCheck(3, 1) + RowCheck(2, 0) == RowCheck(5, 1)


def test_an_epoch_separates_waiting_from_the_step_and_keeps_what_is_asked_for():
    def slow_source():
        for value in range(3):
            time.sleep(0.02)
            yield value

    times = time_epoch(slow_source(), lambda index, minibatch: time.sleep(0.01), hold=[1])

    assert times.held == {1: 1, 2: 2}
    assert len(times.marks) == 3
    assert 0.06 <= times.next_s <= times.wall_s - 0.03


def test_an_empty_epoch_holds_nothing():
    times = time_epoch([], lambda index, minibatch: None)

    assert (times.held, times.marks) == ({}, [])


def test_cpu_seconds_count_children_alive_and_gone():
    # The child ends its line when it has worked, and itself when its input is closed.
    code = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    before = cpu_seconds()
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    child.stdout.readline()
    while_alive = cpu_seconds() - before
    child.communicate(b"\n", timeout=20)
    after = cpu_seconds() - before

    assert while_alive >= 0.4
    assert after >= 0.4


@pytest.mark.parametrize(
    ("text", "step"),
    [("150", SimulatedStep(0.15)), ("10:0.5", SimulatedStep(0.01, 0.5))],
)
def test_a_simulated_step_is_read(text, step):
    assert parse_simulated_step(text) == step


def test_a_simulated_step_takes_its_time_and_sleeps_for_the_rest_of_the_share(monkeypatch):
    slept = []
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
    started = time.perf_counter()

    SimulatedStep(0.05, 0.4)(None, None)

    assert time.perf_counter() - started >= 0.05
    assert 0 < sum(slept) <= 0.6 * 0.05 + 1e-9


@pytest.mark.parametrize("text", ["", "0", "fast", "10:2", "10:-1"])
def test_a_simulated_step_that_makes_no_sense_is_refused(text):
    with pytest.raises(ConfigError, match="--simulate-step"):
        parse_simulated_step(text)


# ---- the model ----
def test_the_mean_over_neighbours_is_that_of_a_loop():
    from featsync.bench.model import edge_mean, neighbour_mean

    rows = torch.rand(4, 3)
    layer = SimpleNamespace(
        indptr=torch.tensor([0, 2, 2, 5]), indices=torch.tensor([0, 3, 1, 1, 2], dtype=torch.int32)
    )

    mean = neighbour_mean(rows, layer)
    edges = edge_mean(torch.arange(5.0)[:, None], layer)

    assert torch.allclose(mean[0], (rows[0] + rows[3]) / 2)
    assert torch.equal(mean[1], torch.zeros(3))
    assert torch.allclose(mean[2], (2 * rows[1] + rows[2]) / 3)
    assert edges.flatten().tolist() == [0.5, 0.0, 3.0]


def test_the_area_under_the_curve_counts_ties_half():
    from featsync.bench.objective import area_under_curve

    labels = torch.tensor([1.0, 1.0, 0.0, 0.0])

    assert area_under_curve(torch.tensor([4.0, 3.0, 2.0, 1.0]), labels) == 1.0
    assert area_under_curve(torch.tensor([1.0, 1.0, 1.0, 1.0]), labels) == 0.5
    assert area_under_curve(torch.tensor([4.0, 1.0, 2.0, 0.0]), labels) == 0.75
