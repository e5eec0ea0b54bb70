"""Options: building a settings class from values in conf, with errors that a user can act on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails

from equidp.errors import EquidpError, refuse_unknown, unknown_name

Settings = TypeVar("Settings", bound=BaseModel)


def _no_truth(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")  # pydantic would take these for 1 and 0
    return value


Number = Annotated[float, BeforeValidator(_no_truth)]
"""A number where `Declared` does not check: in a list, or in a block that pydantic chooses by one of its fields."""


MARK = "FROM_CODEBOOK"
"""The mark in a drafted preset where something has to be declared."""

HUGE = 1e12
"""More than any run needs. There is a limit because a weight must stay a finite number in single precision."""

Positive = Annotated[float, Field(gt=0, le=HUGE)]
"""Bounds, factors and rates."""


def _with_inverse(delta: float) -> float:
    if delta < 1e-300:
        raise ValueError("give at least 1e-300, as 1/δ has to be a number")
    return delta


Delta = Annotated[float, Field(gt=0, lt=1), AfterValidator(_with_inverse)]
"""δ of a guarantee."""


class Declared(BaseModel):
    """A block of settings; frozen, and unknown names are refused.

    Called by its name, as in plain Python, the class refuses with an `EquidpError`. `model_validate` raises pydantic's
    `ValidationError`, which its callers turn into a sentence that says where the value is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    if not TYPE_CHECKING:  # hidden from type checkers and editors, so that they still know the settings' names

        def __init__(self, **given: Any) -> None:
            try:
                super().__init__(**given)
            except ValidationError as error:
                kind = type(self)
                refuse_unknown(f"setting of {kind.__name__}", given, kind.model_fields)
                raise not_valid(kind.__name__, error) from error

        # without this, pydantic would call `__init__` whenever it validates, also for nested blocks and model_validate
        __init__.__pydantic_base_init__ = True

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        kinds = _kinds(cls.model_fields[str(info.field_name)].annotation)
        return _no_truth(value) if bool not in kinds and kinds & {int, float} else value


def _kinds(annotation: Any) -> set[Any]:
    """Return the types that a setting may have, without what `Annotated` says about them."""
    if get_origin(annotation) in (Union, UnionType):
        return {kind for one in get_args(annotation) for kind in _kinds(one)}
    return _kinds(get_args(annotation)[0]) if get_origin(annotation) is Annotated else {annotation}


def listed(value: Any) -> Any:
    """Return a list: `sex+race` on the command line is [sex, race] in a file; a word or number is a list of itself."""
    if isinstance(value, str):
        return [part.strip() for part in value.split("+")]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else value


def values_of(value: Any) -> list[Any]:
    """As `listed`, for any value: `true` or a block becomes a list of one, and None an empty list."""
    found = listed(value)
    return list(found) if isinstance(found, list | tuple) else [] if found is None else [found]


RATIO = r"^(\d*[1-9]\d*(\.\d+)?|\d+\.\d*[1-9]\d*)x$"
"""The form of a ratio to another setting; 0 is excluded, because it would be no noise."""

Widths = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(listed)]
"""Widths of layers, `64+32` on the command line."""


NO_TEXT = frozenset({"yes", "no", "y", "n", "true", "false", "on", "off", "null", "~"})
"""Words that YAML does not read as text, unless they are in quotes."""


def refuse_idle(settings: BaseModel, names: Iterable[str], unless: str) -> None:
    """Refuse settings that differ from their defaults but change nothing; `unless` says when they would.

    Raises:
        ValueError: for such a setting, to be reported by its class.
    """
    for name in names:
        if getattr(settings, name) != type(settings).model_fields[name].default:
            raise ValueError(f"{name} has no effect unless {unless}")


def checked_options(settings: type[Settings], given: Mapping[str, Any], kind: str) -> Settings:
    """Build settings from names and values as they are in conf.

    `kind` is the word for one setting in an error, such as `data option of dataset 'adult'`.

    Raises:
        EquidpError: an unknown name or a value that is not allowed.
    """
    refuse_unknown(kind, given, settings.model_fields)
    try:
        return settings.model_validate(dict(given))
    except ValidationError as error:
        first, why = refusal_of(error)
        place = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":  # an unknown name in a block below the top
            *above, name = first["loc"]
            below = f"{kind}, below {'.'.join(map(str, above))},"
            raise unknown_name(below, name, _names_at(settings, above)) from error
        one = f"{'An' if kind[0] in 'aeiou' else 'A'} {kind}"
        named, given_here = (f"The {kind} {place!r}", f" (given: {first['input']!r})") if place else (one, "")
        raise EquidpError(f"{named} is not valid: {why}{given_here}.") from error


def _names_at(kind: type[BaseModel], place: Sequence[str | int]) -> set[str]:
    """Return the names of the settings at a place inside a settings class."""
    kinds = [kind]
    for part in place:
        fields = (one.model_fields.get(str(part)) for one in kinds)
        below = [found for field in fields if field for found in _kinds_in(field.annotation)]
        kinds = below or kinds  # without `below`, the part is a user's name, a position in a list, or a kind's tag
    return {name for one in kinds for name in one.model_fields}


def _kinds_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _kinds_in(part)]


def not_valid(place: str, error: ValidationError, *, below: int = 1) -> EquidpError:
    """Build the error for a value that pydantic refuses, named by its place and at most `below` names below that."""
    first, why = refusal_of(error)
    where = ".".join([place, *map(str, first["loc"][:below])])
    given = f"={first['input']!r}" if first["loc"] else ""
    return EquidpError(f"{where}{given} is not valid: {why}.")


def refusal_of(error: ValidationError) -> tuple[ErrorDetails, str]:
    """Return pydantic's first objection to the values, and the reason in a user's words.

    If a value may be of several kinds, pydantic has an objection for each kind; the reason has all of them.
    """
    first, *others = error.errors()
    alike = [one for one in others if first["loc"] and one["loc"][:1] == first["loc"][:1]]
    if first["type"] == "greater_than":
        alike = [one for one in alike if one["type"] != "string_type"]  # quotes would not make the number larger
    # several settings may hold the same small number, so the same reason is given once
    reasons = dict.fromkeys(_reason(one) for one in (first, *(one for one in alike if one["input"] is first["input"])))
    return first, ", or ".join(reasons).replace(", or Input should be ", ", or ")


def _reason(error: ErrorDetails) -> str:
    match error["type"]:
        case "union_tag_not_found":
            return f"it needs the key {error['ctx']['discriminator']}, which says what it is"
        case "union_tag_invalid":
            kinds = [name.strip("'") for name in error["ctx"]["expected_tags"].split(", ")]
            refused = unknown_name(error["ctx"]["discriminator"].strip("'"), error["ctx"]["tag"], kinds).message
            return refused.rstrip(".")
        case "model_attributes_type" | "model_type" | "dict_type" | "mapping_type":
            return "Input should have settings below it, such as name: {...}"
        case "string_type" if isinstance(error["input"], bool | int | float):
            # a bare word is a common name of a class or category
            bare = "true or yes" if error["input"] is True else "no, off or false"
            why = f" (a bare {bare} is no text in YAML)" if isinstance(error["input"], bool) else ""
            return f"{error['msg']}{why}; put it in quotes"
        case "tuple_type" | "list_type":
            words = re.split(r"[\s,+]+", error["input"].strip()) if isinstance(error["input"], str) else ["a", "b"]
            shown = (f'"{word}"' if word.lower() in NO_TEXT else word for word in words)
            return f"Input should be a list, such as [{', '.join(shown)}]"
        case "extra_forbidden":
            return "there is no such setting"
        case "string_pattern_mismatch" if error["ctx"]["pattern"] == RATIO:
            return "a ratio such as 10x"
        case _:
            return error["msg"].removeprefix("Value error, ").removesuffix(".")  # the caller ends the sentence


def as_typed(value: Any) -> str:
    """A value as it is written in `--params`: `true`, `null`, and a list as `16+8`."""
    if isinstance(value, list | tuple):
        return "+".join(map(as_typed, value))
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def dotted(settings: Mapping[str, Any], prefix: str = "", *, empty: bool = False) -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; an empty block is left out, or with `empty` kept as `{"a": {}}`."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        block = isinstance(value, Mapping) and (value or not empty)
        found |= dotted(value, f"{name}.", empty=empty) if block else {name: value}
    return found
