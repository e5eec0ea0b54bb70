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

COMMANDS = """
import shlex, sys
from kedro.framework.cli import main

for line in sys.argv[1:]:
    sys.argv = ["kedro", *shlex.split(line)]
    try:
        main()
    except SystemExit as end:
        print(end.code, file=sys.stderr)
print(*(name for name in ("torch", "mlflow", "pandas", "scipy", "sklearn") if name in sys.modules))
"""
REFUSED = {
    "run --pipelines=dpsdg": "Unknown pipeline 'dpsdg'. Did you mean 'dpsgd'?",
    "run --params=trainig.epochs=3": "Unknown setting 'trainig'. Did you mean 'training'?",
    "run --params=training.epoch=3": "Unknown setting 'training.epoch'. Did you mean 'training.epochs'?",
    "run --params=dpsgd_f.options.max_clip_nrom=3": (
        "Unknown setting of dpsgd_f.options 'max_clip_nrom'. Did you mean 'max_clip_norm'?"
    ),
    "run --params=max_clip_norm=3": "Unknown setting 'max_clip_norm'. Did you mean '<algorithm>.options.max_clip_no",
    "run --params=report.fonts=3": "Unknown setting 'report.fonts'.",
    "run --params=dataset=digit": "Unknown dataset 'digit'. Did you mean 'digits'?",
    "sweep --algorithms=dpsgd,dpsdg --datasets=digits": "Unknown algorithm 'dpsdg'. Did you mean 'dpsgd'?",
    "sweep --algorithms=dpsgd --datasets=digits,adlut": "Unknown dataset 'adlut'. Did you mean 'adult'?",
    "run --params=algorithm=dpsdg --pipelines=audit": "Unknown algorithm 'dpsdg'. Did you mean 'dpsgd'?",
}


@pytest.mark.slow
def test_a_mistyped_name_is_refused_before_what_takes_seconds_to_import(project: Path) -> None:
    """In one process, one after another: what the first imports the last has imported too."""
    done = subprocess.run([sys.executable, "-c", COMMANDS, *REFUSED], capture_output=True, text=True, cwd=project)
    told = [line for line in done.stderr.splitlines() if line.startswith("Error: ") or line.isdigit()]
    assert told[1::2] == ["1"] * len(REFUSED)
    for error, words in zip(told[::2], REFUSED.values(), strict=True):
        assert words in error
    assert done.stdout.split() == []


def test_a_process_without_standard_error_has_somewhere_to_write_to() -> None:
    code = "import sys; sys.stderr = None; import equidp.settings; sys.stderr.write('x')"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithms_file_tells_the_settings_that_its_class_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = ALGORITHMS[name]
    fresh: Registry[type[AlgorithmSettings]] = Registry(
        "equidp.algorithms", {name: f"{kind.__module__.rpartition('.')[2]}:{kind.__qualname__}"}, "settings:X"
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
