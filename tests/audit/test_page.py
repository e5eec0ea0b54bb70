"""The audit's page: its verdict follows the findings, its tables hold them, and names from data stay text."""

from __future__ import annotations

import copy
import json

import pytest
from tests.reporting.test_page import Reader

from equidp.audit.figures import bounds_beside_claims
from equidp.audit.page import audit_report, verdict_sentence
from equidp.hooks import print as prints

HOSTILE = "<script>alert(1)</script>"
MODELS = ("sgd", "dpsgd")
ATTACKS = ("loss", "reference")


def exposure(auc: float | None, tpr: float | None = 0.02) -> dict:
    def around(value: float | None) -> list[float] | None:
        return None if value is None else [value - 0.01, value + 0.01]

    return {
        "members": 1200,
        "non_members": 300 if tpr is not None else 99,
        "auc": auc,
        "auc_interval": around(auc),
        "tpr_at_1_percent_fpr": tpr,
        "tpr_at_1_percent_fpr_interval": around(tpr),
    }


def canaries(bound: float, claimed: float, within_reach: float = 4.1325) -> dict:
    return {
        "canaries": 10_000,
        "guesses": 500,
        "correct": 321,
        "delta": 3e-5,
        "epsilon_lower_bound": bound,
        "epsilon_claimed": claimed,
        "epsilon_within_reach": within_reach,
        "consistent": bound <= claimed,
        "refutable": within_reach > claimed,
        "confidence": 0.95,
    }


@pytest.fixture
def findings() -> dict:
    groups = {
        "sgd": {"f": exposure(0.61), HOSTILE: exposure(0.75)},
        "dpsgd": {"f": exposure(0.5), HOSTILE: exposure(0.5, None)},
    }
    return {
        "algorithm": "dpsgd",
        "seed": 1,
        "confidence": 0.95,
        "claim": {"epsilon": 2.0, "delta": 1e-6},
        "gradient_canaries": canaries(0.81239, 1.64001),
        "input_canaries": canaries(0.0, 1.5),
        "membership": {
            model: {attack: {"overall": exposure(0.55), "groups": {"sex": groups[model]}} for attack in ATTACKS}
            for model in MODELS
        },
    }


def page(findings: dict) -> Reader:
    return Reader(audit_report("Audit of dpsgd", findings, {"audit": {"guesses": None}}, {"commit": "0123abc"}))


def rows(read: Reader) -> list[str]:
    """The text of the page, one cell or sentence a line."""
    return [line.strip() for line in read.text.splitlines() if line.strip()]


def test_bounds_stand_beside_claims_rounded_against_the_accuser(findings):
    text = rows(page(findings))
    start = text.index("gradient canaries")
    assert text[start : start + 8] == [
        "gradient canaries",
        "10,000",
        "500",
        "321",
        "3e-05",
        "≥ 0.8123",
        "≤ 1.6401",
        "not refuted",
    ]
    larger = findings | {"claim": {"epsilon": 1.2, "delta": 1e-4}}  # the demonstration's: above the rows' own
    assert "the δ of their row, which may be another than the run's own." in page(larger).text


def test_the_verdict_accuses_only_a_bound_above_its_claim(findings):
    assert verdict_sentence(findings).startswith("Not refuted: gradient canaries and mislabelled records showed")
    refuted = findings | {"input_canaries": canaries(1.7, 1.5)}
    assert verdict_sentence(refuted).startswith(
        "REFUTED at 90% confidence: mislabelled records show ε ≥ 1.7000 where 1.5000 is claimed"
    )
    alone = refuted | {"gradient_canaries": None}
    assert verdict_sentence(alone).startswith("REFUTED at 95% confidence: mislabelled records show")
    assert rows(page(refuted)).count("REFUTED") == 1
    untried = findings | {"gradient_canaries": None, "input_canaries": None}
    assert "not tested" in verdict_sentence(untried)
    assert "not tested" in page(untried).text


def test_a_claim_beyond_what_all_guesses_could_show_was_not_put_to_the_test(findings):
    beyond = canaries(4.1325, 7.1)
    one = findings | {"input_canaries": beyond}
    assert verdict_sentence(one).startswith("Not refuted: ")
    assert "Mislabelled records could not have shown more with every guess right." in verdict_sentence(one)
    assert rows(page(one)).count("out of reach") == 1
    both = findings | {"gradient_canaries": beyond, "input_canaries": None}
    assert verdict_sentence(both).startswith(
        "Not tested: with every guess right gradient canaries would have shown ε ≥ 4.1325, no more than dpsgd"
    )
    assert "could not have shown more" not in verdict_sentence(findings)


def test_every_group_is_told_before_and_after_with_intervals(findings):
    text = rows(page(findings))
    start = text.index("f")
    assert text[start : start + 7] == [
        "f",
        "1,200",
        "300",
        "0.610 [0.600, 0.620]",
        "0.500 [0.490, 0.510]",
        "0.020 [0.010, 0.030]",
        "0.020 [0.010, 0.030]",
    ]
    assert text[text.index(HOSTILE, start) + 6] == "–"  # too few non-members


def test_who_is_exposed_most_is_named_only_where_the_interval_says_so(findings):
    text = page(findings).text
    assert f"sex exposed most, before{HOSTILE}AUC 0.750 (" in text
    assert ", the largest of " in text
    assert "sex exposed most, afternone" in text


def test_bounds_and_exposure_are_drawn(findings):
    titles = [a["aria-label"] for _, a in page(findings).tags if a.get("class") == "chart"]
    assert titles == [
        "Audit of dpsgd: ε claimed and ε shown",
        "AUC of membership inference by sex (reference models)",
        "True positive rate at 1 % false positives by sex (reference models)",
    ]


def test_a_group_named_script_stays_text(findings):
    hostile = copy.deepcopy(findings)
    for model in MODELS:
        for attack in ATTACKS:
            hostile["membership"][model][attack]["groups"] = {
                HOSTILE: hostile["membership"][model][attack]["groups"]["sex"]
            }
    text = audit_report(HOSTILE, hostile, {HOSTILE: HOSTILE}, {"commit": HOSTILE})
    read = Reader(text)
    assert len(read.charts()) == 3
    assert len(read.scripts) == len(read.charts()) + 2  # plotly and the page's own
    assert "alert(1)</script>" not in text
    assert read.text.count(HOSTILE) >= 8
    assert all("<script" not in json.dumps(chart) for chart in read.charts())


def test_a_page_without_membership_says_so(findings):
    read = page(findings | {"membership": {}})
    assert "Left out (audit.membership=false)" in read.text
    assert len(read.charts()) == 1


def test_the_page_warns_that_it_is_outside_the_guarantee(findings):
    read = page(findings)
    assert any(attrs.get("class") == "warning" for _, attrs in read.tags)
    assert "outside the privacy guarantee" in read.text
    assert "No mark: too few members, or others." in read.text
    assert {"verdict", "membership", "figures", "reading", "settings", "provenance"} == {
        attrs.get("id") for tag, attrs in read.tags if tag == "section"
    }


def test_delta_beside_a_claim_is_rounded_up(findings, capsys, monkeypatch):
    """A claim at δ = 3.04e-5 does not hold at 3e-5."""
    findings["gradient_canaries"] |= {"delta": 3.04e-5, "consistent": False}
    shown = page(findings).text
    assert "1.6401 is claimed (at δ = 3.1e-05)" in shown
    assert "of 1.6401 claimed at δ = 3.1e-05" in shown
    assert bounds_beside_claims(findings).data[0].hovertext[0].startswith("δ = 3.1e-05, ")
    monkeypatch.setenv("COLUMNS", "200")
    prints._print_audit(findings)
    assert "ε ≤ 1.641 claimed at δ = 3.1e-05" in capsys.readouterr().out
