"""What is measured: settings, and what was found for each.

A *way* is how rows come: a transport by its name, or ``local``, out of the rank's own memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["LOCAL", "ROWS", "WIDTHS", "Measured", "Sample", "Setting", "Tax", "settings"]

LOCAL = "local"
ROWS = (1_000, 10_000, 50_000)
WIDTHS = (4, 16, 64, 256, 1024, 4096)
_MOST_BYTES = 1 << 26  # that a rank gets at once; more rows of that width say nothing new


@dataclass(frozen=True)
class Setting:
    """What a message carries.

    Attributes:
        rows: Its rows.
        row_bytes: Bytes of each.
    """

    rows: int
    row_bytes: int


@dataclass(frozen=True)
class Sample:
    """What one message took in one setting: the median of all repetitions on all ranks.

    Attributes:
        way: How the rows came.
        setting: What it carried.
        seconds: From saying which rows are wanted until they are in place, by the number of
            messages, where the rows of several ranks were wanted at once.
    """

    way: str
    setting: Setting
    seconds: float


@dataclass(frozen=True)
class Tax:
    """What one message takes from Python that runs on a rank's main thread meanwhile.

    Attributes:
        way: How the rows came.
        fetching_s: Seconds lost by the rank that wants the rows.
        serving_s: Seconds lost by the rank that holds them.
    """

    way: str
    fetching_s: float
    serving_s: float

    @property
    def gil_s(self) -> float:
        """What both lose."""
        return self.fetching_s + self.serving_s


@dataclass(frozen=True)
class Measured:
    """All that was measured with some number of ranks.

    Attributes:
        ranks: How many.
        samples: One for each way and setting.
        taxes: One for each way.
        unreached: Transports that cannot bring rows between these ranks.
    """

    ranks: int
    samples: Sequence[Sample]
    taxes: Sequence[Tax]
    unreached: Sequence[str] = ()

    @property
    def ways(self) -> list[str]:
        """The transports that were measured, and ``local``."""
        return [tax.way for tax in self.taxes]

    @property
    def settings(self) -> list[Setting]:
        """What messages carried."""
        return list(dict.fromkeys(sample.setting for sample in self.samples))

    def samples_of(self, way: str) -> list[Sample]:
        """The samples of one way."""
        return [sample for sample in self.samples if sample.way == way]

    def tax_of(self, way: str) -> Tax:
        """The tax of one way."""
        return next(tax for tax in self.taxes if tax.way == way)


def settings(num_ranks: int) -> list[Setting]:
    """Rows and widths to measure between so many ranks, the largest message last."""
    found = [Setting(rows, row_bytes) for rows in ROWS for row_bytes in WIDTHS]
    most = _MOST_BYTES // (num_ranks - 1)
    fitting = [one for one in found if one.rows * one.row_bytes <= most]
    return sorted(fitting, key=lambda one: one.rows * one.row_bytes)
