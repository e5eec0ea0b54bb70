"""Windows and macOS, imitated on Linux: nothing here was run on either."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kedro.framework.startup import bootstrap_project

from equidp.errors import EquidpError
from equidp.parameters import TrainingSettings
from equidp.sweep.command import run_command
from equidp.training import device_of

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = """
import builtins, importlib, multiprocessing.reduction, os, pkgutil, signal, sys
import distributed, kedro_mlflow, torch.distributed.launcher.api  # theirs stays theirs

POSIX_ALONE = {"fcntl", "resource", "pwd", "grp", "termios"}
load = builtins.__import__

def without(name, globals=None, locals=None, fromlist=(), level=0):
    if name in POSIX_ALONE and (globals or {}).get("__name__", "").startswith("equidp"):
        raise ImportError(name)
    return load(name, globals, locals, fromlist, level)

builtins.__import__ = without
for place, names in (
    (os, ("setsid",)),
    (signal, ("SIGKILL", "SIGHUP")),
    (multiprocessing.reduction, ("DupFd",)),
):
    for name in names:
        delattr(place, name)
import equidp

for module in pkgutil.walk_packages(equidp.__path__, "equidp."):
    if not module.name.endswith(("__main__", "served_model")):
        importlib.import_module(module.name)
"""


def test_every_module_is_imported_without_what_posix_alone_has() -> None:
    """A single one that is not would end every `kedro` command on Windows."""
    done = subprocess.run([sys.executable, "-c", COMMANDS], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's name, for whoever asks."""
    monkeypatch.setattr(sys, "platform", "win32")


def test_a_sweep_is_refused_before_anything_is_made_but_its_commands_are_printed(
    project: Path, windows: None, capsys: pytest.CaptureFixture[str]
) -> None:
    bootstrap_project(project)
    asked: dict[str, Any] = dict.fromkeys(("epsilons", "workers", "scheduler", "gpus_per_cell", "env"))
    asked |= {"algorithms": "dpsgd", "datasets": "digits", "seeds": "1", "params": ""}
    asked |= {"dashboard": 0, "retries": 1, "listing": False}
    run_command(project, None, dry_run=True, **asked)
    assert "kedro run --pipeline=dpsgd" in capsys.readouterr().out
    with pytest.raises(EquidpError, match="which Windows does not do: take WSL, or"):
        run_command(project, None, dry_run=False, **asked)
    assert not (project / "data" / "08_reporting").exists()


def test_several_processes_are_refused_on_windows(windows: None) -> None:
    device_of(TrainingSettings(devices=1, device="cpu"))
    with pytest.raises(EquidpError, match="several processes do not train together on Windows"):
        device_of(TrainingSettings(devices=2, device="cpu"))
