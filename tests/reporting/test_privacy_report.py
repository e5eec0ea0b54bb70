"""The privacy statement says what holds, for whom, and what does not; and privacy.json suffices to check it."""

from __future__ import annotations

import json
import math

import pytest

from equidp.accounting.epsilon import epsilon
from equidp.accounting.events import Event
from equidp.reporting.privacy_report import epsilon_text, privacy_report, privacy_sections, research_mode, understated

from .conftest import privacy_facts


def honest(**changes: object) -> dict:
    """Facts whose ε are those of the ledger."""
    events = [Event(0.05, 1.5, 200), Event(1.0, 40.0, 1)]
    value = epsilon(events, 1e-5)
    return privacy_facts(
        "dpsgd_f",
        ledger=[e.to_dict() for e in events],
        epsilon=value.value,
        epsilon_rdp=value.rdp,
        epsilon_pld=value.pld,
        **changes,
    )


def test_privacy_json_suffices_to_recompute_epsilon_in_ten_lines():
    text = json.dumps(honest())

    import dp_accounting as dp

    facts = json.loads(text)
    accountant = dp.pld.PLDAccountant()
    for entry in facts["ledger"]:
        event = dp.GaussianDpEvent(entry["noise_multiplier"])
        if entry["event"] == "poisson_gaussian":
            event = dp.PoissonSampledDpEvent(entry["sampling_rate"], event)
        accountant.compose(event, entry["count"])
    assert accountant.get_epsilon(facts["delta"]) == pytest.approx(facts["epsilon"], rel=1e-3)


@pytest.mark.parametrize(
    ("unit", "weaker"),
    [
        ("record", "A person with k records in the data"),
        ("image", "A person with k images in the data"),
        ("patient", "A person who is several patients in the data"),
        ("unit", "A person who is several units in the data"),
    ],
)
def test_the_statement_speaks_of_the_unit_that_is_protected(unit, weaker):
    text = privacy_report(honest(unit=unit))
    assert weaker in text
    assert f"over the most that one {unit} can change" in text


def test_the_statement_has_every_part_a_data_protection_officer_needs():
    text = privacy_report(honest(), "my_data")
    for part in (
        "on my\\_data",
        "This page, and privacy.json, may go wherever the model goes",
        "What is guaranteed",
        "Who is protected",
        "Is δ small enough?",
        "The figures for ε",
        "The ledger",
        "What was released",
        "What the guarantee does not cover",
        "Taken as public or assumed",
        "add or remove one record",
        "1,437",
        "the non-private baseline",
        "reused test set",
        "publishing k runs",
    ):
        assert part.lower() in text.lower(), part
    assert epsilon_text(honest()["epsilon"]) in text
    assert len(text.split()) < 900  # one page


def test_the_attackers_chance_is_the_bound_of_both_directions():
    def caught(value: float) -> str:
        return privacy_sections(honest() | {"epsilon": value})[0].paragraphs[1]

    assert f"{math.e * 0.01 + 1e-5:.1%}" in caught(1.0)
    # at ε = 6 the other direction is the tighter: 1 − (1 − δ − .01)/e^6
    assert f"{1 - (0.99 - 1e-5) / math.exp(6):.1%}" in caught(6.0)
    assert "says little" in caught(6.0)


@pytest.mark.parametrize(("delta", "words"), [(1e-3, "NOT below 1/N"), (5e-4, "not by much"), (1e-6, "well below 1/N")])
def test_delta_is_judged_against_the_number_of_records(delta, words):
    assert words in privacy_report(honest() | {"delta": delta})


def test_a_published_figure_below_ours_is_called_an_understatement():
    low = privacy_report(honest(epsilon_published={"value": 0.5, "formula": "counts left out"}))
    assert "understates" in low
    assert "rule that does not pay for everything" in privacy_report(
        honest(epsilon_published={"value": 99.0, "formula": "x", "guarantee": False})
    )
    assert understated(honest(epsilon_published={"value": 0.5, "formula": "x"})).startswith("dpsgd_f: the published")
    assert understated({"algorithm": "sgd", "private": False, "epsilon": None}) is None
    assert "counts left out" in low
    assert "understates" not in privacy_report(honest(epsilon_published={"value": 99.0, "formula": "classic"}))
    assert "no published formula" in privacy_report(honest(epsilon_published=None))


def test_an_epsilon_that_is_a_cap_is_not_explained_by_the_ledger():
    capped = honest() | {"epsilon": 8.0}
    assert "a cap fixed before training" in privacy_report(honest(epsilon_fixed_before_training=False))
    assert "the smaller of RDP and PLD" in privacy_report(capped | {"epsilon_fixed_before_training": True})
    assert "a cap fixed before training" in privacy_report(capped)
    assert "basic composition: ε = 24.0000 at δ = 3e-05" in privacy_report(capped, trials=3)


def test_the_recipe_for_epsilon_is_that_of_what_holds():
    suffices, cap, budget = "suffices to recompute ε", "capped\\_ledger: dp", "0.75 at the order 12 "
    recipes = [suffices, cap, budget]
    capped = honest(epsilon_fixed_before_training=False)
    for facts, right in (
        (honest(), suffices),
        (capped, cap),
        (capped | {"filter_order": 12.0, "filter_total": 0.75}, budget),
    ):
        text = privacy_report(facts)
        assert [recipe for recipe in recipes if recipe in text] == [right]
        assert ("over the ledger" in text) == (right == suffices)


def test_many_kinds_of_steps_are_summed_up_by_kind():
    events = [Event(0.01, 1 + k / 100, 10).to_dict() for k in range(60)] + [Event(1.0, 50.0).to_dict()]
    ledger = next(s for s in privacy_sections(honest() | {"ledger": events}) if s.title.startswith("The ledger"))
    assert ledger.rows == (
        ("Gaussian noise on a Poisson sample", "600", "0.01", "1 to 1.59"),
        ("Gaussian noise on all records", "1", "1", "50"),
    )


def test_diagnostics_notes_and_seed_are_named():
    text = privacy_report(honest(diagnostics_published=["nonprivate/*"], notes=["A note."], public_records=1024))
    assert "nonprivate/\\*" in text
    assert "A note." in text
    assert "1,024 records were used as public data" in text
    assert "Fixed to 0" in text


def test_research_mode_is_loud_and_secure_mode_silent():
    assert "fixed seed 0" in research_mode(honest())
    assert "privacy.secure=true" in research_mode(honest(seed=None))
    assert research_mode(honest(seed=None, secure=True)) is None
    assert research_mode({"algorithm": "sgd", "private": False}) is None
    assert "cryptographic generator" in privacy_report(honest(seed=None, secure=True))


def test_only_a_secure_run_s_statement_goes_out_with_its_model():
    """A seeded one names the seed, and with it the noise comes off the model: said before anything else."""
    assert "research mode, and is not for release" in privacy_report(honest()).partition("## ")[0]
    secure = privacy_report(honest(seed=None, secure=True))
    assert "may go wherever the model goes" in secure
    assert "not for release" not in secure


def test_the_baseline_gets_no_guarantee():
    text = privacy_report({"algorithm": "sgd", "private": False, "epsilon": None, "ledger": []})
    assert "without differential privacy" in text
    assert "is guaranteed" not in text


def test_the_trials_a_run_states_are_charged():
    assert "What tuning costs" not in privacy_report(honest())
    stated = privacy_report(honest(trials=4))
    assert "4 trainings were run" in stated
    assert stated == privacy_report(honest(), trials=4)
    assert "no two trials had one seed" in stated  # runs of one seed share their noise: they do not compose
    assert "one seed" not in privacy_report(honest(trials=4, seed=None, secure=True)).partition("What tuning")[2]
    assert "What tuning costs" not in privacy_report(honest(trials=4), trials=1)


@pytest.mark.parametrize("fixed", [True, False])
def test_a_choice_by_records_that_are_trained_on_is_not_covered(fixed):
    """Validation records return to the training part, and seeds that draw the split exchange the parts."""
    stated = privacy_report(honest(trials=4, epsilon_fixed_before_training=fixed)).partition("What tuning")[2]
    assert "records that none of them trained on" in stated
    assert "evaluate\\_on=validation" in stated
    assert "Where the seed draws the test part" in privacy_report(honest())
    assert "Where the seed draws the test part" not in privacy_report(honest(seed=None, secure=True))


def test_epsilon_is_never_rounded_in_its_favour():
    assert epsilon_text(2.98661) == "2.9867"
    assert epsilon_text(3.0) == "3.0000"
    assert epsilon_text(0.1 + 0.2) == "0.3000"
    assert epsilon_text(None) == "–"


def test_names_cannot_add_markup_to_the_markdown():
    text = privacy_report(honest(notes=["<img src=x> [a](http://b) | c"]))
    assert "\\<img src=x\\> \\[a\\](http://b) \\| c" in text


def test_a_unit_called_as_several_lines_ends_none():
    text = privacy_report(honest(unit="patient\r\r- all is well\u2028\x1b[8m"))
    assert "any one patient  - all is well  \\[8m was used" in text
    assert not set(text) & set("\r\u2028\x1b")
