"""Writes the rows of a feature to a file, which is the old one or the new one at any time."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import numpy as np
import torch

from featsync.dynamic.clock import FeatureClock
from featsync.errors import ConfigError
from featsync.mapped import file_of
from featsync.offers import agree, attempt
from featsync.world import World

__all__ = ["flush_rows", "whole_file_of"]

_WHERE = "featsync.DynamicFeature.flush"


def flush_rows(
    clock: FeatureClock,
    world: World | None,
    file: Path | None,
    path: str | os.PathLike[str] | None,
) -> None:
    """Write all rows as of the last committed step; collective.

    Args:
        clock: Of the feature.
        world: Its ranks; ``None`` for a single one.
        file: That all rows were mapped from, if any; only the first rank's counts.
        path: Of a ``.npy`` file; ``None``: ``file``.

    Raises:
        ConfigError: There is no file to write to, or it cannot hold such rows.
        PeerError: Another rank could not do its part.
    """
    clock.settle()
    problem = None
    if world is None or world.rank == 0:
        _, problem = attempt(lambda: _replace(_target(file, path), clock.read()), None)
    if world is not None:
        agree(world, "write rows to a file", None, problem, None)
    elif problem is not None:
        raise problem


def whole_file_of(rows: torch.Tensor) -> Path | None:
    """The ``.npy`` file that rows were mapped from; ``None`` if there is none, or it holds more."""
    file = file_of(rows) if rows.device.type == "cpu" else None
    if file is None or file.is_deleted or not file.path.endswith(".npy"):
        return None
    try:
        array = np.load(file.path, mmap_mode="r", allow_pickle=False)
        seen = rows.detach().numpy()
    except (OSError, ValueError, TypeError):
        return None
    is_whole = (seen.shape, seen.dtype, seen.strides) == (array.shape, array.dtype, array.strides)
    return Path(file.path) if is_whole and file.offset == array.offset else None


def _target(file: Path | None, path: str | os.PathLike[str] | None) -> Path:
    if path is not None:
        return Path(path)
    if file is None:
        raise ConfigError(
            f"{_WHERE}: the rows were not mapped from a whole .npy file, so there is none to write "
            "them back to. Give a path."
        )
    return file


def _replace(path: Path, rows: torch.Tensor) -> None:
    if rows.dtype == torch.bfloat16:
        raise ConfigError(
            f"{_WHERE}: NumPy has no {rows.dtype}, so no .npy file can hold these rows. Write what "
            "read() gives with torch.save."
        )
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with beside.open("xb") as written:
            if path.exists():
                os.fchmod(written.fileno(), path.stat().st_mode & 0o777)
            np.save(written, rows.numpy())
            written.flush()
            os.fsync(written.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
