"""What a command imports before it refuses a name: nothing that takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
