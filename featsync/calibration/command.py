"""What the command line needs for ``calibrate``, in one place."""

from __future__ import annotations

from pathlib import Path

from featsync.calibration.measure import Options, measure
from featsync.calibration.plot import plot
from featsync.calibration.report import costs_table, crossovers, profile_of, seconds_table
from featsync.plotting import check_plot
from featsync.profile import VARIABLE, Profile

__all__ = [
    "Options",
    "check_plot",
    "costs_table",
    "crossovers",
    "measure",
    "plot",
    "profile_of",
    "seconds_table",
    "what_next",
    "write",
]


def write(profile: Profile, path: Path) -> None:
    """Write a profile where ``load_profile`` can read it."""
    path.write_text(profile.model_dump_json(by_alias=True, indent=2) + "\n", encoding="utf-8")


def what_next(path: Path | None) -> str:
    """Say how the profile comes to be used."""
    if path is None:
        return "Nothing was written; keep the profile with --out FILE."
    return f"Written to {path}. It is used where {VARIABLE}={path.resolve()} is set, on all ranks."
