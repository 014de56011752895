"""Which transport a profile chooses for which width."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from featsync.profile import Profile

__all__ = ["Stretch", "describe", "stretches"]


class Stretch(NamedTuple):
    """Widths for which one transport is the cheapest.

    Attributes:
        first: The narrowest of them, in bytes of a row.
        last: The widest.
        transport: Its name.
    """

    first: int
    last: int
    transport: str


def stretches(profile: Profile, widths: range) -> list[Stretch]:
    """Divide widths by the transport that is chosen where all can be used.

    Args:
        profile: The costs.
        widths: Bytes of a row, ascending.
    """
    names = list(profile.transports)
    found = []
    for name, group in itertools.groupby(widths, key=lambda w: profile.cheapest(names, w)[0]):
        of_name = list(group)
        found.append(Stretch(of_name[0], of_name[-1], name))
    return found


def describe(found: Sequence[Stretch]) -> str:
    """Say it in words: the crossovers, or that there is none."""
    first, *others = found
    if not others:
        return (
            f"{first.transport} is the cheapest for rows of {first.first:,} to {first.last:,} "
            "bytes: there is no crossover"
        )
    parts = [f"up to {one.last:,} bytes a row {one.transport}" for one in found[:-1]]
    return f"{', '.join(parts)}, above that {found[-1].transport} is the cheapest"
