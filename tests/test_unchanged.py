"""benchmarks/unchanged.py in small: two algorithms, the same code twice, and then digits that are not the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import unchanged

from equidp.algorithms import ALGORITHMS

ONLY = ["--only", "dpsgd/linear", "sgd/linear"]


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory, coarse: None) -> Path:
    """What the two runs came to."""
    path = tmp_path_factory.mktemp("unchanged") / "before.json"
    assert unchanged.main(["--write", str(path), *ONLY]) == 0
    return path


@pytest.mark.slow
def test_the_same_code_changes_no_digit(before: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert unchanged.main(["--against", str(before), *ONLY]) == 0
    assert capsys.readouterr().out == "2 cases, no digit changed\n"


@pytest.mark.slow
def test_a_noise_that_differs_in_its_seventh_digit_is_told(
    before: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unchanged, "NOISE", unchanged.NOISE * (1 + 1e-6))
    assert unchanged.main(["--against", str(before), *ONLY]) == 1
    told = capsys.readouterr().out.splitlines()
    assert all(line.startswith("dpsgd/linear: ") and line.endswith(".") for line in told), "sgd has no noise"
    changed = {line.split()[1] for line in told}
    assert {"epsilon", "epsilon_rdp", "epsilon_pld", "epsilon_published", "ledger", "parameters"} <= changed
    assert {"released_weights", "scores", "state/model", "history/epsilon"} <= changed
    assert not {"noise_multiplier/sound", "steps", "state/random"} & changed


@pytest.mark.slow
def test_every_kept_digit_counts(before: Path) -> None:
    kept = unchanged.read(before)
    for name, case in kept.items():
        for key, value in case.items():
            other = {**kept, name: {**case, key: value[:-1] + "?"}}
            (sentence,) = unchanged.differences(other, kept)
            assert sentence.startswith(f"{name}: {key} was ")


@pytest.mark.slow
def test_a_case_that_is_missing_is_a_difference(before: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(before.read_text())
    del content["cases"]["sgd/linear"]
    other = before.with_name("other.json")
    other.write_text(json.dumps(content))
    assert unchanged.main(["--against", str(other), *ONLY]) == 1
    assert capsys.readouterr().out == "The case sgd/linear is only in this run.\n"


def test_every_registered_algorithm_has_a_case() -> None:
    assert {case.algorithm for case in unchanged.cases().values()} == set(ALGORITHMS)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ("[]", "no file of the format"),
        ('{"format": "equidp unchanged 1", "libraries": {"torch": "0.1"}}', r"torch 0.1 \(now "),
    ],
)
def test_a_file_of_another_kind_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, words: str
) -> None:
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    assert unchanged.main(["--against", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"--against {path}: ")
    assert re.search(words, told)


@pytest.mark.slow
def test_a_case_that_does_not_exist_is_refused_with_the_nearest_one(
    before: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unchanged.main(["--against", str(before), "--only", "dpsgd/linaer"]) == 2
    assert "Unknown case 'dpsgd/linaer'. Did you mean 'dpsgd/linear'?" in capsys.readouterr().err
