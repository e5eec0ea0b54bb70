"""Options: building a settings class from what stands in conf, with errors a user can act on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from equidp.errors import EquidpError, unknown_name

Settings = TypeVar("Settings", bound=BaseModel)


def checked_options(settings: type[Settings], given: Mapping[str, Any], kind: str) -> Settings:
    """Build settings from a mapping.

    Args:
        settings: the settings class.
        given: names and values as they stand in conf.
        kind: what one of them is called in an error, such as `data option of dataset 'adult'`.

    Raises:
        EquidpError: an unknown name or a value that is not allowed.
    """
    for name in given:
        if name not in settings.model_fields:
            raise unknown_name(kind, name, settings.model_fields)
    try:
        return settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        named, given_here = (f"The {kind} {place!r}", f" (given: {first['input']!r})") if place else (f"A {kind}", "")
        # YAML takes a bare 0 for a number and a bare no for false, which are common names of classes and categories
        bare = first["type"] == "string_type" and isinstance(first["input"], bool | int | float)
        reason = first["msg"].removeprefix("Value error, ") + given_here + ("; put it in quotes" if bare else "")
        raise EquidpError(f"{named} is not valid: {reason}.") from error
