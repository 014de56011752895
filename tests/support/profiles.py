"""Profiles of tests: the shipped one, with changes."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any


def write_profile(path: Path, **changes: Any) -> None:
    """Write the shipped profile with other values to a file."""
    shipped = resources.files("featsync").joinpath("default_profile.json").read_text()
    path.write_text(json.dumps(json.loads(shipped) | changes))
