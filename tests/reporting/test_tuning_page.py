"""The page of a tuning tells what was declared and chosen, and of the other trials nothing, unless research asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from equidp.data.sources import source
from equidp.parameters import resolve
from equidp.pipelines.tune import nodes

GRID = {"grid": {"training": {"learning_rate": [0.125, 1.5]}}}


def page(folder: Path, *, exact: bool) -> tuple[str, dict[str, Any]]:
    law = {} if exact else {"trials_law": "poisson", "trials_mean": 2}
    given = resolve(
        {
            "dataset": "digits",
            "algorithm": "dpsgd",
            "model": {"name": "logistic"},
            "privacy": {"noise_multiplier": 2.0, "delta": 1e-5, "evaluation": {"epsilon": 1.0}} | law,
            "training": {"epochs": 1, "batch_size": 256, "device": "cpu"},
            "tune": GRID | {"exact": exact},
        }
    )
    kind = source("digits", {})
    records = kind.records(kind.locate(folder))
    algorithms = {"dpsgd": given.algorithm("dpsgd")}
    _, privacy, choice, released, trials = nodes.choose_model(records, folder, given, algorithms, folder, {})
    told: dict[str, Any] = {"dataset": "digits", "files": [], "remarks": [], "raw_fingerprint": "embedded"}
    return nodes.write_page(choice, privacy, released, trials, told, given), choice


def test_a_private_choice(tmp_path: Path) -> None:
    text, choice = page(tmp_path, exact=False)
    for told in (
        "Declared before the first trial", "0.125, 1.5", "the Poisson law, drawn again while it is 0, mean 2",
        f"{choice['value']:.4f}", "of the validation part, with noise", "Nothing of the other trials is told",
        str(choice["chosen"]["training.learning_rate"]), "How the settings were chosen", "Released figures", "Person C",
    ):  # fmt: skip
        assert told in text
    assert "nonprivate" not in text[text.index("<main>") : text.index('id="privacy"')]


def test_a_choice_without_privacy_says_so_first(tmp_path: Path) -> None:
    text, _ = page(tmp_path, exact=True)
    assert "Settings were chosen without privacy (tune.exact)" in text
    assert "nonprivate/trials" in text
    assert "every combination once" in text
    assert "with noise" not in text[text.index('id="choice"') : text.index('id="trials"')]


@pytest.mark.parametrize("diagnostics", [True, False])
def test_other_trials_leave_only_among_diagnostics(diagnostics: bool) -> None:
    given = resolve({"dataset": "digits", "privacy": {"epsilon": 1.0}, "training": {"diagnostics": diagnostics}})
    points = type("Tuning", (), {"points": [type("Point", (), {"changes": {"a": 1}})]})
    found = nodes._every_trial(points, [0], [0.5], given)  # type: ignore[arg-type]
    assert found == ({"trials": [{"settings": {"a": 1}, "score": 0.5}]} if diagnostics else {})
