"""Cells of the committed tables keep their names: else no row of docs/results.md would be found again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.end_to_end.kedro_project import bootstrapped

from equidp.cli import project_at
from equidp.sweep.grid import choose_grid

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["dpsgd_f_table", "dpis_table", "sa_table", "ham_table"])
def test_the_first_cell_of_a_table_is_among_the_records(name: str) -> None:
    records = (ROOT / "benchmarks" / "reproduce" / "records.jsonl").read_text(encoding="utf-8").splitlines()
    recorded = {json.loads(line)["cell"] for line in records}
    bootstrapped(ROOT)
    project = project_at(ROOT, None)
    algorithm, overrides = next(iter(choose_grid(project.grids(), name, {}).points()))
    assert project.cell(algorithm, overrides).key in recorded
