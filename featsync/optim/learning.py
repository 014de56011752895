"""Applies an optimizer to the rows of which some ranks have gradients; see `Merge`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from featsync.dynamic.merge import Merge, Numbered, Round, RowNumbers
from featsync.errors import ConfigError
from featsync.optim.rules import Rule, States
from featsync.row_items import put_rows, take_rows

__all__ = ["Learning", "summed"]

# Of rows that are worked on at a time. 40,000 rows of 512 bytes, ms on one core: 64 KiB 100,
# 256 KiB 65, 2 MiB 50, 8 MiB 55, in one piece 60; each block takes the GIL some ten times.
_BLOCK_BYTES = 1 << 22


class Learning(Merge):
    """Entries are gradients: summed in their order, then the rule is applied once a row.

    Args:
        rule: What to do.
        states: By name, ``(num_rows, *its shape)``, shared as the table is.
        divisor: Of the sums.
    """

    def __init__(self, rule: Rule, states: States, divisor: int = 1) -> None:
        self._rule, self._states, self._divisor = rule, states, divisor

    def apply(self, table: torch.Tensor, rounds: Sequence[Round], numbers: RowNumbers) -> None:
        """Change rows and their states.

        Raises:
            ConfigError: Ranks gave different learning rates.
        """
        if not rounds:
            return
        rates = sorted({part.factor for part in rounds})
        if len(rates) > 1:
            raise ConfigError(
                f"ranks train rows with different learning rates in one step: {rates}. Change lr "
                "on all ranks alike. Some rows may hold this step's values and some not: go on "
                "from a checkpoint."
            )
        numbered = numbers.number(rounds)
        gradients = summed(rounds, numbered)
        if self._divisor > 1:
            gradients = gradients / self._divisor
        rows = torch.from_numpy(numbered.rows)
        row_bytes = max(1, table[0].numel() * table.element_size())
        size = max(1, _BLOCK_BYTES // row_bytes)
        for start in range(0, len(rows), size):
            block = rows[start : start + size]
            values = _taken(table, block)
            states = {name: _taken(state, block) for name, state in self._states.items()}
            self._rule.step(values, gradients[start : start + size], states, rounds[0].factor)
            put_rows(table, block, values)
            for name, state in states.items():
                put_rows(self._states[name], block, state)


def summed(rounds: Sequence[Round], numbered: Numbered) -> torch.Tensor:
    """Add up what rounds have for each row, in their order.

    Returns:
        ``(num_distinct, *row_shape)``; may be a view of the only round's values.
    """
    if len(rounds) == 1:
        return rounds[0].taken()
    values = rounds[0].values
    out = torch.empty((len(numbered.rows), *values.shape[1:]), dtype=values.dtype)
    count = 0
    for part, found in zip(rounds, numbered.numbers, strict=True):
        is_new = found >= count
        new = part.some(np.flatnonzero(is_new))
        # New rows are numbered on in the order in which they come.
        new.take_into(out[count : count + len(new.rows)])
        if len(new.rows) < len(found):
            old = np.flatnonzero(~is_new)
            where = torch.from_numpy(found.take(old))
            put_rows(out, where, _taken(out, where).add_(part.some(old).taken()))
        count += len(new.rows)
    return out


def _taken(source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    out = torch.empty((len(rows), *source.shape[1:]), dtype=source.dtype)
    take_rows(source, rows, out)
    return out
