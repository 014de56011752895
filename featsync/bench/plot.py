"""Draw a report: each epoch a dot, its median a line, the floor dashed."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

_PANELS = {"epoch_s": "epoch, seconds", "cpu_s": "CPU, seconds", "wait_s": "waiting, seconds"}


def plot(report: dict[str, Any], path: Path) -> None:
    """Write the picture of a report to a file whose ending names the format."""
    from matplotlib.figure import Figure

    runs = report["runs"]
    figure = Figure(figsize=(4 * len(_PANELS), 1.2 + 0.5 * len(runs)), layout="constrained")
    panels = figure.subplots(1, len(_PANELS), sharey=True)
    for panel, (key, label) in zip(panels, _PANELS.items(), strict=True):
        panel.margins(x=0.08)
        for position, run in enumerate(runs):
            values = run[key]
            panel.plot(values, [position] * len(values), "o", alpha=0.4, color=f"C{position}")
            middle = statistics.median(values)
            panel.plot([middle] * 2, [position - 0.3, position + 0.3], color=f"C{position}")
        if key == "epoch_s":
            panel.axvline(report["floor_s"], linestyle="--", color="gray")
        panel.set_xlim(left=0 if min(min(run[key]) for run in runs) >= 0 else None)
        panel.locator_params(axis="x", nbins=5)
        panel.set_xlabel(label)
    panels[0].set_yticks(range(len(runs)), [run["config"] for run in runs])
    panels[0].invert_yaxis()
    figure.suptitle(f"{report['workload']['ranks']} rank(s), model {report['workload']['model']}")
    figure.savefig(path)
