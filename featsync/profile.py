"""What bringing rows costs on a machine, by each transport, and which is cheapest for a feature.

The model, for ``n`` rows of ``w`` bytes that one rank has for another in one minibatch::

    seconds = message_s + gil_s + n * (row_s + byte_s * w)

and the same for rows of a process's own memory, with which the others are compared.
``gil_s`` stands apart since moving overlaps with a step, and what its Python loses does not.

``featsync calibrate`` measures all of it on a machine, for which it then holds. The shipped profile
serves whoever has not measured; it was measured on a machine of two cores, with two ranks.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from featsync.errors import ConfigError

__all__ = ["VARIABLE", "Cost", "Profile", "load_profile", "machine_name", "shipped_profile"]

VARIABLE = "FEATSYNC_PROFILE"
ANY_MACHINE = "any"


class Cost(BaseModel):
    """Constants of one transport, or of reading own memory.

    Attributes:
        message_s: Seconds a message, whatever it carries.
        gil_s: Seconds a message that it takes from the Python of trainers, of the rank that wants
            rows and of the rank that holds them together; besides ``message_s``.
        row_s: Seconds a row, whatever its width.
        byte_s: Seconds a byte.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    message_s: float = Field(ge=0)
    gil_s: float = Field(ge=0)
    row_s: float = Field(ge=0)
    byte_s: float = Field(ge=0)

    def seconds(self, num_rows: int, row_bytes: int) -> float:
        """Seconds that so many rows take in one message."""
        return self.message_s + self.gil_s + num_rows * self.row_seconds(row_bytes)

    def row_seconds(self, row_bytes: int) -> float:
        """Seconds that one more row takes in a message that is sent anyway."""
        return self.row_s + self.byte_s * row_bytes


class Profile(BaseModel):
    """Costs on one machine.

    Attributes:
        schema_version: Of this form.
        machine: Where they were measured; ``any`` for the shipped ones.
        rows: Rows of a message for which transports are compared.
        local: Costs of rows in a process's own memory, gathered into memory that is warm; one
            gather counts as one message.
        transports: Costs by name.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_version: Literal[1] = Field(alias="schema")
    machine: str
    rows: int = Field(ge=1)
    local: Cost
    transports: Mapping[str, Cost]

    @property
    def cache_costs(self) -> tuple[Cost, Cost, Cost]:
        """Of rows in own memory, in that of a rank of the same machine, and on another machine.

        What was not measured counts as no nearer than what lies behind it.
        """
        home = self.transports.get("p2p", self.local)
        return self.local, self.transports.get("shared_memory", home), home

    def cheapest(self, names: Sequence[str], row_bytes: int) -> tuple[str, str]:
        """Choose a transport for rows of a width.

        Args:
            names: Those that can be used, at least one; the first wins a tie, and costs that were
                not measured count as endless.
            row_bytes: Bytes of a row.

        Returns:
            Its name, and why.
        """
        costs = {
            name: self.transports[name].seconds(self.rows, row_bytes)
            if name in self.transports
            else float("inf")
            for name in names
        }
        best = min(names, key=lambda name: costs[name])
        found = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in costs.items())
        where = "shipped profile" if self.machine == ANY_MACHINE else "this machine's profile"
        return best, f"{self.rows:,} rows of {row_bytes} bytes take {found} by the {where}"


def shipped_profile() -> Profile:
    """Read the profile that comes with the package."""
    shipped = resources.files("featsync").joinpath("default_profile.json")
    return Profile.model_validate_json(shipped.read_text(encoding="utf-8"))


def load_profile() -> Profile:
    """Read the profile that ``FEATSYNC_PROFILE`` names, or the shipped one.

    Raises:
        ConfigError: The file is not there, is no profile, or was measured on another machine.
    """
    named = os.environ.get(VARIABLE)
    if named is None:
        return shipped_profile()
    where = f"{VARIABLE} = {named!r}"
    try:
        profile = Profile.model_validate_json(Path(named).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{where} cannot be read: {error.strerror}. Name a profile, or unset the variable."
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(
            f"{where} is no profile of this version: {place}: {first['msg']}. Measure a new one: "
            "featsync calibrate --out FILE."
        ) from error
    if profile.machine not in (ANY_MACHINE, machine_name()):
        raise ConfigError(
            f"{where} was measured on {profile.machine!r}, and this is {machine_name()!r}: its "
            "costs say nothing here. Measure on this machine (featsync calibrate --out FILE), or "
            "unset the variable."
        )
    return profile


def machine_name() -> str:
    """Name this kind of machine: processor and number of cores."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as table:  # noqa: PTH123 - a table, not a file
        for line in table:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{model}, {os.cpu_count()} cores"
