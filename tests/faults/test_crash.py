"""Killed processes: a handful of SIGKILLs here, hundreds in benchmarks/crash.py, which this test runs in small."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL on Windows")


@pytest.fixture
def crash(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, imported under the name by which its children find it again."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("crash")


@pytest.mark.parametrize(("name", "secure"), [pytest.param("dpis", False, marks=pytest.mark.slow), ("dpsgd_f", True)])
def test_a_run_that_is_killed_and_resumed(crash: ModuleType, name: str, secure: bool) -> None:
    tally = crash.kill_and_resume(name, kills=3, secure=secure, seed=1)
    assert tally.failures == []
    assert tally.deaths >= 3
    assert tally.finished >= 1


def test_the_benchmark_tells_a_run_that_forgets(crash: ModuleType, tmp_path: Path) -> None:
    # an empty journal beside a witness of five steps is what an undercount would look like
    assert crash._faults_of_dead(tmp_path, secure=True, begun=[5, 5, 1]) == ["after a death: 0 charged of 5 begun"]
    assert crash._faults_of_dead(tmp_path, secure=False, begun=[0, 0, 1]) == []
