"""The privacy statement says what holds, for whom, and what does not; and privacy.json suffices to check it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import warnings
from pathlib import Path

import pytest

from equidp.accounting.epsilon import epsilon
from equidp.accounting.events import Event
from equidp.accounting.plan import Plan
from equidp.accounting.trade_off import trade_off
from equidp.algorithms import ALGORITHMS, algorithm_settings, of_a_paper
from equidp.mechanism.algorithm import Outcome
from equidp.parameters import PrivacySettings, TrainingSettings
from equidp.reporting.attack import factor_text, share_text
from equidp.reporting.privacy_report import privacy_report, privacy_sections, research_mode, understated
from equidp.reporting.statement_sections import delta_text, epsilon_text
from equidp.reporting.tuning_page import tuning_page
from equidp.training import privacy_statement

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


@pytest.mark.parametrize("column", ["Person number", "person_id", "Pseudonym", "nr2"])
def test_a_units_column_is_quoted_and_is_no_noun(column):
    text = privacy_report(honest(unit=column)).replace("\\", "")
    assert f"any one unit (column '{column}') was used" in text
    assert text.count(column) == 1
    assert "A person who is several units in the data" in text


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
        "zero-out, the slot of one record is emptied",
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

    assert f"{math.ceil((math.e * 0.01 + 1e-5) * 1e4) / 100:.2f} %" in caught(1.0)
    # at ε = 6 the other direction is the tighter: 1 − (1 − δ − .01)/e^6
    assert f"{math.ceil((1 - (0.99 - 1e-5) / math.exp(6)) * 1e4) / 100:.2f} %" in caught(6.0)
    assert "says little" in caught(6.0)


@pytest.mark.parametrize(("delta", "words"), [(1e-3, "NOT below 1/N"), (5e-4, "not by much"), (1e-6, "well below 1/N")])
def test_delta_is_judged_against_the_number_of_records(delta, words):
    assert words in privacy_report(honest() | {"delta": delta})


def test_a_published_figure_below_ours_is_called_an_understatement():
    low = privacy_report(honest(epsilon_published={"value": 0.5, "formula": "counts left out"}))
    assert "understates" in low
    assert "by a rule that is no guarantee. Do not" in privacy_report(
        honest(epsilon_published={"value": 99.0, "formula": "x", "guarantee": False})
    )
    assert understated(honest(epsilon_published={"value": 0.5, "formula": "x"})).startswith("dpsgd_f: the published")
    assert understated({"algorithm": "sgd", "private": False, "epsilon": None}) is None
    assert "counts left out" in low
    assert "understates" not in privacy_report(honest(epsilon_published={"value": 99.0, "formula": "classic"}))
    assert "no published formula" in privacy_report(honest(epsilon_published=None))


def test_of_an_algorithm_of_no_paper_no_published_formula_is_told():
    figures = {"value": 99.0, "formula": "x", "guarantee": True}
    for value, guarantee in ((99.0, True), (99.0, False), (0.5, False)):
        facts = honest(epsilon_published={"value": value, "formula": "x", "guarantee": guarantee, "paper": False})
        text = privacy_report(facts)
        assert "No paper with this algorithm is known" in text
        assert "published" not in text
        assert "| ε as papers count |" in text
    assert "the paper's own formula" in privacy_report(honest(epsilon_published=figures | {"paper": True}))


def test_the_statement_knows_which_algorithms_are_no_papers():
    pages = Path(__file__).parents[2] / "docs" / "algorithms"
    ours = {page.stem for page in pages.glob("*.md") if "this project's own" in page.read_text(encoding="utf-8")}
    assert {name for name in ALGORITHMS if not of_a_paper(name)} == ours | {"custom"}
    assert not of_a_paper("mine")
    algorithm = dataclasses.replace(algorithm_settings("dpsgd").build(), name="mine")
    plan = Plan(records=900, batch_size=90, epochs=2, groups=2, delta=1e-5, noise_multiplier=1.5)
    privacy = PrivacySettings(noise_multiplier=1.5, delta=1e-5)
    outcome = Outcome(algorithm.events(plan), plan.steps, plan.steps)
    found = privacy_statement(algorithm, plan, outcome, privacy=privacy, training=TrainingSettings(), seed=0)
    assert found["epsilon_published"]["paper"] is False


def test_an_epsilon_above_the_one_asked_for_is_explained_where_steps_were_taken_again():
    algorithm = algorithm_settings("dpsgd").build()
    privacy = PrivacySettings(noise_multiplier=1.5, delta=1e-5, secure=True)
    plan = Plan(records=900, batch_size=90, epochs=2, groups=2, delta=1e-5, noise_multiplier=1.5)
    events = algorithm.events(plan)
    for more, told in ((0, False), (3, True)):
        charged = tuple(dataclasses.replace(event, count=event.count + more) for event in events)
        outcome = Outcome(charged, plan.steps, plan.steps)
        found = privacy_statement(algorithm, plan, outcome, privacy=privacy, training=TrainingSettings(), seed=0)
        report = privacy_report(found, "x")
        assert ("were taken again, with other noise, and both count" in report) == told
        assert (
            "It holds if neither the break nor the decision to go on followed from what the run had" in report
        ) == told
        assert ("fixed before training, but for steps that were taken again after a break" in report) == told
        assert found.get("steps_repeated", False) == told


def test_an_epsilon_that_is_a_cap_is_not_explained_by_the_ledger():
    capped = honest() | {"epsilon": 8.0}
    assert "a cap fixed before training" in privacy_report(honest(epsilon_fixed_before_training=False))
    assert "the smaller of RDP and PLD" in privacy_report(capped | {"epsilon_fixed_before_training": True})
    assert "a cap fixed before training" in privacy_report(capped)


def test_the_recipe_for_epsilon_is_that_of_what_holds():
    suffices, cap, budget = "suffices to recompute ε", "there as charged: dp", "0.75 at the order 12 "
    recipes = [suffices, cap, budget]
    capped = honest(epsilon_fixed_before_training=False)
    for facts, right in (
        (honest(), suffices),
        (capped | {"charged": capped["ledger"]}, cap),
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


def test_declared_trials_are_stated_and_no_others():
    assert "Several trials" not in privacy_report(honest())
    assert "Several trials" not in privacy_report(honest(trials={"max": 1}))
    capped = privacy_report(honest(trials={"max": 4}, charged=honest()["ledger"]))
    assert "At most 4 trainings" in capped
    assert "No two trials may have one seed" in capped  # runs of one seed share their noise: they do not compose
    assert "there as charged" in capped
    assert "one seed" not in privacy_report(honest(trials={"max": 4}, seed=None, secure=True)).partition("Several")[2]
    drawn = privacy_report(honest(trials={"law": "negative_binomial", "mean": 5.0, "shape": 0.5}))
    assert "truncated negative binomial law, with mean 5, η = 0.5" in drawn.replace("\\", "")
    assert "RepeatAndSelectDpEvent" in drawn
    assert "trials.orders" not in drawn
    some = {"law": "geometric", "mean": 5.0, "orders": [3.0, 7.5]}  # of a tuning: at all orders ε would be none
    assert "at the Rényi orders listed with it (trials.orders)" in privacy_report(honest(trials=some))
    assert "records that none of them trained on" in drawn
    assert "suffices to recompute" not in drawn


def test_exact_figures_of_records_that_have_an_epsilon_may_not_choose():
    """Of trials under a law the best by such a figure tells of the records, whatever the noise of what is released."""
    entry = {"part": "test", "epsilon": 1.0, "delta": 1e-5, "unit": "record", "adjacency": "add or remove one record"}
    entry |= {"mechanism": Event(1.0, 4.0).to_dict(), "sensitivity": 1.0, "tables": ["sex"], "bins": 10}
    for trials in ({"max": 1}, {"law": "geometric", "mean": 5.0}):
        text = privacy_report(honest(trials=trials, evaluation=entry | {"trials": trials}))
        assert "must decide on nothing that goes out, such as which of several models does" in text


def test_what_a_run_did_not_do_is_said_of_the_run_and_not_of_all_runs():
    """An earlier one in research mode may have measured the same test records, and trained a baseline."""
    tuned = privacy_report(honest(tuning={"score": "accuracy", "grid": {"training.epochs": ["1"]}, "validation": None}))
    assert "This run made no exact figures of them." in tuned
    assert "The test records have no guarantee. This run made no figures of them." in tuned
    assert "figures of them are exact" not in tuned  # there are none
    assert "| The non-private baseline | This run trained none." in tuned
    assert "Its model, its figures" in privacy_report(honest())
    assert "This run logged none." in privacy_report(honest())


def test_where_the_seed_draws_the_test_part_is_said():
    assert "Where the seed draws the test part" in privacy_report(honest())
    assert "Where the seed draws the test part" not in privacy_report(honest(seed=None, secure=True))


def with_curve(**changes: object) -> dict:
    facts = honest(**changes)
    events = [Event.from_dict(entry) for entry in facts["ledger"]]
    curve = trade_off(events, facts["delta"], facts["epsilon"])
    assert curve is not None
    return facts | {"trade_off": curve.to_dict()}


def test_the_attackers_chance_comes_from_the_whole_curve_and_is_rounded_up():
    facts = with_curve()
    told = facts["trade_off"]["recognised_at_1_percent"]
    text = privacy_report(facts)
    assert f"recognises at most {math.ceil(told * 1e4) / 100:.2f} %" in text
    assert told < min(math.exp(facts["epsilon"]) * 0.01, 0.5)
    assert f"μ = {facts['trade_off']['mu']:.3f}" in text
    assert "Rényi divergences, which is looser" in privacy_report(
        facts | {"trade_off": facts["trade_off"] | {"bound": "rdp"}}
    )
    assert share_text(0.038101) == "3.82 %"
    assert share_text(0.0381) == "3.81 %"


def test_the_lines_of_the_docs_recompute_the_curve(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    facts = with_curve()
    (tmp_path / "privacy.json").write_text(json.dumps(facts), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # json.load(open(…)) is short
        exec(lines, names)
    assert names["misses"] == pytest.approx(facts["trade_off"]["misses"], abs=1e-5)
    assert max(names["misses"]) > 0.99


def test_what_replacing_a_record_costs_is_stated():
    assert "is replaced by another, the noise has to hide at most twice the distance: ε = 4.5000" in privacy_report(
        honest(epsilon_replace_one=4.5)
    )
    assert "no figure is known" in privacy_report(honest(epsilon_replace_one=None))


def test_epsilon_is_never_rounded_in_its_favour():
    assert epsilon_text(2.98661) == "2.9867"
    assert epsilon_text(3.0) == "3.0000"
    assert epsilon_text(0.1 + 0.2) == "0.3000"
    assert epsilon_text(None) == "–"


def test_delta_is_rounded_up_too() -> None:
    assert [delta_text(delta, 2) for delta in (1e-5, 1.24e-5, 1e-5 + 1e-20, 0.001)] == [
        "1e-05",
        "1.3e-05",
        "1.1e-05",
        "0.001",
    ]
    assert delta_text(1.0000001e-5) == "1.00001e-05"
    assert delta_text(1e-300) == "1e-300"


def test_names_cannot_add_markup_to_the_markdown():
    text = privacy_report(honest(notes=["<img src=x> [a](http://b) | c"]))
    assert "\\<img src=x\\> \\[a\\](http://b) \\| c" in text


def test_a_unit_called_as_several_lines_ends_none():
    text = privacy_report(honest(unit="patient\r\r- all is well\u2028\x1b[8m"))
    assert "any one unit (column 'patient  - all is well  \\[8m') was used" in text
    assert not set(text) & set("\r\u2028\x1b")


def test_a_papers_figure_beside_several_trials_is_told_to_be_of_one():
    low = honest(epsilon_published={"value": 0.1, "formula": "classic", "guarantee": True})
    of_one = "which is of one training, and not of all that were declared. Do not quote it"
    assert of_one not in privacy_report(low)
    assert of_one in privacy_report(low | {"trials": {"max": 10}})
    grid = {"score": "accuracy", "grid": {"training.learning_rate": ["0.5", "3"]}, "box": {}, "points": 2}
    exact = {"tuning": grid | {"chosen": {"training.learning_rate": "3"}, "exact": True, "validation": None}}
    assert of_one.replace("declared", "charged") in privacy_report(low | exact)


def test_figures_of_validation_patients_are_told_of_these_and_not_of_test_records():
    released = {"unit": "patient", "part": "validation", "trials": {"max": 1}, "tables": ["sex"], "sensitivity": 1.0}
    released |= {"epsilon": 0.71, "delta": 1e-6, "adjacency": "add or remove one patient with all its records"}
    text = privacy_report(honest(unit="patient", evaluation=released | {"mechanism": Event(1.0, 5.0).to_dict()}))
    assert "| The validation records | Accuracies, errors, losses and group sizes of the validation part are" in text
    assert "of the test part" not in text
    assert "Where one patient is replaced by another, the two may be in different parts" in text
    assert "a record is replaced" not in text


def test_records_of_three_parts_are_told_what_each_is_promised():
    released = {"unit": "record", "part": "test", "trials": {"max": 1}, "tables": ["sex"], "sensitivity": 1.0}
    released |= {"epsilon": 0.71, "delta": 1e-6, "adjacency": "add or remove one record"}
    released |= {"mechanism": Event(1.0, 5.0).to_dict()}
    chosen = {"score": "worst_group", "grid": {"training.epochs": [1, 2]}}
    chosen |= {
        "validation": {"unit": "record", "adjacency": "add or remove one record", "epsilon": 0.53, "delta": 1e-6}
    }
    text = privacy_report(honest(evaluation=released, tuning=chosen))
    for part, value in (("training", honest()["epsilon"]), ("test", 0.71), ("validation", 0.53)):
        (told,) = [line for line in text.splitlines() if f"Each record of the {part} part" in line]
        assert epsilon_text(value) in told
    assert "accuracy of its worst group" in text
    assert "is in two parts." in text
    assert "Nobody" not in text  # a person's records may be
    assert "test records are not protected at all" not in text
    assert "test records are not protected at all" in privacy_report(honest())
    exchanged = privacy_report(honest(evaluation=released, membership={"how": "strata", "key": ""}))
    assert "Each record of the test part" not in exchanged
    assert "neither figure holds" in exchanged


@pytest.mark.parametrize("value", [0.0, 0.998, 2.99981, math.log(9.9999), math.log(999999.9), 13.9, 200.0])
def test_what_a_probability_may_be_multiplied_by_is_never_rounded_down(value: float) -> None:
    assert math.exp(value) * (1 - 1e-9) <= float(factor_text(value)) <= math.exp(value) * 1.011


@pytest.mark.parametrize(("unit", "called"), [("record", "record"), ("patient", "patient"), ("Household-ID", "unit")])
def test_the_page_of_a_tuning_tells_for_whom_each_epsilon_is(unit: str, called: str):
    held = {"unit": unit, "epsilon": 1.0, "delta": 1e-5, "mechanism": Event(1.0, 5.0).to_dict()}
    chosen = {"algorithm": "dpsgd", "grid": {"training.epochs": ["1", "2"]}, "box": {}, "points": 2, "exact": False}
    chosen |= {"trials": {"law": "geometric", "mean": 3.0}, "score": "worst_group", "value": 0.5, "validation": held}
    chosen |= {"chosen": {"training.epochs": "1"}, "epsilon": 3.0, "epsilon_declared": 3.0, "delta": 1e-5}
    page = tuning_page("tuning", chosen, honest(unit=unit, tuning=chosen | {"validation": None}), {}, {}, {}, {})
    assert f"for a training {called}<" in page
    assert f"for a validation {called}<" in page


def test_a_grids_values_are_told_as_they_are_typed() -> None:
    """A null in the grid, for what is not set, was told as Python's None, and so was a choice of it."""
    chosen = {"algorithm": "dpsgd", "grid": {"training.class_weights": [None, [1.0, 2.0]]}, "box": {}, "points": 2}
    chosen |= {"exact": True, "validation": None, "trials": {"max": 1}, "score": "worst_group", "value": 0.5}
    chosen |= {"chosen": {"training.class_weights": None}, "epsilon": 3.0, "epsilon_declared": 3.0, "delta": 1e-5}
    of = honest(tuning=chosen)
    trials = {"trials": [{"settings": {"training.learning_rate": "3"}, "score": 0.5}]}
    page = tuning_page("tuning", chosen, of, {}, trials, {}, {})
    assert page.count("training.class_weights = null") == 1
    assert "Scores are exact figures of the validation part, which no guarantee covers: keep this inside." in page
    assert "the chosen trial alone" not in page  # all trainings of the grid are charged
    assert ">null, 1.0+2.0<" in page
    assert ">null<" in page


@pytest.mark.parametrize("secure", [True, False])
def test_the_page_of_a_secure_tuning_says_that_it_stays_inside(secure: bool) -> None:
    """It has the digest of the raw files and, with diagnostics, every trial, and looked as if made to be shown."""
    held = {"unit": "record", "epsilon": 1.0, "delta": 1e-5, "mechanism": Event(1.0, 5.0).to_dict()}
    chosen = {"algorithm": "dpsgd", "grid": {}, "box": {}, "points": 1, "exact": False, "validation": held}
    chosen |= {"trials": {"law": "geometric", "mean": 3.0}, "score": "worst_group", "value": 0.5, "chosen": {}}
    chosen |= {"epsilon": 3.0, "epsilon_declared": 3.0, "delta": 1e-5}
    of = honest(secure=secure, seed=None if secure else 0, tuning=chosen | {"validation": None})
    assert ("This page stays inside" in tuning_page("tuning", chosen, of, {}, {}, {}, {})) is secure
