"""Draw what messages took, as dots, and what the profile says of it, as lines."""

from __future__ import annotations

from pathlib import Path

from featsync.calibration.report import cost_of
from featsync.calibration.samples import WIDTHS, Measured
from featsync.profile import Profile

__all__ = ["plot"]


def plot(measured: Measured, profile: Profile, path: Path) -> None:
    """Write the picture to a file whose ending names the format."""
    from matplotlib.figure import Figure

    all_rows = sorted({setting.rows for setting in measured.settings})
    figure = Figure(figsize=(4.2 * len(all_rows), 4.2), layout="constrained")
    panels = figure.subplots(1, len(all_rows), sharey=True, squeeze=False)[0]
    for panel, rows in zip(panels, all_rows, strict=True):
        for index, way in enumerate(measured.ways):
            cost, color = cost_of(profile, way), f"C{index}"
            samples = [one for one in measured.samples_of(way) if one.setting.rows == rows]
            panel.loglog(
                [one.setting.row_bytes for one in samples],
                [1e3 * one.seconds for one in samples],
                "o",
                color=color,
            )
            model = [1e3 * (cost.seconds(rows, width) - cost.gil_s) for width in WIDTHS]
            panel.loglog(WIDTHS, model, color=color, label=way)
        panel.set_xticks(WIDTHS, [f"{width:,}" for width in WIDTHS])
        panel.minorticks_off()
        panel.set_xlabel("bytes a row")
        panel.set_title(f"messages of {rows:,} rows")
    panels[0].set_ylabel("ms a message")
    panels[0].legend()
    figure.suptitle(f"{measured.ranks} ranks, {profile.machine}: measured (dots) and model (lines)")
    figure.savefig(path)
