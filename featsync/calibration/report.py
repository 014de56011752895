"""What was measured, and the profile that it makes, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.table import Table

from featsync.calibration.crossover import describe, stretches
from featsync.calibration.fit import deviations, fit_cost
from featsync.calibration.samples import LOCAL, ROWS, WIDTHS, Measured, Setting
from featsync.profile import Cost, Profile, machine_name

__all__ = ["COMPARED_ROWS", "costs_table", "crossovers", "profile_of", "seconds_table"]

COMPARED_ROWS = 10_000
_DIGITS = 3


def profile_of(measured: Measured) -> Profile:
    """Make this machine's profile."""
    costs = {
        way: _rounded(fit_cost(measured.samples_of(way), measured.tax_of(way).gil_s))
        for way in measured.ways
    }
    local = costs.pop(LOCAL)
    return Profile(
        schema=1, machine=machine_name(), rows=COMPARED_ROWS, local=local, transports=costs
    )


def seconds_table(measured: Measured) -> Table:
    """What a message takes in each setting; the cheapest transport stands out."""
    table = Table(title=f"{measured.ranks} ranks: what a message takes, ms (median)")
    for column in ("rows", "bytes a row", *measured.ways):
        table.add_column(column, justify="right")
    for setting in sorted(measured.settings, key=lambda one: (one.rows, one.row_bytes)):
        table.add_row(f"{setting.rows:,}", f"{setting.row_bytes:,}", *_marked(measured, setting))
    return table


def costs_table(measured: Measured, profile: Profile) -> Table:
    """The constants of the model, and how far it is off."""
    table = Table(
        title=f"{measured.ranks} ranks: the model",
        caption="Python: lost by the rank that wants rows + by the one that holds them. "
        "Off: the model against what was measured.",
    )
    table.add_column("rows come by")
    for column in (
        "message, µs",
        "Python, µs a message",
        "row, ns",
        "byte, ns",
        "off: median (most)",
    ):
        table.add_column(column, justify="right")
    for way in measured.ways:
        cost, tax = cost_of(profile, way), measured.tax_of(way)
        off = deviations(cost, measured.samples_of(way))
        table.add_row(
            way,
            f"{1e6 * cost.message_s:,.0f}",
            f"{1e6 * tax.fetching_s:,.0f} + {1e6 * tax.serving_s:,.0f}",
            f"{1e9 * cost.row_s:.1f}",
            f"{1e9 * cost.byte_s:.2f}",
            f"{np.median(off):.0%} ({off.max():.0%})",
        )
    return table


def crossovers(profile: Profile) -> list[str]:
    """Say for messages of some sizes which transport is the cheapest for which width."""
    widths = range(WIDTHS[0], WIDTHS[-1] + 1)
    lines = []
    for rows in ROWS:
        found = stretches(profile.model_copy(update={"rows": rows}), widths)
        chosen = "; this is what auto goes by" if rows == profile.rows else ""
        lines.append(f"Messages of {rows:,} rows: {describe(found)}{chosen}.")
    return lines


def cost_of(profile: Profile, way: str) -> Cost:
    """The constants of a transport, or of ``local``."""
    return profile.local if way == LOCAL else profile.transports[way]


def _marked(measured: Measured, setting: Setting) -> Sequence[str]:
    seconds = {
        sample.way: sample.seconds for sample in measured.samples if sample.setting == setting
    }
    transports = [way for way in measured.ways if way != LOCAL]
    best = min(transports, key=lambda way: seconds[way], default=LOCAL)
    return [
        f"[bold]{1e3 * seconds[way]:.3f}[/]" if way == best else f"{1e3 * seconds[way]:.3f}"
        for way in measured.ways
    ]


def _rounded(cost: Cost) -> Cost:
    """To as many digits as mean something."""
    return Cost(**{name: float(f"{value:.{_DIGITS}g}") for name, value in cost})
