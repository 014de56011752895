"""Optimizers of rows: as torch's and as plain loops have them, on one rank and on several."""

from __future__ import annotations

import io

import pytest
import torch

from support.learners import dealt, learners, merged, random_steps, train
from support.plain_optimizers import PLAIN_RULES, PlainOptimizer, summed_by_row
from support.tensors import same_bits

NAMES = list(PLAIN_RULES)
LR = 0.1


def table_of(num_rows=11, row_shape=(3,), dtype=torch.float32):
    return torch.randn(num_rows, *row_shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(
    ("name", "dense", "is_bit_for_bit"),
    [
        ("SparseSGD", torch.optim.SGD, True),
        ("SparseAdagrad", torch.optim.Adagrad, True),
        ("SparseAdam", torch.optim.Adam, False),
    ],
)
@pytest.mark.parametrize("row_shape", [(1,), (3,), (2, 5)], ids=str)
def test_rows_that_all_have_gradients_are_trained_as_by_torch(
    name, dense, is_bit_for_bit, row_shape
):
    start = table_of(6, row_shape)
    random = torch.Generator().manual_seed(2)
    gradients = [torch.randn(start.shape, generator=random) for _ in range(6)]
    ids = torch.arange(6)
    clocks, optimizers = learners(1, start, name, lr=LR)
    found = train(clocks, optimizers, [[(ids, gradient)] for gradient in gradients])

    parameter = torch.nn.Parameter(start.clone())
    optimizer = dense([parameter], lr=LR)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
    if is_bit_for_bit:
        assert same_bits(found, parameter.detach())
    # Adam is written down in another order of roundings.
    torch.testing.assert_close(found, parameter.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("row_shape", [(3,), (2, 2)], ids=str)
def test_rows_without_a_gradient_are_left_alone_state_and_all(name, row_shape):
    start = table_of(14, row_shape, torch.float64)
    steps = random_steps(3, row_shape=row_shape, dtype=torch.float64)
    clocks, optimizers = learners(1, start, name, lr=LR)
    found = train(clocks, optimizers, steps)

    plain = PlainOptimizer(name, start.clone(), LR)
    for parts in steps:
        plain.step(*parts[0])
    torch.testing.assert_close(found, plain.table, rtol=1e-12, atol=1e-12)
    touched = torch.cat([parts[0][0] for parts in steps])
    untouched = [row for row in range(len(start)) if row not in touched]
    assert len(untouched) >= 3
    assert same_bits(found[untouched], start[untouched])
    for state in optimizers[0].state_dict()["states"].values():
        assert state[untouched].eq(0).all()


def test_adam_counts_the_steps_of_each_row():
    """A row that is seen in steps 0 and 4 is as after two steps of one that is always seen."""
    start = table_of(2)
    gradients = torch.randn(5, 3, generator=torch.Generator().manual_seed(4))
    steps = [
        [(torch.tensor([0] if i % 4 else [1, 0]), gradients[i].expand(1 if i % 4 else 2, 3))]
        for i in range(5)
    ]
    clocks, optimizers = learners(1, start, "SparseAdam", lr=LR)
    found = train(clocks, optimizers, steps)
    assert optimizers[0].states["steps"].flatten().tolist() == [5, 2]

    seldom = torch.nn.Parameter(start[1].clone())
    adam = torch.optim.Adam([seldom], lr=LR)
    for i in (0, 4):
        seldom.grad = gradients[i].clone()
        adam.step()
    torch.testing.assert_close(found[1], seldom.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gradients_of_ranks_are_summed_as_in_one_process(name, num_ranks):
    steps = random_steps(5, num_ranks)
    found = train(*learners(num_ranks, table_of(), name, lr=LR), steps)
    alone = train(*learners(1, table_of(), name, lr=LR), merged(steps))
    assert same_bits(found, alone)


@pytest.mark.parametrize("name", NAMES)
def test_a_mean_is_the_sum_by_the_number_of_ranks_of_the_group(name):
    """As DDP has it: also for rows of which only one rank has a gradient."""
    steps = random_steps(6, 3)
    found = train(*learners(3, table_of(), name, lr=LR, reduce="mean"), steps)

    means = []
    for ids, gradients in (parts[0] for parts in merged(steps)):
        sums = summed_by_row(ids, gradients)
        rows = torch.tensor(list(sums))
        means.append([(rows, torch.stack(list(sums.values())) / 3)])
    assert same_bits(found, train(*learners(1, table_of(), name, lr=LR), means))


@pytest.mark.parametrize("name", NAMES)
def test_a_row_named_repeatedly_in_a_minibatch_takes_one_step_by_the_sum(name):
    gradients = torch.randn(3, 3, generator=torch.Generator().manual_seed(7))
    steps = [[(torch.tensor([4, 4, 4]), gradients)]]
    found = train(*learners(1, table_of(), name, lr=LR), steps)
    total = ((gradients[0] + gradients[1]) + gradients[2])[None]
    once = train(*learners(1, table_of(), name, lr=LR), [[(torch.tensor([4]), total)]])
    assert same_bits(found, once)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_learning_rate_counts_from_the_step_before_which_it_was_set(name, num_ranks):
    rates = [0.1, 0.1, 0.5, 0.01, 0.0]
    start = table_of(dtype=torch.float64)
    steps = random_steps(8, num_ranks, dtype=torch.float64)

    def set_rate(step, optimizer):
        optimizer.lr = rates[step]

    found = train(*learners(num_ranks, start, name, lr=9.0), steps, set_rate)
    plain = PlainOptimizer(name, start.clone(), 9.0)
    for rate, parts in zip(rates, merged(steps), strict=True):
        plain.lr = rate
        plain.step(*parts[0])
    torch.testing.assert_close(found, plain.table, rtol=1e-12, atol=1e-12)


def saved_and_loaded(state):
    """A state dictionary through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_a_state_goes_on_bit_for_bit_on_another_number_of_ranks(name, before, after):
    steps = random_steps(9, num_steps=6)
    whole = train(*learners(1, table_of(), name, lr=LR), steps)

    clocks, optimizers = learners(before, table_of(), name, lr=LR)
    rows = train(clocks, optimizers, dealt(steps[:3], before))
    state = saved_and_loaded(optimizers[-1].state_dict())
    clocks, optimizers = learners(after, rows, name, lr=99.0)
    for optimizer in optimizers:
        optimizer.load_state_dict(state)
        assert optimizer.lr == LR
    assert same_bits(train(clocks, optimizers, dealt(steps[3:], after)), whole)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_is_a_copy(name):
    clocks, optimizers = learners(1, table_of(), name, lr=LR)
    train(clocks, optimizers, random_steps(10))
    state = optimizers[0].state_dict()
    kept = {key: value.clone() for key, value in state["states"].items()}
    train(clocks, optimizers, random_steps(11))
    for key, value in state["states"].items():
        assert same_bits(value, kept[key])
        assert not same_bits(value, optimizers[0].states[key])
