"""The package that draws, which is optional."""

from __future__ import annotations

from featsync.errors import ConfigError

__all__ = ["check_plot"]


def check_plot() -> None:
    """Say early that the package that draws is missing.

    Raises:
        ConfigError: It is.
    """
    try:
        import matplotlib as _  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'featsync[plot]'") from error
