"""Looks at what is to be written before anything is."""

from __future__ import annotations

import torch

from featsync.errors import ConfigError, FeatureError
from featsync.row_kind import RowKind

__all__ = ["checked_rows", "checked_values"]


def checked_rows(ids: torch.Tensor | None, num_rows: int, where: str) -> torch.Tensor:
    """Give row numbers as they will be used: ``(n,)`` int64 on the CPU; ``None``: all rows.

    Raises:
        ConfigError: They are no row numbers.
        FeatureError: One of them lies outside the table.
    """
    if ids is None:
        return torch.arange(num_rows)
    if not isinstance(ids, torch.Tensor) or ids.ndim != 1 or ids.dtype not in _WHOLE:
        found = (
            f"{tuple(ids.shape)} {ids.dtype}"
            if isinstance(ids, torch.Tensor)
            else type(ids).__name__
        )
        raise ConfigError(f"{where}: ids are {found}; give a tensor (n,) of int32 or int64")
    rows = ids.detach().to("cpu", torch.int64)
    outside = rows[(rows < 0) | (rows >= num_rows)]
    if len(outside):
        raise FeatureError(
            f"{where}: id {int(outside[0])} is outside its table of {num_rows} rows (allowed 0 to "
            f"{num_rows - 1}); nothing was written"
        )
    return rows


def checked_values(value: object, num_rows: int, kind: RowKind, where: str) -> torch.Tensor:
    """Give values as they will be written: ``(n, *row_shape)``, detached.

    Raises:
        ConfigError: They are not as many, or not of the rows' shape and dtype.
    """
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"{where}: value is {type(value).__name__}; give a tensor")
    if value.layout != torch.strided:
        raise ConfigError(f"{where}: value is {value.layout}; give a dense tensor")
    wanted = (num_rows, *kind.shape)
    if tuple(value.shape) != wanted or value.dtype != kind.dtype:
        raise ConfigError(
            f"{where}: value is {tuple(value.shape)} {value.dtype} where {wanted} {kind.dtype} is "
            "allowed, one row for each id; nothing was written"
        )
    return value.detach()


_WHOLE = (torch.int32, torch.int64)
