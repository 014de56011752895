"""What a device holds of a feature: the slots, and the memory of why a row is in one.

Belongs to (feature, device), so it survives epochs, and loaders of one feature share it. One
session drives it at a time, the one whose iteration began first: only that one moves rows in and
out, since a plan names slots whose content must not change under it. A session that finds the
residency driven by another (a validation loop nested in a training loop) reads from home.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray

from featsync.errors import ConfigError
from featsync.plan import FeatureKey
from featsync.retention import RETENTION, Retention
from featsync.row_kind import RowKind


@dataclass(frozen=True)
class CacheSettings:
    """What the loaders of one cache have to agree on."""

    num_slots: int
    retention: str
    window: int


class Residency:
    """The cache of one feature on one device.

    Args:
        key: The feature.
        settings: Slots, policy and window.
        num_rows: Rows of the home table.
        slots: ``(num_slots, *row_shape)``, uninitialised; owned by the residency from here on.
        score: Per-row score ``(num_rows,)``, or ``None`` for counted use.
    """

    def __init__(
        self,
        key: FeatureKey,
        settings: CacheSettings,
        num_rows: int,
        slots: torch.Tensor,
        score: NDArray[Any] | None,
    ) -> None:
        self.key = key
        self.settings = settings
        self.slots = slots
        self.retention: Retention = RETENTION[settings.retention](
            num_rows, settings.num_slots, settings.window, score
        )
        self._holds: object = None
        self._is_driven: Callable[[], bool] = _nobody

    def drive(self, is_alive: Callable[[], bool], version: object) -> bool:
        """Become the session that moves rows in and out, unless a living one does.

        Known next uses are forgotten; so are the rows, if the home table changed since they came.

        Args:
            is_alive: Tells later callers whether whoever drives now still does.
            version: The home table's, now; equal as long as its rows are.

        Returns:
            Whether the caller drives now.
        """
        if self._is_driven():
            return False
        self._is_driven = is_alive
        self.retention.reset()
        if version != self._holds:
            self.retention.clear()
            self._holds = version
        return True

    def fits(self, num_rows: int, kind: RowKind) -> bool:
        """Whether it is a cache of a table of so many such rows."""
        found = RowKind(tuple(self.slots.shape[1:]), self.slots.dtype)
        return self.retention.num_rows == num_rows and found == kind

    def distrust(self) -> None:
        """Let the next session start empty: not every row that was to be kept got to its slot.

        Safe in a finalizer: it sets one attribute.
        """
        self._holds = None


def check_settings(key: FeatureKey, found: CacheSettings, wanted: CacheSettings) -> None:
    """Refuse a second loader that wants a cache otherwise.

    Raises:
        ConfigError: The settings differ.
    """
    if wanted != found:
        raise ConfigError(
            f"plan_feature: {key} is cached already, by another loader, with {found}; this one "
            f"asks for {wanted}. Loaders of one feature share its cache: give both the same "
            f"device_cache, retention and lookahead."
        )


def _nobody() -> bool:
    return False
