"""The trade-off curve as drawn: what is recognised, blind guessing, and attacks as points; on the pages too."""

from __future__ import annotations

import pytest
from rich.console import Console

from equidp.accounting.events import Event
from equidp.accounting.trade_off import trade_off
from equidp.reporting.figures import trade_off_figure
from equidp.reporting.page import html_report
from equidp.reporting.statement_sections import epsilon_text
from equidp.reporting.tables import print_table, results_table


@pytest.fixture(scope="module")
def curve() -> dict:
    found = trade_off([Event(1.0, 4.0)], 1e-5, 0.9264)
    assert found is not None
    return found.to_dict()


def test_the_curve_is_drawn_as_what_is_recognised_beside_blind_guessing(curve):
    chart = trade_off_figure({"dpsgd": curve}, {"gradient canaries": [(0.01, 0.015)]})
    guess, drawn, attack = chart.data
    assert (guess.name, drawn.name, attack.name) == ("blind guessing", "dpsgd", "gradient canaries")
    assert list(drawn.x) == curve["false_alarms"]
    assert [1 - y for y in drawn.y] == pytest.approx(curve["misses"])
    assert all(y >= x for x, y in zip(drawn.x, drawn.y, strict=True))
    assert (list(attack.x), list(attack.y)) == ([0.01], [0.015])


def test_every_attack_has_a_mark_that_is_drawn(curve):
    """An audit has four attacks; marks made of lines alone are drawn with a line's width only, and were not there."""
    attacks = {name: [(0.01, 0.015)] for name in "abcd"}
    marks = [drawn.marker.symbol for drawn in trade_off_figure({"dpsgd": curve}, attacks).data[2:]]
    assert len(set(marks)) == 4
    assert not [
        mark for mark in marks if "thin" in mark or mark.startswith(("asterisk", "hash", "y-", "line", "arrow"))
    ]


@pytest.mark.slow
def test_the_page_of_a_run_shows_its_curve(sample, curve):
    privacy = sample.privacy | {"dpsgd": sample.privacy["dpsgd"] | {"trade_off": curve}}
    title = "What an attacker can recognise at most"
    assert title in html_report(**vars(sample) | {"privacy": privacy})
    assert title not in html_report(**vars(sample))


def test_the_terminals_table_says_research_mode_beside_the_epsilon(sample, capsys):
    print_table(results_table(sample.documents, sample.privacy), Console(width=100))
    told = capsys.readouterr().out
    heading = told.partition(epsilon_text(2.9866, 3))[0]
    assert "research" in heading
    assert "mode" in heading
    assert "seeded noise, not for publication until privacy.secure=true" in " ".join(told.split())
    secure = {name: {**one, "secure": True, "seed": None} for name, one in sample.privacy.items()}
    print_table(results_table(sample.documents, secure), Console(width=100))
    assert "research mode" not in capsys.readouterr().out
    print_table(results_table(sample.documents, secure | {"dpsgd": sample.privacy["dpsgd"]}), Console(width=100))
    assert "ε of dpsgd: research mode" in " ".join(capsys.readouterr().out.split())
