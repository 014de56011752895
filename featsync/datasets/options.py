"""Options of a dataset, as they stand in a configuration: checked, with errors that help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from featsync.errors import ConfigError, unknown_name


class Options(BaseModel):
    """Base of the option sets: unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


AnyOptions = TypeVar("AnyOptions", bound=Options)


def read_options(model: type[AnyOptions], where: str, values: object) -> AnyOptions:
    """Check the options of a dataset.

    Args:
        model: The option set.
        where: Where they stand, for messages: ``dataset.debian``.
        values: A mapping, or ``None`` for all defaults.

    Raises:
        ConfigError: A key is unknown, or a value is out of range or of the wrong type.
    """
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{where} = {values!r} is not a mapping; it takes {', '.join(model.model_fields)}."
        )
    for key in values:
        if key not in model.model_fields:
            raise unknown_name(where, key, model.model_fields)
    try:
        return model(**values)
    except ValidationError as error:
        raise _config_error(where, error.errors()[0]) from error


def _config_error(where: str, first: Mapping[str, Any]) -> ConfigError:
    place = ".".join([where, *map(str, first["loc"])])
    if first["type"] == "missing":
        return ConfigError(f"{place} is missing; add it.")
    return ConfigError(f"{place} = {first['input']!r} is wrong: {first['msg']}.")
