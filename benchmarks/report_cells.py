"""Numbers as they stand in the cells of a table."""

from __future__ import annotations


def ranged(middle: float, least: float, most: float, digits: int = 2) -> str:
    """A number and the range around it."""
    return f"{middle:.{digits}f} ({least:.{digits}f} to {most:.{digits}f})"


def ratio(values: dict[str, float | None], digits: int = 2) -> str:
    """Median and range of a ratio."""
    numbers = [values[name] for name in ("median", "min", "max")]
    return "-" if numbers[0] is None else ranged(*numbers, digits=digits)
