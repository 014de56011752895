"""Rows are read and put as torch does it, bit for bit, whatever they are made of."""

from __future__ import annotations

import pytest
import torch

from featsync.row_items import put_rows, take_rows
from featsync.testing.rows import bits, random_bits

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
SHAPES = ((), (1,), (3,), (2, 5), (0,), (70,), (3, 0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_rows_of_any_kind_are_those_that_torch_reads_and_puts(dtype, shape, num_rows):
    table = random_bits(dtype, (20, *shape))
    rows = torch.randperm(20)[:num_rows]

    taken = random_bits(dtype, (num_rows, *shape), seed=1)
    take_rows(table, rows.to(torch.int32), taken)
    assert torch.equal(bits(taken), bits(table[rows]))

    put, wanted = random_bits(dtype, (20, *shape), seed=2), random_bits(dtype, (20, *shape), seed=2)
    wanted[rows] = taken
    put_rows(put, rows, taken)
    assert torch.equal(bits(put), bits(wanted))


LAID = {
    "every second row": lambda rows: rows[::2],
    "columns": lambda rows: rows.T,
    "expanded": lambda rows: rows[:1].expand(10, -1),
    "conjugated": lambda rows: rows.conj(),
    "negated": lambda rows: rows.conj().imag,
    "requiring a gradient": lambda rows: rows.requires_grad_(),
}


@pytest.mark.parametrize("how", LAID)
def test_rows_that_lie_otherwise_are_the_same(how):
    table = LAID[how](torch.randn(20, 20, dtype=torch.complex64))
    rows = torch.tensor([7, 0, 7, 3])

    taken = torch.empty((4, *table.shape[1:]), dtype=table.dtype)
    take_rows(table.detach(), rows, taken)
    assert torch.equal(taken, table.detach()[rows])

    if how in ("every second row", "columns"):
        target = LAID[how](torch.zeros(20, 20, dtype=torch.complex64))
        put_rows(target, rows[1:], taken[1:])
        assert torch.equal(target[rows], taken)


@pytest.mark.parametrize("row", [-1, 20, 2**33])
@pytest.mark.parametrize("width", [1, 200])
def test_a_row_outside_is_an_error_and_nothing_else(row, width):
    table, rows = torch.zeros(20, width), torch.tensor([3, row])
    with pytest.raises((IndexError, RuntimeError)):
        take_rows(table, rows, torch.empty(2, width))


@pytest.mark.parametrize("position", [20, 2**33])
def test_a_position_outside_is_an_error(position):
    with pytest.raises((IndexError, RuntimeError)):
        put_rows(torch.zeros(20, 2), torch.tensor([3, position]), torch.ones(2, 2))
