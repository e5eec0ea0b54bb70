"""Options: settings from conf, with errors that name what was given."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, model_validator

from equidp.errors import EquidpError
from equidp.options import checked_options


class Settings(BaseModel):
    size: int = 3
    names: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _named(self) -> Settings:
        if self.size > len(self.names) + 10:
            raise ValueError("too large")
        return self


def test_values_and_defaults_are_filled_in() -> None:
    assert checked_options(Settings, {"names": ["a"]}, "option").model_dump() == {"size": 3, "names": ("a",)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sise": 1}, r"Unknown option 'sise'\. Did you mean 'size'"),
        ({"size": "many"}, r"The option 'size' is not valid: .*\(given: 'many'\)"),
        ({"names": [1]}, r"The option 'names\.0' is not valid: .*put it in quotes\.$"),
        ({"size": 99}, r"An? option is not valid: too large\.$"),
    ],
)
def test_what_is_wrong_is_named(given: dict, message: str) -> None:
    with pytest.raises(EquidpError, match=message):
        checked_options(Settings, given, "option")
