"""Two ranks, started once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.training.ranks import ranks

from equidp.training.ranks.launch import Machines, launch


@pytest.fixture(scope="session")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has found, of the algorithms that the chosen tests are of."""
    folder = tmp_path_factory.mktemp("battery")
    here = (item for item in request.session.items if item.path.parent == Path(__file__).parent)
    asked = {item.callspec.params.get("name") for item in here if hasattr(item, "callspec")}
    names = [name for name in ranks.algorithms_here() if name in {"dpsgd", *asked}]
    (folder / ranks.ASKED).write_text(json.dumps(names))
    job = {"training": {"devices": 2, "device": "cpu"}, "workplace": None}
    launch(Machines().launch(2, folder), folder, job, worker=ranks.battery)
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]
