"""Two ranks, started once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.training.ranks import ranks

from equidp.training.ranks.launch import Machines, launch


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has found."""
    folder = tmp_path_factory.mktemp("battery")
    job = {"training": {"devices": 2, "device": "cpu"}, "workplace": None}
    launch(Machines().launch(2, folder), folder, job, worker=ranks.battery)
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]
