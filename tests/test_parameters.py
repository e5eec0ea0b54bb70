"""Settings are one frozen object, and what they say is built once."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
from pydantic import ValidationError

import equidp
from equidp.algorithms import ALGORITHMS
from equidp.errors import EquidpError
from equidp.parameters import TOP_LEVEL, OperationSettings, TrainingSettings, check_names, resolve

GIVEN = {"dataset": "digits", "privacy": {"epsilon": 3.0}, "training": {"epochs": 3, "checkpoint_every": 2}}


def test_settings_are_frozen() -> None:
    settings = resolve(GIVEN)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.seed = 1  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        settings.training.epochs = 4


@pytest.mark.parametrize("place", ["privacy", "privacy.evaluation"])
def test_a_delta_without_an_inverse_is_refused_before_a_run_trains_for_it(place: str) -> None:
    """Its trade-off curve would end the run once the model is trained and charged."""
    block: dict[str, object] = {"delta": 1e-320}
    privacy = {"epsilon": 3.0} | (block if place == "privacy" else {"evaluation": block | {"epsilon": 1.0}})
    with pytest.raises(EquidpError, match=rf"{place}.delta=1e-320: .*at least 1e-300"):
        resolve(GIVEN | {"privacy": privacy})
    assert resolve(GIVEN | {"privacy": {"epsilon": 3.0, "delta": 1e-300}}).privacy.delta == 1e-300


def test_what_changes_no_release_is_apart_and_a_user_finds_it_below_training() -> None:
    settings = resolve(GIVEN)
    assert (settings.training.epochs, settings.operation.checkpoint_every) == (3, 2)
    assert not TrainingSettings.model_fields.keys() & OperationSettings.model_fields.keys()
    told = settings.to_dict()["training"]
    assert told.keys() == TrainingSettings.model_fields.keys() | OperationSettings.model_fields.keys()


def test_plain_values_resolve_to_the_settings_that_they_are_of() -> None:
    settings = resolve(GIVEN | {"algorithm": "dpis", "dpsgd": {"options": {"clip_norm": 2}}})
    told = settings.to_dict()
    audited = told.pop("audited")
    told["custom"] = told["custom"]["options"]  # its settings stand below its name
    again = resolve(told | {"algorithm": audited["algorithm"]})
    assert again == settings
    assert again.algorithm("dpsgd").initial["clip_norm"] == 2.0


def test_names_with_dots_are_for_the_command_line_alone() -> None:
    """A notebook's runtime_params, and requests to `kedro server`: 'Did you mean training?' helped nobody."""
    with pytest.raises(EquidpError, match=r"only --params takes names with dots.*: training: \{epochs: …"):
        check_names(["training.epochs"], TOP_LEVEL)


def test_an_optimiser_that_is_asked_for_is_not_passed_over_for_the_algorithms_own() -> None:
    alone, asked = resolve(GIVEN), resolve(GIVEN | {"training": {"optimizer": "sgd"}})
    own = alone.algorithm("dp_adambc")
    assert own.optimizer_beside(alone.training.descent) is own.optimizer
    with pytest.raises(EquidpError, match=r"dp_adambc brings its own optimiser, and training.optimizer=sgd.*leave it"):
        own.optimizer_beside(asked.training.descent)
    assert asked.algorithm("psasc_momentum").optimizer_beside(asked.training.descent)  # sgd is its own


def test_an_algorithm_is_built_once() -> None:
    settings = resolve(GIVEN)
    for name in ALGORITHMS:
        assert settings.algorithm(name) is settings.algorithm(name)
        assert settings.algorithm(name).name == name


def test_algorithms_are_built_by_the_settings_where_a_rank_begins_for_a_loop_of_ones_own_and_for_a_rate_only() -> None:
    root = Path(equidp.__file__).parent
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    built = {name for name, path in files.items() if not name.startswith("algorithms/") and _builds(path)}
    assert built == {"parameters/resolved.py", "training/request.py", "training/private.py", "starting_rate.py"}


def _builds(path: Path) -> bool:
    """Whether a file calls `build()` of something that it calls an algorithm."""
    calls = (node.func for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call))
    return any(
        isinstance(call, ast.Attribute) and call.attr == "build" and "algorithm" in ast.unparse(call.value)
        for call in calls
    )
