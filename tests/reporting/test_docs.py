"""docs/figures.md holds: its code runs, and it names every figure there is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import plotly.graph_objects as go
import pytest

from equidp.reporting import figures

PAGE = Path(__file__).parents[2] / "docs" / "figures.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)


def test_every_figure_is_listed():
    public = [name for name, _ in inspect.getmembers(figures, inspect.isfunction) if name != "diagnostics_in"]
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in public if f"`{name}" not in text] == []
    assert set(re.findall(r"^\| `(\w+)`", text, flags=re.M)) <= set(public)


def test_runs_are_found_in_a_project_of_any_name():
    """`equidp new` names the experiment as the project."""
    notebook = PAGE.parents[1] / "notebooks" / "reading_results.ipynb"
    for file in (PAGE, notebook):
        assert "search_runs(search_all_experiments=True" in file.read_text(encoding="utf-8"), file


@pytest.mark.parametrize("block", range(len(BLOCKS)))
@pytest.mark.slow
def test_the_code_of_the_page_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drawn: list[go.Figure] = []
    monkeypatch.setattr(go.Figure, "write_html", lambda figure, name: drawn.append(figure))
    code = BLOCKS[block].replace("(0.6, 0.7, 0.8, 0.9)", "(0.7, 0.9)")  # two calibrations suffice here
    exec(compile(code, str(PAGE), "exec"), {"__name__": "docs"})
    assert len(drawn) == 1
    ends = [trace.y for trace in drawn[0].data]
    assert all(len(y) >= 1 for y in ends)
    if "schedule_figure" in code:  # the paper: mean and variance fall with β, the first σ rises
        mean, variance, first, _ = (trace.y for trace in drawn[0].data)
        assert mean[0] > mean[1]
        assert variance[0] > variance[1]
        assert first[0] < first[1]
