"""Writes the rows of a feature to a file, which is the old one or the new one at any time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import torch

from featsync.dynamic.clock import FeatureClock
from featsync.errors import ConfigError
from featsync.mapped import MappedFile
from featsync.offers import agree, attempt
from featsync.world import World

__all__ = ["flush_rows"]

_WHERE = "featsync.DynamicFeature.flush"


def flush_rows(
    clock: FeatureClock,
    world: World | None,
    file: MappedFile | None,
    path: str | os.PathLike[str] | None,
) -> None:
    """Write all rows as of the last committed step; collective.

    Args:
        clock: Of the feature.
        world: Its ranks; ``None`` for a single one.
        file: That the rows were mapped from, if any.
        path: Of a ``.npy`` file; ``None``: ``file``.

    Raises:
        ConfigError: There is no file to write to.
        PeerError: Another rank could not do its part.
    """
    clock.settle()
    target, problem = attempt(lambda: _target(file, path), None)
    is_first = world is None or world.rank == 0
    if is_first and target is not None:
        _, problem = attempt(lambda: _replace(target, clock.read()), None)
    if world is not None:
        agree(world, "write rows to a file", None, problem, None)
    elif problem is not None:
        raise problem


def _target(file: MappedFile | None, path: str | os.PathLike[str] | None) -> Path:
    if path is not None:
        return Path(path)
    if file is None or not file.path.endswith(".npy"):
        raise ConfigError(
            f"{_WHERE}: the rows were not mapped from a .npy file, so there is none to write them "
            "back to. Give a path."
        )
    return Path(file.path)


def _replace(path: Path, rows: torch.Tensor) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as written:
        try:
            np.save(written, rows.numpy())
            written.flush()
            os.fsync(written.fileno())
            Path(written.name).replace(path)
        except BaseException:
            Path(written.name).unlink(missing_ok=True)
            raise
