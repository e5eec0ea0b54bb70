"""A project to sweep in, and cells that need no training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.end_to_end.kedro_project import bootstrapped

from equidp.cli import project_at
from equidp.sweep.cell import Job
from equidp.sweep.project import Cell, Project

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def here() -> Project:
    """This very project: nothing is written to it."""
    bootstrapped(ROOT)
    return project_at(ROOT)


@pytest.fixture
def make_job(tmp_path: Path) -> Callable[..., Job]:
    """Jobs by key, each with a folder of its own."""

    def make(key: str = "cell-a", **changes: object) -> Job:
        folder, workplace = tmp_path / "results" / key, tmp_path / "workplace" / key
        outputs = {name: folder / f"{name}.json" for name in ("metrics", "privacy")}
        cell = Cell("dpsgd", {}, {}, key, "b", "r", outputs, workplace, folder)
        values = {"cell": cell, "project": ROOT, "store": "unused", "experiment": "0"}
        return Job(**(values | changes))  # type: ignore[arg-type]

    return make
