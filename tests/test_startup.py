"""What a command imports before it refuses a name: nothing that takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from equidp.algorithms import ALGORITHMS
from equidp.algorithms.settings import AlgorithmSettings
from equidp.parameters.declared import declared
from equidp.registry import Registry

COMMAND = """
import sys
from kedro.framework.cli import main

sys.argv = ["kedro", *sys.argv[1:]]
try:
    main()
finally:
    print(*(name for name in ("torch", "mlflow", "pandas", "scipy", "sklearn") if name in sys.modules))
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--pipelines=dpsdg"], "Unknown pipeline 'dpsdg'. Did you mean 'dpsgd'?"),
        (["run", "--params=trainig.epochs=3"], "Unknown setting 'trainig'. Did you mean 'training'?"),
        (["run", "--params=training.epoch=3"], "Unknown setting 'training.epoch'. Did you mean 'training.epochs'?"),
        (
            ["run", "--params=dpsgd_f.options.max_clip_nrom=3"],
            "Unknown setting of dpsgd_f.options 'max_clip_nrom'. Did you mean 'max_clip_norm'?",
        ),
        (
            ["run", "--params=max_clip_norm=3"],
            "Unknown setting 'max_clip_norm'. Did you mean '<algorithm>.options.max_clip_norm'?",
        ),
        (["run", "--params=report.fonts=3"], "Unknown setting 'report.fonts'."),
        (["run", "--params=dataset=digit"], "Unknown dataset 'digit'. Did you mean 'digits'?"),
        (["run", "--params=algorithm=dpsdg", "--pipelines=audit"], "Unknown algorithm 'dpsdg'. Did you mean 'dpsgd'?"),
    ],
)
def test_a_mistyped_name_is_refused_before_what_takes_seconds_to_import(
    project: Path, arguments: list[str], words: str
) -> None:
    done = subprocess.run([sys.executable, "-c", COMMAND, *arguments], capture_output=True, text=True, cwd=project)
    assert words in done.stderr
    assert done.returncode == 1
    assert done.stdout.split() == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithms_file_tells_the_settings_that_its_class_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ALGORITHMS[name]
    fresh: Registry[type[AlgorithmSettings]] = Registry(
        "equidp.algorithms", {name: f"{kind.__module__.rpartition('.')[2]}:{kind.__qualname__}"}
    )
    monkeypatch.setattr("equidp.parameters.declared.ALGORITHMS", fresh)
    assert declared(name) == (frozenset(kind.model_fields), kind.below_options)
    assert fresh.place(name) is not None  # it was not imported for that


class Elsewhere(ALGORITHMS["dpsgd"]):
    """An algorithm in a file that is none of this project's."""

    own: float = 1.0


def test_settings_that_no_file_of_the_project_tells_are_those_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "elsewhere", Elsewhere)
    assert declared("elsewhere") == (frozenset(Elsewhere.model_fields), True)
