"""What the command line needs for ``bench``, in one place."""

from __future__ import annotations

from typing import Any, get_args

from featsync.bench.driver import Driver, Options, Results
from featsync.bench.environment import describe_environment
from featsync.bench.plot import plot
from featsync.bench.protocol import Model
from featsync.bench.report import tables, to_json, wrong_rows
from featsync.bench.steps import parse_simulated_step
from featsync.bench.trace import to_trace
from featsync.errors import unknown_name
from featsync.plotting import check_plot

__all__ = [
    "Driver",
    "check_plot",
    "options",
    "plot",
    "report",
    "tables",
    "to_trace",
    "wrong_rows",
]


def options(model: str, simulate_step: str | None, **others: Any) -> Options:
    """Make options from what was typed.

    Raises:
        ConfigError: The model is not known, or the simulated step cannot be read.
    """
    if model not in get_args(Model):
        raise unknown_name("--model", model, get_args(Model))
    simulated = None if simulate_step is None else parse_simulated_step(simulate_step)
    return Options(model=model, simulated=simulated, **others)  # type: ignore[arg-type]


def report(results: Results, chosen: Options, command: str) -> dict[str, Any]:
    """Make the report of what was measured here."""
    return to_json(results, chosen, describe_environment(chosen.threads), command)
