"""Options: settings from conf, with errors that name what was given."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError, model_validator

from equidp.errors import EquidpError
from equidp.options import RATIO, Declared, Widths, checked_options


class Round(BaseModel):
    kind: Literal["round"]


class Square(BaseModel):
    kind: Literal["square"]


class Settings(BaseModel):
    size: int = 3
    rate: float | Literal["half"] | Annotated[str, Field(pattern=RATIO)] = 1.0
    widths: Widths = ()
    shape: Annotated[Round | Square, Field(discriminator="kind")] | None = None
    names: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _named(self) -> Settings:
        if self.size > len(self.names) + 10:
            raise ValueError("give less." if self.size == 98 else "too large")
        return self


def test_values_and_defaults_are_filled_in() -> None:
    assert checked_options(Settings, {"names": ["a"]}, "option").names == ("a",)
    assert checked_options(Settings, {}, "option").size == 3


@pytest.mark.parametrize("given", ["64+32", "64 + 32", [64, 32], (64, 32)])
def test_lists_may_be_typed_on_one_line(given: Any) -> None:
    assert checked_options(Settings, {"widths": given}, "option").widths == (64, 32)
    assert checked_options(Settings, {"widths": 64}, "option").widths == (64,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sise": 1}, r"Unknown option 'sise'\. Did you mean 'size'"),
        ({"size": "many"}, r"The option 'size' is not valid: .*\(given: 'many'\)"),
        ({"names": [1, 1, 1]}, r"is not valid: Input should be a valid string; put it in quotes \(given: 1\)\.$"),
        ({"names": [1]}, r"The option 'names\.0' is not valid: .*; put it in quotes \(given: 1\)\.$"),
        ({"rate": "much"}, r"valid number, .*, or 'half', or a ratio such as 10x \(given: 'much'\)\.$"),
        ({"widths": "64+x"}, r"'widths\.1' is not valid: .*\(given: 'x'\)\.$"),
        ({"shape": {}}, r"'shape' is not valid: it needs the key 'kind', which says what it is \(given: {}\)\.$"),
        ({"shape": "round"}, r"'shape' is not valid: Input should have settings below it, .*\(given: 'round'\)\.$"),
        ({"size": 99}, r"An? option is not valid: too large\.$"),
        ({"size": 98}, r"An? option is not valid: give less\.$"),
        ({"names": "No+Yes"}, r"list, such as \[\"No\", \"Yes\"\] \(given: 'No\+Yes'\)\.$"),
        ({"names": "low, high"}, r"list, such as \[low, high\] \(given"),
    ],
)
def test_what_is_wrong_is_named(given: dict, message: str) -> None:
    with pytest.raises(EquidpError, match=message):
        checked_options(Settings, given, "option")


class Leaf(Declared):
    edges: tuple[float, ...] = ()


class Branch(Declared):
    leaf: Leaf | None = None
    height: float = 1.0


class Tree(Declared):
    branches: dict[str, Branch] = Field(default_factory=dict)
    leaves: tuple[Annotated[Leaf, Field()], ...] = ()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"branches": {"a.b": {"leaf": {"edgs": [1]}}}},
            "below branches.a.b.leaf, 'edgs'. Did you mean 'edges'",
        ),
        (
            {"branches": {"height": {"hight": 1}}},
            "below branches.height, 'hight'. Did you mean 'height'?",
        ),
        ({"leaves": [{}, {"colour": 1}]}, "option, below leaves.1, 'colour'. Valid: edges."),
    ],
)
def test_a_misspelt_name_below_others_is_refused_with_the_nearest_one(given: dict, message: str) -> None:
    with pytest.raises(EquidpError, match=re.escape(message)):
        checked_options(Tree, given, "option")


def test_true_is_no_number_where_a_number_is_meant() -> None:
    class Given(Declared):
        size: int = 3
        rate: float | Literal["half"] | None = None
        flag: bool = False
        either: bool | int = 0

    for name in ("size", "rate"):
        with pytest.raises(EquidpError, match=rf"'{name}' is not valid: true and false are not numbers \(given"):
            checked_options(Given, {name: True}, "option")
    assert checked_options(Given, {"flag": True, "either": True}, "option") == Given(flag=True, either=True)


def test_called_by_its_name_a_block_refuses_in_a_sentence() -> None:
    class Size(Declared):
        size: Annotated[int, Field(gt=0)] = 3
        shape: Literal["round", "square"] = "round"

    class Things(Declared):
        things: tuple[Size, ...] = ()

    with pytest.raises(EquidpError, match=r"^Unknown setting of Size 'sizes'\. Did you mean 'size'\? Valid: "):
        Size(sizes=4)  # type: ignore[call-arg]
    with pytest.raises(EquidpError, match=r"^Size\.size=-1 is not valid: Input should be greater than 0\.$"):
        Size(size=-1)
    # where it stands within others these say where, and so does what reads conf
    with pytest.raises(EquidpError, match=r"^Things\.things=-1 is not valid: Input should be greater than 0\.$"):
        Things(things=({"size": -1},))  # type: ignore[arg-type]
    with pytest.raises(ValidationError):
        Size.model_validate({"size": -1})
