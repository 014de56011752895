"""``device_cache``: from what users write to slots for each feature.

Rows and fractions count per feature and are capped at its table; bytes are the total and are split
in proportion to the tables' bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from featsync.errors import ConfigError
from featsync.plan import FeatureKey
from featsync.table import RowTable

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_BYTES = re.compile(rf"\s*(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})\s*")
_ALLOWED = (
    f"rows (1000), a fraction of each table from 0.0 to 1.0 (0.1), or bytes of all "
    f'("512MiB"; units {", ".join(_UNITS)})'
)


def check_cache_size(size: object) -> None:
    """Refuse what is not a cache size.

    Raises:
        ConfigError: Neither rows, fraction nor bytes.
    """
    is_rows = isinstance(size, int) and not isinstance(size, bool) and size >= 0
    is_fraction = isinstance(size, float) and 0.0 <= size <= 1.0
    is_bytes = isinstance(size, str) and _BYTES.fullmatch(size) is not None
    if not (is_rows or is_fraction or is_bytes):
        raise ConfigError(f"plan_feature.device_cache = {size!r}: it must be {_ALLOWED}")


def slots_of_tables(
    size: int | float | str, tables: Mapping[FeatureKey, RowTable]
) -> dict[FeatureKey, int]:
    """Split a cache over features.

    Args:
        size: As users write it.
        tables: The features that can be cached.

    Returns:
        Slots of each feature.

    Raises:
        ConfigError: The cache is larger than all tables together.

    Example:
        >>> slots_of_tables(0.1, {})
        {}
    """
    if not tables:
        return {}
    if isinstance(size, float):
        return {key: int(size * table.num_rows) for key, table in tables.items()}
    if isinstance(size, int):
        largest = max(table.num_rows for table in tables.values())
        if size > largest:
            raise _too_large(size, f"the largest table has {largest:,} rows")
        return {key: min(size, table.num_rows) for key, table in tables.items()}
    matched = _BYTES.fullmatch(size)
    if matched is None:
        raise ConfigError(f"plan_feature.device_cache = {size!r}: it must be {_ALLOWED}")
    num_bytes = float(matched[1]) * _UNITS[matched[2]]
    total = sum(table.num_rows * table.kind.num_bytes for table in tables.values())
    if num_bytes > total:
        raise _too_large(size, f"all tables together have {total:,} bytes")
    share = num_bytes / total if total else 0.0
    return {key: int(share * table.num_rows) for key, table in tables.items()}


def _too_large(size: object, fact: str) -> ConfigError:
    return ConfigError(
        f"plan_feature.device_cache = {size!r} is larger than what there is to cache: {fact}. "
        f"Give {_ALLOWED}."
    )
