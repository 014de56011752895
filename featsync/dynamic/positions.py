"""How far a rank or the commits of a feature are, as one integer that never falls.

::

    bit 63        32 31         0
        ┌───────────┬───────────┐
        │ epoch     │ steps     │    steps closed (by a rank) or committed, of that epoch
        └───────────┴───────────┘

A step is named by the position before it: ``position(2, 0)`` is the first step of epoch 2, and
``position(2, 1)`` says that it is over.
"""

from __future__ import annotations

__all__ = ["Position", "after_epoch", "epoch_of", "position", "steps_of"]

Position = int
_BITS = 32


def position(epoch: int, steps: int) -> Position:
    """Put a position together.

    Example:
        >>> position(1, 0) > position(0, 4_000_000_000)
        True
    """
    return epoch << _BITS | steps


def epoch_of(where: Position) -> int:
    """The epoch."""
    return where >> _BITS


def steps_of(where: Position) -> int:
    """The steps of it that are over."""
    return where & (1 << _BITS) - 1


def after_epoch(where: Position) -> Position:
    """Where the epoch after begins: whoever stands there holds up nobody in this one."""
    return position(epoch_of(where) + 1, 0)
