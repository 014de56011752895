"""A GraphBolt feature whose rows lie in memory that is not this process's own to change."""

from __future__ import annotations

from typing import Any

import torch

from featsync._graphbolt import gb
from featsync.errors import ConfigError
from featsync.segment import Segment


class FixedFeature(gb.Feature):  # type: ignore[misc]  # DGL has no types
    """Rows in shared memory, or mapped from a file for reading.

    Args:
        tensor: The table, ``(num_rows, *row_shape)``.
        why_fixed: Why it cannot be updated, and what to do instead; for the error.
        segment: The shared memory that it lies in, if any.
        metadata: What is known about the feature besides its rows.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        why_fixed: str,
        segment: Segment | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.featsync_tensor = tensor
        self.segment = segment
        self._why_fixed = why_fixed
        self._metadata = metadata or {}

    def read(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Read rows, or give the whole table, which copies nothing."""
        if ids is None:
            return self.featsync_tensor
        return torch.index_select(self.featsync_tensor, 0, ids)

    def size(self) -> torch.Size:
        """Shape of one row."""
        return self.featsync_tensor.shape[1:]

    def count(self) -> int:
        """Rows of the table."""
        return len(self.featsync_tensor)

    def update(self, value: torch.Tensor, ids: torch.Tensor | None = None) -> None:
        """Refuse.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"this feature cannot be updated: {self._why_fixed}")

    def metadata(self) -> dict[str, Any]:
        """What is known about the feature besides its rows."""
        return self._metadata
