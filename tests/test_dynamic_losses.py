"""A small model trained on rows that learn has the losses of the plain, sequential program."""

from __future__ import annotations

import threading

import pytest
import torch

from support.learners import Loop, learners
from support.local_clocks import on_threads
from support.plain_optimizers import PLAIN_RULES, PlainOptimizer
from support.tensors import same_bits

NUM_ROWS, WIDTH, NUM_CLASSES, LR = 30, 8, 4, 0.1


def batches_of(num_ranks, num_steps=12):
    """By step and rank: rows, some repeatedly, and a class for each."""
    random = torch.Generator().manual_seed(num_ranks)
    return [
        [
            (
                (NUM_ROWS * torch.rand(16, generator=random) ** 2).long(),
                torch.randint(0, NUM_CLASSES, (16,), generator=random),
            )
            for _ in range(num_ranks)
        ]
        for _ in range(num_steps)
    ]


def a_model():
    torch.manual_seed(3)
    start = torch.randn(NUM_ROWS, WIDTH)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 16), torch.nn.ReLU(), torch.nn.Linear(16, NUM_CLASSES)
    )
    return start, model, torch.optim.SGD(model.parameters(), lr=LR)


def loss_of(model, rows, classes):
    return torch.nn.functional.cross_entropy(model(rows), classes)


def step_together(optimizer, model, sums):
    """One step by the sum of all ranks' gradients, which are added in the order of ranks."""
    for parameter, gradients in zip(model.parameters(), sums, strict=True):
        parameter.grad = gradients
    optimizer.step()
    model.zero_grad()


def gradients_of(model):
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return gradients


def added(of_ranks):
    return [sum(parts) for parts in zip(*of_ranks, strict=True)]


def sequential(name, batches):
    """All ranks' minibatches one after the other; returns losses by step and rank, and the rows."""
    table, model, optimizer = a_model()
    rows = PlainOptimizer(name, table, LR)
    losses = []
    for parts in batches:
        found, of_ranks, ids, gradients = [], [], [], []
        for wanted, classes in parts:
            leaf = rows.table[wanted].requires_grad_()
            loss = loss_of(model, leaf, classes)
            loss.backward()
            found.append(loss.item())
            of_ranks.append(gradients_of(model))
            ids.append(wanted)
            gradients.append(leaf.grad)
        step_together(optimizer, model, added(of_ranks))
        rows.step(torch.cat(ids), torch.cat(gradients))
        losses.append(found)
    return losses, rows.table


def on_ranks(name, batches):
    num_ranks = len(batches[0])
    clocks, optimizers = learners(num_ranks, a_model()[0], name, lr=LR)
    models = [a_model()[1:] for _ in range(num_ranks)]
    shared = [[None] * num_ranks for _ in batches]
    all_ready = threading.Barrier(num_ranks)

    def body(rank):
        model, optimizer = models[rank]
        loop = Loop(clocks[rank])
        losses = []
        for step, parts in enumerate(batches):
            wanted, classes = parts[rank]
            minibatch, leaf = loop.deliver(wanted)
            loss = loss_of(model, leaf, classes)
            loss.backward()
            optimizers[rank].step(minibatch)
            shared[step][rank] = gradients_of(model)
            all_ready.wait(20)
            step_together(optimizer, model, added(shared[step]))
            losses.append(loss.item())
        loop.end()
        return losses

    by_rank = on_threads(body, num_ranks)
    return [list(of_step) for of_step in zip(*by_rank, strict=True)], clocks[0].read()


@pytest.mark.parametrize("name", PLAIN_RULES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_losses_are_those_of_the_sequential_program(name, num_ranks):
    batches = batches_of(num_ranks)
    losses, rows = on_ranks(name, batches)
    wanted, wanted_rows = sequential(name, batches)
    assert losses[-1] != losses[0]
    # Sums have the same order on ranks; torch's fused operations round otherwise than plain ones.
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rows, wanted_rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PLAIN_RULES)
def test_a_second_run_has_the_same_bits(name):
    batches = batches_of(2)
    losses, rows = on_ranks(name, batches)
    again, rows_again = on_ranks(name, batches)
    assert losses == again
    assert same_bits(rows, rows_again)
