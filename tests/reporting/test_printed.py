"""What a run prints at its end, beside its table."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from equidp.hooks import print as printed
from equidp.reporting import tables


@pytest.mark.parametrize(
    ("entries", "told"),
    [({}, True), ({"evaluation": {"part": "test"}}, False), ({"evaluated_on": "validation"}, False)],
)
def test_exact_figures_go_out_where_a_release_would_not_refuse_them(
    entries: dict[str, Any], told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(printed, "evaluated", lambda _: ("dpsgd",))
    for name in ("results_table", "print_table"):
        monkeypatch.setattr(tables, name, lambda *_: None)
    pipeline: Any = SimpleNamespace(all_outputs=set, outputs=set)
    catalog: Any = SimpleNamespace(load=lambda name: {"secure": True} | entries if name == "dpsgd.privacy" else {})
    printed.print_results(("dpsgd",), pipeline, catalog)
    said = " ".join(capsys.readouterr().out.split())
    assert "These figures are exact. They stay inside, like report.html" in said
    assert "No ε covers further runs that they decide on" in said  # a limit on all runs does not, either
    assert ("unless release.unprotected=test publishes them" in said) == told


def test_the_path_of_a_page_is_printed_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder in brackets was left out, as if it were a style of the text."""
    monkeypatch.setattr(printed, "evaluated", lambda _: ())
    monkeypatch.setattr(printed, "written_to", lambda *_: Path("/home/[study]/08_reporting/report.html"))
    pipeline: Any = SimpleNamespace(all_outputs=set, outputs=lambda: {"dpsgd.report"})
    printed.print_results(("dpsgd",), pipeline, cast("Any", None))
    assert capsys.readouterr().out == "dpsgd.report: /home/[study]/08_reporting/report.html\n"
