"""What a sweep runs: a grid is the product of its axes, and every point of it is one cell.

demo:
  algorithms: [dpsgd, dpsgd_f]         # the four axes that nearly every sweep has
  datasets: [digits]
  epsilons: [1, 3]
  seeds: 4                             # 0, 1, 2, 3; or a list of seeds
  reference: dpsgd                     # what the others are compared with, by seed; dpsgd anyway where there is one
  params:                              # any other setting: one value is fixed, a list is one more axis
    training.epochs: 30
    dpsgd.options.clip_norm: [0.5, 1]
  grids:                               # parts that differ: each inherits what stands above, and their union is run
    - {algorithms: [sad_dpsgd], params: {training.epochs: 50}}
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from equidp.errors import EquidpError, refuse_unknown, unknown_name
from equidp.options import Declared, as_typed, dotted, refusal_of
from equidp.typed import keep_as_typed

KEYS = {"algorithm": "algorithms", "dataset": "datasets", "privacy.epsilon": "epsilons", "seed": "seeds"}
"""Settings that have a key of their own, and must not be given twice."""

LISTS = "A list has no place there: name it as an axis of a grid, or put it into a preset, in conf/local."


MOST_SEEDS = 10_000
"""A larger number is probably meant as one seed, such as a date."""


def as_list(value: Any) -> Any:
    """`a,b` or a single value as a list."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if value is None or value in ([], ()):
        raise ValueError("give at least one value, or leave it out")
    return value if isinstance(value, (list, tuple)) else [value]


def as_seeds(value: Any) -> Any:
    """`5` are the seeds 0 to 4; `3,7` or `[3, 7]` are those two."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if value > MOST_SEEDS:
            raise ValueError(
                f"a number says how many seeds, at most {MOST_SEEDS:,}; the seed {value} alone is [{value}], and after "
                f"--seeds it is {value} with a comma behind it"
            )
        value = list(range(value))
    seeds = as_list(value) if value != [] else []
    if not seeds or any(isinstance(seed, bool) for seed in seeds):
        raise ValueError("give how many seeds, from 1 up, or a list of seeds")
    return seeds


class Grid(Declared):
    """One grid, or a union of grids."""

    model_config = ConfigDict(allow_inf_nan=False)

    about: str = ""
    """What the grid shows."""
    takes: str = ""
    """How long the grid takes, and on which machine."""
    expect: str = ""
    """The number to expect."""
    algorithms: Annotated[tuple[str, ...], BeforeValidator(as_list)] = ()
    datasets: Annotated[tuple[str, ...], BeforeValidator(as_list)] = ()
    epsilons: Annotated[tuple[Annotated[float, Field(gt=0)], ...], BeforeValidator(as_list)] = ()
    """Targets; without any, each dataset's preset decides."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(as_seeds)] = ()
    reference: str = ""
    """The algorithm that the private runs are compared with; stands above all parts."""
    params: Mapping[str, Any] = {}
    """Any setting by its dotted name; a list is an axis."""
    grids: tuple[Mapping[str, Any], ...] = ()

    def parts(self) -> Iterator[Grid]:
        """Yield the plain grids whose union this grid is."""
        if not self.grids:
            yield self
        above = self.model_dump(exclude={"grids", "reference"}, exclude_unset=True)
        for part in self.grids:
            if "reference" in part:
                raise EquidpError(
                    f"Sweep setting reference={part['reference']!r} stands in a part: give it above the parts."
                )
            merged = {**above, **part, "params": {**self.params, **part.get("params", {})}}
            yield from grid_from(merged).parts()

    def points(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Algorithm and settings of every point, seeds innermost. Raises EquidpError where no algorithm is named."""
        for part in self.parts():
            if not part.algorithms:
                raise EquidpError("The sweep names no algorithm: give --algorithms=dpsgd,dpsgd_f or a named grid.")
            yield from part._product()

    def _product(self) -> Iterator[tuple[str, dict[str, Any]]]:
        listed = {name: value for name, value in self.params.items() if isinstance(value, (list, tuple))}
        fixed = {name: value for name, value in self.params.items() if name not in listed}
        axes: dict[str, Iterable[Any]] = {"dataset": self.datasets, "privacy.epsilon": self.epsilons, **listed}
        axes = {name: values for name, values in axes.items() if values}
        for values in itertools.product(*axes.values(), self.algorithms, self.seeds or (0,)):
            *chosen, algorithm, seed = values
            yield algorithm, {**fixed, **dict(zip(axes, chosen, strict=True)), "seed": seed}


def grid_from(settings: Mapping[str, Any]) -> Grid:
    """Validate a grid. Raises EquidpError for an unknown key (naming the nearest) or a value of the wrong kind."""
    refuse_unknown("key of a sweep", settings, Grid.model_fields)
    try:
        grid = Grid.model_validate(settings)
    except ValidationError as error:
        first, why = refusal_of(error)
        where = ".".join(map(str, first["loc"]))
        raise EquidpError(f"Sweep setting {where}={first['input']!r}: {why}.") from error
    for name, value in grid.params.items():
        _refuse_param(name, value, grid)
    return grid


def _refuse_param(name: str, value: Any, grid: Grid) -> None:
    """Refuse a setting that would be dropped silently: one that has an axis of its own, or an axis without values."""
    if isinstance(value, (list, tuple)) and not value:
        raise EquidpError(f"Sweep setting {name}=[]: give at least one value, or leave it out.")
    if name == "privacy.epsilon" and value is None and not grid.epsilons:  # no target: the noise is given
        return
    if name == "run_label":
        raise EquidpError(f"run_label={_text(name, value)}: a sweep labels each cell itself; leave it out.")
    if name in KEYS:
        raise EquidpError(
            f"{name}={_text(name, value)} cannot be set in params: give --{KEYS[name]}, or {KEYS[name]} in a file."
        )


CHOSEN = ("algorithms", "datasets")
"""Axes that belong together in a part of a sweep."""


def choose_grid(grids: Mapping[str, Any], name: str | None, given: Mapping[str, Any]) -> Grid:
    """Return the named grid, with values of the command line in place of the grid's own.

    In a sweep with parts, however, given algorithms and datasets choose among those of each part. If they replaced
    these, they would make runs that no part has, such as an algorithm on the preset of another algorithm.

    Raises:
        EquidpError: for a name that is not in the configuration or in no part of the sweep, or whose value is not a
            mapping.
    """
    if name is not None and name not in grids:
        raise unknown_name("sweep", name, grids)
    axes = {key: value for key, value in given.items() if key not in ("params", "reference") and value is not None}
    base, where = {} if name is None else grids[name], f"sweep {name!r}"
    kept = (
        {key: axes.pop(key) for key in CHOSEN if key in axes} if isinstance(base, Mapping) and "grids" in base else {}
    )
    grid = grid_from(_over(base, axes, given.get("params") or {}, where))
    if (reference := given.get("reference")) is not None:  # of the whole sweep: no part has its own
        grid = grid.model_copy(update={"reference": reference})
    return _kept(grid, grid_from(kept).model_dump(exclude_unset=True), where) if kept else grid


def _kept(grid: Grid, wanted: Mapping[str, Sequence[str]], where: str) -> Grid:
    """Return a grid of the parts that have wanted names, and only these of them. A part that has no names takes all."""
    parts, left = list(grid.parts()), []
    for key, names in wanted.items():
        there = dict.fromkeys(name for part in parts for name in getattr(part, key))
        if there and (absent := [name for name in names if name not in there]):
            one = f"{key.removesuffix('s')} {absent[0]!r}"
            raise EquidpError(f"No part of {where} has the {one}; they have {', '.join(there)}.")
    for part in parts:
        own = {key: [name for name in names if name in (getattr(part, key) or names)] for key, names in wanted.items()}
        if all(own.values()):
            left.append({**part.model_dump(exclude_unset=True), **own})
    if not left:
        raise EquidpError(
            f"No part of {where} has all of that: `--dry-run` without it prints the cells that there are."
        )
    return grid.model_copy(update={"grids": tuple(left)})


def _over(part: Any, axes: Mapping[str, Any], params: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a part of a sweep and the parts below it, with the command line's values in all of them."""
    part = _of_kind(Mapping, part, where, "keys such as algorithms and seeds")
    own = _of_kind(Mapping, part.get("params", {}), f"params of {where}", "settings by their dotted names")
    below = _of_kind(list, part.get("grids", []), f"grids of {where}", "a list of parts")
    inner = [_over(one, axes, params, f"part {i + 1} of {where}") for i, one in enumerate(below)]
    return {**part, **axes, "params": {**own, **params}, "grids": inner}


def _of_kind(kind: type, value: Any, where: str, what: str) -> Any:
    if not isinstance(value, kind):
        raise EquidpError(f"{where[0].upper()}{where[1:]}: give {what}, not {value!r}.")
    return value


def params_text(settings: Mapping[str, Any]) -> str:
    """Settings as the text that follows `--params=`. Raises EquidpError for a value that cannot be written there."""
    return ",".join(f"{name}={_written(name, value)}" for name, value in settings.items())


def _written(name: str, value: Any) -> str:
    """Return a value as `nested` reads it. A text that YAML would read as something else is put in quotes."""
    text = _text(name, value)
    if not isinstance(value, str) or list(dotted(nested(f"{name}={text}")).values()) == [value]:
        return text
    return json.dumps(text, ensure_ascii=False)


def _text(name: str, value: Any) -> str:
    text, parts = as_typed(value), value if isinstance(value, (list, tuple)) else [value]
    if "," in text or any(isinstance(part, Mapping) for part in parts):
        raise EquidpError(
            f"{name}={value!r} cannot be a setting of a sweep, as --params has no way to write it: "
            f"put it into a preset in conf/local."
        )
    return text


def nested(text: str) -> dict[str, Any]:
    """Return the nested settings that Kedro makes of the text after `--params=`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if "=" not in part:
            raise EquidpError(f"--params={part!r}: write it as setting=value. {LISTS}")
    try:
        made: dict[str, Any] = OmegaConf.to_container(OmegaConf.from_dotlist(parts))  # type: ignore[assignment]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise EquidpError(f"--params={text!r} does not read as settings. {LISTS}") from error
    split = (part.partition("=") for part in parts)
    keep_as_typed({name.strip(): value.strip() for name, _, value in split}, made)
    return made
