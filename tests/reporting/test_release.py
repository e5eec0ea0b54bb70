"""Documents that go out: what may is there, what may not is in no file, and readers find what they look for."""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dp_accounting as dp
import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from dp_accounting.pld import PLDAccountant
from safetensors.torch import load
from tests.data.sources.tiny import write_tiny

from equidp.accounting.dataset_ledger import Entry, Spent, total_epsilon
from equidp.accounting.events import Event
from equidp.accounting.limit import Limit
from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.data.records import Membership, Schema
from equidp.data.sources import source
from equidp.errors import EquidpError
from equidp.mechanism.algorithm import Outcome
from equidp.models import MODELS, Model, build_model
from equidp.models.weights import Weights
from equidp.parameters import DataSettings, PrivacySettings, ReleaseSettings, TrainingSettings, resolve
from equidp.pipelines.release.nodes import write_asked_release
from equidp.pipelines.training.nodes import model_card as written_with
from equidp.reporting.attack import recognised, share_text
from equidp.reporting.release import facts as what_goes_out
from equidp.reporting.release import release_files, released_facts, wanted
from equidp.reporting.release.card import figure_tables
from equidp.reporting.release.lines import as_json
from equidp.reporting.release.registry import registry_entry
from equidp.tasks import task_of
from equidp.training import privacy_statement
from equidp.training.charging import ledger_of
from equidp.training.statement import figures_entry

SCHEMA = Schema(
    "clinic", "tabular", (3,), ("no", "yes"), {"class": ("no", "yes"), "sex": ("f", "m|n")}, ("a", "b", "c")
)
READABLE = ("README.md", "privacy.md", "registry.md", "checklist.md", "reidentification.md")
MACHINE = ("config.json", "privacy.json", "registry.json", "checklist.json", "reidentification.json")
PLAN = {"records": 900, "expected_batch_size": 90, "steps": 20, "noise_multiplier": 1.5}


def statement(**changes: Any) -> dict[str, Any]:
    """`privacy.json` of a secure run."""
    algorithm = algorithm_settings("dpsgd").build()
    privacy = PrivacySettings(noise_multiplier=1.5, delta=1e-5, secure=True)
    plan = Plan(records=900, batch_size=90, epochs=2, groups=2, delta=1e-5, noise_multiplier=1.5)
    outcome = Outcome(algorithm.events(plan), plan.steps, plan.steps)
    found = privacy_statement(algorithm, plan, outcome, privacy=privacy, training=TrainingSettings(), seed=987_654_321)
    return found | changes


def network() -> torch.nn.Module:
    return build_model("logistic", SCHEMA, options={}, seed=1, files=False)


def card(**changes: Any) -> dict[str, Any]:
    training = {"epochs": 2, "batch_size": 90, "learning_rate": 0.25, "optimizer": "sgd", "options": {"clip_norm": 0.5}}
    facts = {"model": "logistic", "options": {}, "schema": SCHEMA.to_dict(), "algorithm": "dpsgd", "training": training}
    software = {"equidp": "0.1.0", "torch": "2.11.0", "dp-accounting": "0.6.0"}
    return facts | {"source": "csv", "source_options": {"label": "ill"}, "software": software} | changes


AUDITED = PLAN | {"unit": "record", "membership": None, "card": card()}
"""What `audit.json` says of the training that was audited."""


def exposure(auc: float) -> dict[str, Any]:
    ends = [auc - 0.01, auc + 0.01]
    rates = {"tpr_at_1_percent_fpr": 0.0123, "tpr_at_1_percent_fpr_interval": [0.01, 0.02]}
    return {"members": 31_337, "non_members": 54_987, "auc": auc, "auc_interval": ends, **rates}


def attacked(auc: float) -> dict[str, Any]:
    return {"loss": {"overall": exposure(auc), "groups": {"sex": {"f": exposure(auc), "m|n": exposure(auc)}}}}


def canaries(bound: float = 0.4321, correct: int = 77) -> dict[str, Any]:
    figures = {"canaries": 4000, "guesses": 200, "correct": correct, "delta": 7e-5, "confidence": 0.95}
    verdict = {"epsilon_claimed": 1.5, "epsilon_within_reach": 4.0, "consistent": bound <= 1.5, "refutable": True}
    return figures | verdict | {"epsilon_lower_bound": bound}


def audit(**changes: Any) -> dict[str, Any]:
    """`audit.json` of the same training."""
    found = {"algorithm": "dpsgd", "seed": 5, "confidence": 0.95, "claim": {}, "training": AUDITED}
    found |= {"gradient_canaries": canaries(), "input_canaries": canaries(0.3456, correct=88_811)}
    return found | {"membership": {"sgd": attacked(0.9191), "dpsgd": attacked(0.5757)}} | changes


def metrics(accuracy: float = 0.818181) -> dict[str, Any]:
    figures = {"count": 271_828, "accuracy": accuracy, "macro_f1": 0.5454}
    return {
        "overall": dict(figures),
        "groups": {"sex": {"f": dict(figures), "m|n": dict(figures), "tiny-group": {"count": 9, "accuracy": 0.4646}}},
        "intervals": {"overall": [0.616161, 0.626262], "groups": {}},
        "worst": {"sex": {"group": "f", "accuracy": 0.717171}},
        "baseline": {"overall": {"count": 271_828, "accuracy": 0.929292}, "groups": {}},
        "cost_of_privacy": {"overall": {"accuracy": -0.111333}, "groups": {}, "gap": {"sex": {"accuracy": 0.222444}}},
        "scores": [0.123123123],
    }


def files(release: ReleaseSettings | None = None, **given: Any) -> dict[str, bytes]:
    """The folder of a secure run with an audit, as `given` changes it."""
    model = network()
    inputs = {"metrics": metrics(), "audit": audit()} | {k: v for k, v in given.items() if k not in ("card", "privacy")}
    facts = released_facts(
        given.get("card", card()), 8, given.get("privacy", statement()), release or ReleaseSettings(), **inputs
    )
    return release_files(facts, model.state_dict())


def test_a_model_that_took_fewer_steps_than_planned_says_so() -> None:
    """A budget that an interrupted run had spent: the card of a model of no step at all named all of its plan's."""
    planned = statement()["steps"]
    few, all_of_them = files(privacy=statement(accepted_steps=0)), files()
    for name in ("README.md", "registry.md"):
        assert f"{planned} planned, of which the model took 0" in few[name].decode()
        assert "planned, of which" not in all_of_them[name].decode()


def test_noise_that_changes_by_steps_is_told_so() -> None:
    """Of a schedule that lowers its noise the documents had the largest, as if every step had it."""
    events = [Event(0.1, 1.5 * factor, 10).to_dict() for factor in (1.0, 0.8, 0.5)]
    several, one = files(privacy=statement(ledger=events)), files()
    for name in ("README.md", "registry.md"):
        assert "1.5 (as set; the steps' events in the ledger have 0.75 to 1.5)" in several[name].decode().replace(
            "\\", ""
        )
        assert "by the ledger" not in one[name].decode()
    # what is released of all records stands in the ledger, too, and is no sum of gradients
    beside = [Event(1.0, 40.0).to_dict(), Event(0.1, 1.5, 30).to_dict()]
    assert "by the ledger" not in files(privacy=statement(ledger=beside))["README.md"].decode()


def test_settings_stand_in_the_card_as_they_are_typed() -> None:
    """It had Python's True and tuples, which no setting takes, and the page of the same run had true."""
    training = card()["training"] | {"class_weights": (1.0, 2.5), "options": {"centred": True}}
    found = files(card=card(training=training))["README.md"].decode().replace("\\", "")
    for row in ("| class weights | 1.0+2.5 |", "| dpsgd.centred | true |"):
        assert row in found


def test_what_a_folder_says_of_its_network_is_in_the_config_and_not_in_the_card() -> None:
    """It stood in a row of the card's table, a kilobyte of Python with None and False."""
    network = {"network": "hf:minilm", "trainable": "lora", "config": {"model": {"bos_token_id": None}}}
    found = files(card=card(model="backbone", options=network))
    assert "bos_token_id" in found["config.json"].decode()
    told = found["README.md"].decode()
    assert "| model.trainable | lora |" in told
    assert "model.config" not in told


@pytest.mark.parametrize("word", ["person", "unit"])
def test_documents_that_are_written_later_tell_the_total_of_the_runs_own_unit(tmp_path: Path, word: str) -> None:
    """The command may leave `privacy.unit` out: of the record's total they said that it was what a person pays."""
    column = {"kind": "numeric", "minimum": 0, "maximum": 9}
    options = {"path": "t.csv", "label": "y", "classes": ["no", "yes"], "unit": "person", "features": {"a": column}}
    given = {"dataset": "clinic", "model": {"name": "logistic"}, "data": {"source": "table", "options": options}}
    later = resolve(given | {"privacy": {"noise_multiplier": 1.5, "delta": 1e-5}})
    one = Entry("1", "training", "dpsgd", "split", "train", "record", secure=True, events=(Event(1.0, 20.0),))
    persons = replace(one, run="2", unit="person", events=(Event(1.0, 1.5),))
    ledger = ledger_of(tmp_path, later)
    ledger.charge([one, persons], delta=1e-5)
    found = write_asked_release(
        Weights(network().state_dict(), card(source="table", source_options=options)),
        *(statement(unit=word), metrics(), {}, {}, tmp_path, later),
    )
    together = json.loads(found["registry.json"])["topics"]["Tier 3: details"]["together"]["value"]
    due = total_epsilon([persons], 1e-5)
    assert (together["secure_runs"], together["other_units"], together["epsilon"]) == (1, 1, pytest.approx(due))


def test_statistics_of_batch_norm_are_no_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log named 3,373,570 parameters of a pretrained network, and its card 42,065 more."""

    class Normed(Model):
        def __init__(self, schema: Schema, options: Any) -> None:
            super().__init__(schema, options)
            self.norm, self.out = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.out(self.norm(features))

    monkeypatch.setitem(MODELS, "normed", Normed)
    settings = resolve({"dataset": "digits", "model": {"name": "logistic"}, "privacy": {"noise_multiplier": 1.5}})
    model = Weights(
        build_model("normed", SCHEMA).state_dict(), card(model="normed", source="digits", source_options={})
    )
    found = write_asked_release(model, statement(), metrics(), {}, {}, tmp_path, settings)
    assert "model normed, 14 parameters." in found["README.md"].decode()


def test_no_total_is_told_by_a_ledger_that_cannot_hold_the_run(tmp_path: Path, caplog: Any) -> None:
    """Of a run that was copied from elsewhere, or lost: it told a total below the ε beside it, or that it has all."""
    settings = resolve({"dataset": "digits", "model": {"name": "logistic"}, "privacy": {"noise_multiplier": 1.5}})
    told = []
    for number, noise in enumerate((None, 20.0, 1.0)):
        if noise is not None:
            events = (Event(1.0, noise),)
            entry = Entry(str(number), "training", "dpsgd", "split", "train", "record", secure=True, events=events)
            ledger_of(tmp_path, settings).charge([entry], delta=1e-5)
        model = Weights(network().state_dict(), card(source="digits", source_options={}))
        found = write_asked_release(model, statement(), metrics(), {}, {}, tmp_path, settings)
        told.append(json.loads(found["registry.json"])["topics"]["Tier 3: details"]["together"])
        lists = b"lists every training" in found["privacy.md"] or b"ledger counted" in found["privacy.md"]
        assert lists is (number == 2)
    for without in told[:2]:
        assert "value" not in without
        assert without["status"] == "open"
        assert "does not list this run" in without["answer"]
    assert caplog.text.count("has lost this run") == 2
    assert told[2]["value"]["epsilon"] >= statement()["epsilon"]


@pytest.mark.parametrize("unit", ["record", "image", "review"])
def test_whatever_one_record_is_called_a_person_may_be_behind_several(unit: str) -> None:
    registry, checklist = (
        files(privacy=statement(unit=unit))[name].decode() for name in ("registry.md", "checklist.md")
    )
    assert f"One {unit}. One person may be behind several of them." in registry
    assert f"A person with several {unit}s has a weaker guarantee." in checklist
    persons = files(privacy=statement(unit="person"))
    assert "One person. All its records together." in persons["registry.md"].decode()


def test_what_secure_noise_leaves_open_is_told() -> None:
    registry, checklist = (files()[name].decode() for name in ("registry.md", "checklist.md"))
    for text in (registry, checklist):
        assert "no digit of what is released tells how their sum was rounded" in text
        assert "sums are formed in float32 before that, and ε does not count how these were rounded" in text


def test_steps_taken_again_are_no_events_that_were_fixed_before_training() -> None:
    for more, told in (({}, False), ({"steps_repeated": True}, True)):
        found = files(privacy=statement() | more)
        assert ("but for steps that were taken again after a break" in found["registry.md"].decode()) == told
        assert document(found, "privacy").get("steps_repeated", False) == told


def test_a_test_part_that_the_data_name_is_told() -> None:
    drawn = {"how": "hash", "key": "seed=0"}
    for membership, where in ((drawn, "in the table,"), ({**drawn, "given": True}, "in the provider's training part,")):
        found = files(privacy=statement() | {"membership": membership})
        assert document(found, "privacy")["membership"] == membership
        assert f"the number of records {where} and so the expected number" in found["registry.md"].decode()


def test_the_statement_says_which_model_it_is_of() -> None:
    found = files(ReleaseSettings(published_on="2027-03-01"))
    told = document(found, "privacy")["model"]
    assert told["sha256"] == hashlib.sha256(found["model.safetensors"]).hexdigest()
    assert told["software"]["equidp"]
    assert told["published_on"] == "2027-03-01"
    text = found["privacy.md"].decode()
    assert f"SHA-256 `{told['sha256']}`" in text
    assert "published on 2027-03-01" in text
    assert "published_on" not in document(files(), "privacy")["model"], "a run records no date"


def test_a_release_that_a_later_version_writes_names_the_versions_that_trained() -> None:
    trained = {"equidp": "0.0.9", "torch": "1.0", "dp-accounting": "0.5", "elsewhere": "never named"}
    found = files(card=card(software=trained))
    kept = {name: trained[name] for name in ("equidp", "torch", "dp-accounting")}
    assert document(found, "privacy")["model"]["software"] == kept
    assert document(found, "config")["software"] == kept
    assert "trained by equidp 0.0.9, torch 1.0, dp-accounting 0.5." in found["privacy.md"].decode()
    assert "equidp 0.0.9" in found["registry.md"].decode()
    assert "| equidp | 0.0.9 |" in found["README.md"].decode()
    older = {name: value for name, value in card().items() if name != "software"}
    assert (
        "trained by equidp of a version that the model's file does not tell."
        in files(card=older)["privacy.md"].decode()
    )


def test_a_folder_that_is_written_again_is_of_the_same_file() -> None:
    """The library writes a header's entries in another order every time."""
    (weights,) = {files()["model.safetensors"] for _ in range(12)}
    assert all(torch.equal(tensor, load(weights)[name]) for name, tensor in network().state_dict().items())


def document(found: dict[str, bytes], name: str) -> dict[str, Any]:
    return json.loads(found[f"{name}.json"])


def lines_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {key: line for lines in document["topics"].values() for key, line in lines.items()}


def test_the_card_says_how_numbers_are_written() -> None:
    options = {"label": "ill", "features": {"a": {"kind": "numeric", "minimum": 0, "maximum": 1}}}
    assert "declared in config.json:" in files(card=card(source_options=options))["README.md"].decode()
    told = files(card=card(source_options={**options, "decimal": ","}))["README.md"].decode()
    assert "declared in config.json; the decimal sign is `,`:" in told


def test_the_checklist_does_not_vouch_for_the_code_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = lines_of(document(files(), "checklist"))["tests"]["answer"]
    monkeypatch.setattr(what_goes_out, "packages", lambda *_: ["my-dp"])
    found = files(card=card(software={**card()["software"], "my-dp": "0.1"}))
    told = lines_of(document(found, "checklist"))["tests"]["answer"]
    assert "my-dp" not in plain
    assert "They do not know what my-dp brings to this model" in told


PLANTED = {
    "/home/jane": lambda given: given["card"]["source_options"].update(path="/home/jane/clinic.csv"),
    "wards.csv": lambda given: given["card"]["source_options"].update(files=["wards.csv"]),
    "cafe1234": lambda given: given["privacy"].update(raw_fingerprint="cafe1234"),
    "jane-laptop": lambda given: given["privacy"].update(host="jane-laptop"),
    "987654321": lambda given: given["privacy"].update(seed=987_654_321),
    "9991212": lambda given: given["privacy"].update(membership={"how": "hash", "key": "seed=0", "sizes": [9991212]}),
    "0.777001": lambda given: given["privacy"].update({"nonprivate/cosine": 0.777001}),
    "5551212": lambda given: given["privacy"].update(group_sizes={"sex": {"f": 5551212}}),
    "6661212": lambda given: given["card"]["schema"].update(sizes=[6661212, 1]),
    "0.777002": lambda given: given["metrics"]["overall"].update({"nonprivate/loss": 0.777002}),
    "7771212": lambda given: given["audit"].update(records=[7771212]),
    "0.777003": lambda given: given["card"]["training"].update(clip_rate=0.777003),
    "0.777004": lambda given: given["metrics_release"].update(exact={"overall": 0.777004}),
    "8881212": lambda given: given["metrics_release"]["groups"]["sex"]["f"].update(exact_count=8881212),
}
"""What may not go out, and where a run's documents could hold it one day."""

NEVER = (
    "0.81818",
    "0.5757",
    "tiny-group",
    "271828",
    "0.616161",
    "0.717171",
    "0.929292",
    "0.111333",
    "0.222444",
    "0.123123123",
    "31337",
    "54987",
    "0.9191",
)
"""Exact counts, figures in full, intervals, baseline, costs, scores, the baseline's exposure and groups of few."""

ON_REQUEST = {"test": ("0.818", "0.545"), "audit": ("0.576", "88811", "77 of 200", "0.4321")}
"""Exact figures that go out where the user asks for them."""


@pytest.mark.parametrize("asked", [(), ("test",), ("audit",), ("test", "audit")])
def test_what_may_not_go_out_is_in_no_file(asked):
    noised = {"epsilon": 0.5, "delta": 1e-6, "overall": {"accuracy": 0.8}, "groups": {"sex": {"f": {"accuracy": 0.7}}}}
    given: dict[str, Any] = {"card": card(), "privacy": statement(), "metrics": metrics(), "audit": audit()}
    given |= {"metrics_release": noised}
    for plant in PLANTED.values():
        plant(given)
    planted = given.pop("metrics_release")
    given["released_metrics"] = None if asked else planted  # exact figures of test records do not go out beside these
    given["audit"]["training"] = AUDITED | {"membership": given["privacy"]["membership"], "card": given["card"]}
    found = files(ReleaseSettings(unprotected=asked), **given)
    assert lines_of(document(found, "reidentification"))["audit"]["status"] == (
        "answered" if "audit" in asked else "open"
    )
    left_out = [text for kind, texts in ON_REQUEST.items() if kind not in asked for text in texts]
    plain = {name: content.decode("utf-8", errors="replace").replace(",", "") for name, content in found.items()}
    for secret in (*PLANTED, *NEVER, *left_out):
        assert [name for name, text in plain.items() if secret.replace(",", "") in text] == [], secret


@pytest.mark.parametrize("kind", ["test", "audit"])
def test_exact_figures_that_were_asked_for_are_stated_as_unprotected(kind):
    found = files(ReleaseSettings(unprotected=(kind,)))
    place = {"test": "README.md", "audit": "reidentification.json"}[kind]
    shown = {"test": "0.818", "audit": "0.576"}[kind]
    assert shown in found[place].decode()
    assert "chose to publish" in lines_of(document(found, "registry"))["unprotected"]["answer"]


def test_exact_figures_of_test_records_are_no_less_exposing_without_small_groups():
    """The annex had test records unbounded and did not say that figures of them lie beside it.

    With two records of a class among 499, its group was left out, and the balanced accuracies of men and women (one
    half and a third) told that both are women.
    """
    asked = files(ReleaseSettings(unprotected=("test",)))
    for name in ("README.md", "reidentification.md", "reidentification.json"):
        assert "the curator chose to publish" in asked[name].decode()
        assert "may tell of single records" in asked[name].decode()
        assert "may tell of single records" not in files()[name].decode()


def test_every_key_of_the_statement_was_decided():
    """A new key stays behind until somebody decides; this test asks for the decision."""
    assert set(statement()) <= set(what_goes_out.STATEMENT)
    from_schema = {name for name in SCHEMA.to_dict() if name not in what_goes_out.SCHEMA}
    assert from_schema <= {"sizes", "unit_sizes"}


def test_epsilon_can_be_recomputed_from_the_folder_alone():
    privacy = document(files(), "privacy")
    events = [
        dp.SelfComposedDpEvent(
            dp.PoissonSampledDpEvent(e["sampling_rate"], dp.GaussianDpEvent(e["noise_multiplier"])), e["count"]
        )
        for e in privacy["ledger"]
    ]
    recomputed = PLDAccountant().compose(dp.ComposedDpEvent(events)).get_epsilon(privacy["delta"])
    assert recomputed == pytest.approx(privacy["epsilon"], rel=1e-3)


def test_the_code_of_the_card_loads_the_model(tmp_path, monkeypatch):
    found = files()
    for name, content in found.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    code, *_ = re.findall(r"```python\n(.*?)```", found["README.md"].decode(), flags=re.S)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    inputs = torch.rand(5, 3)
    assert torch.equal(names["model"](inputs), network()(inputs))
    assert load(found["model.safetensors"]).keys() == network().state_dict().keys()


def test_the_header_is_what_model_hubs_read():
    settings = ReleaseSettings(license="cc-by-4.0", purpose="Triage: 'yes'\nor #no")
    readme = files(settings)["README.md"].decode()
    header = yaml.safe_load(readme.split("---\n")[1])
    assert header["license"] == "cc-by-4.0"
    assert header["pipeline_tag"] == "tabular-classification"
    assert {"differential-privacy", "dpsgd"} <= set(header["tags"])
    assert "model-index" not in header  # no figure of the test records may go out
    shown = yaml.safe_load(files(ReleaseSettings(unprotected=("test",)))["README.md"].decode().split("---\n")[1])
    (result,) = shown["model-index"][0]["results"]
    assert result["metrics"][0] == {"type": "accuracy", "value": 0.818}


def test_two_noise_multipliers_of_one_run_are_told_apart_and_no_setting_is_none():
    """The counts of each step cost something too, so the event's is smaller than that of the sum."""
    algorithm, privacy = algorithm_settings("dpsgd_minimax").build(), PrivacySettings(noise_multiplier=1.5, secure=True)
    plan = Plan(records=900, batch_size=90, epochs=2, groups=2, delta=1e-5, noise_multiplier=1.5)
    outcome = Outcome(algorithm.events(plan), plan.steps, plan.steps)
    told = privacy_statement(algorithm, plan, outcome, privacy=privacy, training=TrainingSettings(), seed=1)
    given = {"epochs": 2, "class_weights": None, "options": {"pull": 10.0, "lead": None, "centred": True}}
    found = files(privacy=told, card=card(algorithm="dpsgd_minimax", training=given, adjusted=True))
    readme, registry, ledger = (found[name].decode() for name in ("README.md", "registry.md", "privacy.md"))
    assert "| noise multiplier of the gradients' sum | 1.5 |" in readme
    assert "None" not in readme
    assert "centred | true |" in readme
    assert "Noise multiplier of the sum 1.5," in registry
    assert "so scores are no probabilities" in readme
    assert "probabilities" not in files()["README.md"].decode()  # of dpsgd
    assert "20 events." in ledger
    assert "| 1.47087 |" in ledger  # (1.5⁻² + 7.5⁻²)^(−1/2)
    assert "whose multiplier is no larger than any of theirs" in ledger  # slaclip's is the gradients' own


@pytest.mark.parametrize(
    ("algorithm", "asked", "weights", "adjusted"),
    [
        ("dpsgd", None, None, False),
        ("dpsgd_minimax", None, None, True),
        ("dpsgd", (1.0, 1.0), [1.0, 1.0], False),
        ("dpsgd", (1.0, 2.0), [1.0, 2.0], True),
        ("dpsgd", "balanced", [0.333333, 1.0], True),
    ],
)
def test_a_model_says_whether_its_loss_counted_classes_alike(algorithm, asked, weights, adjusted):
    settings = resolve({"dataset": "digits", "privacy": {"epsilon": 3.0}, "training": {"class_weights": asked}})
    train = SimpleNamespace(schema=SCHEMA, membership=Membership("hash", class_sizes=(60.0, 20.0)))
    found = written_with(algorithm, train, settings)
    assert (found["adjusted"], found["training"]["class_weights"]) == (adjusted, weights)
    assert found["software"]["torch"] == importlib.metadata.version("torch")


def test_figures_released_with_noise_are_told_with_their_cost():
    noised = {"epsilon": 0.5, "delta": 1e-6, "overall": {"accuracy": 0.8091}, "groups": {"sex": {"f": {"auroc": 0.6}}}}
    found = files(released_metrics=noised)
    assert "0.809" in found["README.md"].decode()
    assert "ε = 0.5000 at δ = 1e-06" in found["README.md"].decode()
    assert document(found, "metrics_release")["overall"] == {"accuracy": 0.8091}
    assert "Figures of the test records" in found["README.md"].decode()
    held = files(released_metrics=noised | {"part": "validation"})["README.md"].decode()
    assert "Figures of the validation records" in held
    with pytest.raises(EquidpError, match="no epsilon"):
        files(released_metrics={"overall": {"accuracy": 0.8}})


def test_beside_a_noised_accuracy_stands_that_of_the_most_frequent_class():
    """0.80 says little where 0.77 of the records are of one class; the counts have noise, and go out anyway."""
    classes = {"no": {"records": 1677.6, "accuracy": 0.95}, "yes": {"records": 511.5, "accuracy": 0.29}}
    noised = {"epsilon": 0.5, "delta": 1e-6, "overall": {"accuracy": 0.8091}, "groups": {"class": classes}}
    told = "the most frequent class is no: a model that always answers it has an accuracy of about 0.766."
    assert told in files(released_metrics=noised)["README.md"].decode()
    drowned = noised | {"groups": {"class": {name: {"records": 0.0} for name in classes}}}
    exact = files(ReleaseSettings(unprotected=("test",)))
    for found in (files(released_metrics=drowned), exact, files()):
        assert "most frequent class" not in found["README.md"].decode()


def test_a_licence_that_was_not_stated_is_an_open_line():
    for given in ({}, {"license": "unknown"}, {"license": " "}):
        found = files(ReleaseSettings(**given))
        assert "license" in document(found, "checklist")["open"]
        assert "license: unknown" in found["README.md"].decode()
    assert "license" not in document(files(ReleaseSettings(license="cc-by-4.0")), "checklist")["open"]


@pytest.mark.parametrize("name", ["registry", "checklist", "reidentification"])
def test_every_line_is_answered_or_marked_open_in_both_forms(name):
    found = files()
    told, text = document(found, name), found[f"{name}.md"].decode()
    lines = lines_of(told)
    assert [key for key, line in lines.items() if line["status"] == "open"] == told["open"]
    assert all(line["answer"] for line in lines.values())
    assert text.count("- [ ] **") == len(told["open"])
    assert text.count("- [x] **") == len(lines) - len(told["open"])


def test_the_curators_answers_close_lines_and_raise_the_tier():
    assert document(files(), "registry")["tier"] == 0
    basics = {"curator": "Clinic", "purpose": "Triage", "data_origin": "Visits", "published_on": "2030-01-01"}
    found = document(files(ReleaseSettings(**basics)), "registry")
    assert found["tier"] == 2
    assert lines_of(found)["purpose"] == {
        "question": "Intended use",
        "status": "answered",
        "answer": "Triage (stated by the curator)",
        "value": "Triage",
    }
    assert document(files(ReleaseSettings(**basics, rationale="r", security="s")), "registry")["tier"] == 3


RESEARCH = statement(secure=False, seed=7)
COARSE = figures_entry(
    PrivacySettings(noise_multiplier=1.5, delta=1e-5, evaluation={"epsilon": 0.01, "delta": 0.3}), DataSettings()
)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"privacy": RESEARCH}, "Research mode"),
        ({"privacy": statement(delta=0.01)}, "δ is not below"),
        ({"privacy": statement(**COARSE)}, "δ is not below"),  # ε 0.0095 at δ 0.3 was for publication
        ({"audit": audit(gradient_canaries=canaries(1.75))}, "An audit of this training refuted"),
        ({"audit": audit(input_canaries=canaries(1.75))}, "An audit of this training refuted"),
    ],
)
def test_a_model_that_may_not_be_published_says_so_in_every_document(given, why):
    found = files(**given)
    for name in MACHINE:
        told = json.loads(found[name])
        assert told["for_publication"] is False
        assert told["warning"].startswith(why)
    readable = [name for name in READABLE if name != "privacy.md" or why == "Research mode"]
    missing = "not for release" if why == "Research mode" else why
    assert [name for name in readable if why not in found[name].decode() and missing not in found[name].decode()] == []
    assert (
        yaml.safe_load(found["README.md"].decode().split("---\n")[1])["differential_privacy"]["for_publication"]
        is False
    )
    assert b'for_publication\\": false' in found["model.safetensors"]


def test_the_registry_names_the_epsilon_of_every_part_of_which_something_goes_out():
    spent = {"part": "test", "epsilon": 0.75, "delta": 1e-6}
    told = {"score": "accuracy", "grid": {}, "validation": {"epsilon": 0.5, "delta": 1e-5, "unit": "record"}}
    line = lines_of(json.loads(registry(statement(evaluation=spent, tuning=told))))["parameters"]
    assert "ε = 0.7500 at δ = 1e-06 for one of the test part" in line["answer"]
    assert "ε = 0.5000 at δ = 1e-05 for one of the validation part" in line["answer"]
    assert line["value"]["other_parts"]["test"] == {"epsilon": 0.75, "delta": 1e-6}
    alone = lines_of(json.loads(registry(statement())))["parameters"]
    assert "part" not in alone["answer"]


def test_of_a_tuned_model_the_checklist_claims_no_figures_that_a_tuning_does_not_make():
    told = {"score": "accuracy", "grid": {}, "validation": None}
    lines = lines_of(document(files(privacy=statement(tuning=told), audit=None), "checklist"))
    assert not any("Measured inside" in lines[key]["answer"] for key in ("utility", "groups", "cost_of_privacy"))
    assert {lines[key]["status"] for key in ("utility", "groups", "cost_of_privacy")} == {"open"}
    plain = lines_of(document(files(), "checklist"))
    assert plain["cost_of_privacy"]["answer"].startswith("Measured inside")


def test_the_documents_tell_what_the_ledger_counts_and_never_that_nothing_is_known():
    found = files(counted=Spent(secure=2, research=7, others=0, epsilon=5.56003, delta=1e-5))
    for name in ("checklist.md", "registry.md", "privacy.md"):
        told = found[name].decode()
        assert "counted 2 secure runs on these records, published or not" in told
        assert "Together they cost one record at most ε = 5.5601 at δ = 1e-05." in told
        assert "it is what was spent, and no guarantee at that ε" in told  # composition wants runs fixed beforehand
        assert "lists 7 runs in research mode and counts none" in told
        assert "another unit" not in told
        # of two presets the number tells whether one record differs in the second one's file
        assert "follows from exact digests of the raw files, which no ε covers" in told
    said = lines_of(document(found, "registry"))["unprotected"]["answer"]
    assert "by digests of the raw files. No more is here." in said
    line = lines_of(document(found, "checklist"))["elsewhere"]
    assert line["status"] == "open"  # of what others publish no ledger tells
    assert line["value"] == {
        "secure_runs": 2, "research_runs": 7, "other_units": 0, "epsilon": 5.56003, "delta": 1e-5
    }  # fmt: skip
    limit = Limit(order=4.0, epsilon=8.0, delta=1e-5, run="0123456789abcdef")
    kept = files(counted=Spent(secure=2, research=0, others=0, epsilon=5.56003, delta=1e-5, limit=limit))
    told = kept["privacy.md"].decode()
    assert "No run is begun with which they would cost more than ε = 8 at δ = 1e-05" in told
    assert "what was spent" not in told
    assert "no ε covers a choice of later runs by these" in told  # the baseline's figures show single records
    value = lines_of(document(kept, "checklist"))["elsewhere"]["value"]["limit"]
    assert value == {"order": 4.0, "epsilon": 8.0, "delta": 1e-5}  # no names of other runs
    alone = files(counted=Spent(secure=0, research=1, others=3, epsilon=0.0, delta=1e-5))["privacy.md"].decode()
    assert "counted no secure runs on these records. Of 3 secure runs more, which protect another unit" in alone
    assert "lists 1 run in research mode" in alone
    assert "what was spent" not in alone
    unread = lines_of(document(files(), "checklist"))["elsewhere"]["answer"]
    assert "the pipeline `ledger` tells" in unread
    assert not any(b"knows of none" in content for content in found.values())


def registry(privacy: dict[str, Any]) -> str:
    facts = released_facts(card(), 8, privacy, ReleaseSettings())
    return as_json(registry_entry(facts))


def test_a_secure_run_may_be_published():
    found = files()
    assert all(json.loads(found[name])["for_publication"] is True for name in MACHINE)
    assert not any(b"Not for publication" in content for content in found.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "naive"},
        {"training": {}},
        {"training": PLAN},
        {"training": AUDITED | {"noise_multiplier": 1.0}},
        {"training": AUDITED | {"unit": "lesion"}},
        {"training": AUDITED | {"membership": {"how": "hash", "key": "seed=1"}}},
        {"training": AUDITED | {"card": card(model="mlp")}},
        {"training": AUDITED | {"card": card(training={"epochs": 2, "batch_size": 90, "learning_rate": 1.0})}},
    ],
)
def test_an_audit_of_another_training_is_not_the_runs(changes):
    found = document(files(audit=audit(**changes)), "reidentification")
    assert {"audit", "membership"} <= set(found["open"])


def test_an_audits_bound_is_told_beside_the_claim():
    line = lines_of(document(files(ReleaseSettings(unprotected=("audit",))), "reidentification"))["audit"]
    assert line["status"] == "answered"
    assert "ε ≥ 0.4321" in line["answer"]
    assert "does not refute" in line["answer"]


def test_an_audits_figures_of_real_records_are_said_to_be_of_another_model():
    shown = files(ReleaseSettings(unprotected=("audit",)))
    assert "not of the one in this folder" in lines_of(document(shown, "reidentification"))["membership"]["answer"]


def test_an_audit_that_could_not_refute_leaves_the_line_open():
    weak = canaries() | {"refutable": False}
    asked = ReleaseSettings(unprotected=("audit",))
    assert "audit" in document(files(asked, audit=audit(gradient_canaries=weak)), "reidentification")["open"]


def test_the_attack_is_bounded_by_the_curve_where_there_is_one():
    privacy = statement()
    bound = recognised(privacy, 0.01)
    curve = {
        "bound": "pld",
        "mu": 0.5,
        "mu_from": 1e-5,
        "false_alarms": [1e-5, 0.01, 1.0],
        "misses": [1.0, 1 - bound / 2, 0.0],
        "recognised_at_1_percent": bound / 2,
    }
    assert recognised(privacy | {"trade_off": curve}, 0.01) == pytest.approx(bound / 2)
    between = recognised(privacy | {"trade_off": curve}, 0.009)  # the next point's rate still bounds
    assert between == pytest.approx(bound / 2)
    assert recognised(privacy | {"trade_off": curve}, 0.5) <= 1
    found = files(privacy=privacy | {"trade_off": curve})
    assert lines_of(document(found, "reidentification"))["membership_bound"]["value"]["trade_off"] == curve


def test_the_attack_without_a_curve_is_that_of_epsilon_and_delta():
    assert recognised({"epsilon": 0.0, "delta": 0.0}, 0.01) == pytest.approx(0.01)
    assert recognised({"epsilon": 1.0, "delta": 1e-6}, 0.01) == pytest.approx(0.0271838, rel=1e-4)
    assert recognised({"epsilon": 50.0, "delta": 1e-6}, 0.01) == pytest.approx(1.0)
    assert share_text(0.02601) == "2.61 %"


def test_names_from_data_are_text_in_markdown():
    schema = SCHEMA.to_dict()
    schema["groupings"]["sex"] = ["<script>", "m|n\n# x"]
    readme = files(card=card(schema=schema))["README.md"].decode()
    assert "<script>" not in readme
    assert "m\\|n \\# x" in readme


def test_a_model_without_privacy_or_of_another_run_is_refused():
    with pytest.raises(EquidpError, match="without differential privacy: nothing of it may go out"):
        files(privacy={"algorithm": "sgd", "private": False})
    with pytest.raises(EquidpError, match="The model is naive's and the privacy statement dpsgd's"):
        files(card=card(algorithm="naive"))


def test_figures_of_validation_records_are_refused():
    with pytest.raises(EquidpError, match="validation records"):
        files(ReleaseSettings(unprotected=("test",)), metrics=metrics() | {"evaluated_on": "validation"})
    with pytest.raises(EquidpError, match="validation records"):
        files(ReleaseSettings(unprotected=("test",)), privacy=statement(evaluated_on="validation"))
    settings = {"dataset": "digits", "privacy": {"epsilon": 1.0}, "data": {"evaluate_on": "validation"}}
    with pytest.raises(EquidpError, match="validation records"):
        resolve(settings | {"release": {"unprotected": "test"}})
    assert resolve(settings).release.documents is None


def test_documents_of_a_run_that_was_evaluated_on_validation_records_speak_of_these():
    """The card named a setting that is refused for them, and test records that the run had not looked at."""
    found, test = files(privacy=statement(evaluated_on="validation")), files()
    for name in ("README.md", "privacy.md", "checklist.md", "reidentification.md"):
        told, of_test = (of[name].decode().replace("\\", "") for of in (found, test))
        assert "validation records" in told
        assert "test records" not in told
        assert "test records" in of_test
    assert "release.unprotected=test" not in found["README.md"].decode()
    assert json.loads(found["privacy.json"])["evaluated_on"] == "validation"


def test_exact_figures_beside_those_with_noise_are_refused():
    """The folder had no exact figure, and its documents said that the curator chose to publish them."""
    noised = {"epsilon": 0.5, "delta": 1e-6, "overall": {"accuracy": 0.8091}, "groups": {}}
    with pytest.raises(EquidpError, match="with noise, and the exact ones beside them would undo it"):
        files(ReleaseSettings(unprotected=("test",)), released_metrics=noised)
    promised = statement(evaluation={"part": "test", "epsilon": 0.5, "delta": 1e-6})
    with pytest.raises(EquidpError, match="would undo it"):  # whose file was moved out of the run's folder to go out
        files(ReleaseSettings(unprotected=("test",)), privacy=promised)


def test_membership_inference_of_records_that_have_an_epsilon_is_refused():
    """It compares training records with test records, and trains on both."""
    asked, promised = ReleaseSettings(unprotected=("audit",)), {"part": "test", "epsilon": 0.5, "delta": 1e-6}
    promised |= {"unit": "record", "adjacency": "add or remove one record", "tables": ["sex"], "trials": {"max": 1}}
    promised |= {"mechanism": Event(1.0, 8.0).to_dict(), "sensitivity": 1.0, "bins": 10}
    with pytest.raises(EquidpError, match="tells exactly of the records that this run was evaluated on"):
        files(asked, privacy=statement(evaluation=promised))
    with pytest.raises(EquidpError, match="tells exactly of the records that this run was evaluated on"):
        files(asked, metrics=metrics() | {"evaluated_on": "validation"})
    with pytest.raises(EquidpError, match="tells exactly of the records that this run was evaluated on"):
        files(asked, privacy=statement(evaluated_on="validation"))
    with pytest.raises(EquidpError, match=r"metrics\.json is not there to tell which they are"):
        files(asked, metrics={})  # moved out of the run's folder, and the validation records' figures went out
    canaries_alone = files(asked, privacy=statement(evaluation=promised), audit=audit(membership={}))
    assert b"77 of 200 guesses" in canaries_alone["reidentification.md"]
    settings = {"dataset": "digits", "release": {"unprotected": "audit"}}
    noised = {"privacy": {"epsilon": 1.0, "evaluation": {"epsilon": 1.0}}}
    held_back = {"privacy": {"epsilon": 1.0}, "data": {"evaluate_on": "validation"}}
    for protecting in (noised, held_back):
        with pytest.raises(EquidpError, match="would publish membership inference"):
            resolve(settings | protecting)
        assert resolve(settings | protecting | {"audit": {"membership": False}}).release.unprotected == ("audit",)


def test_a_secure_run_writes_its_documents_and_any_other_on_request():
    secure, research, baseline = statement(), statement(secure=False), {"algorithm": "sgd", "private": False}
    asked, refused = ReleaseSettings(documents=True), ReleaseSettings(documents=False)
    assert [wanted(ReleaseSettings(), one) for one in (secure, research, baseline)] == [True, False, False]
    assert [wanted(asked, one) for one in (secure, research, baseline)] == [True, True, False]
    assert not wanted(refused, secure)


def test_the_run_is_not_changed_by_its_documents():
    given = {"card": card(), "privacy": statement(), "metrics": metrics(), "audit": audit()}
    before = copy.deepcopy(given)
    files(ReleaseSettings(unprotected=("test", "audit")), **given)
    assert given == before


def test_the_page_about_the_folder_names_every_file():
    page = (Path(__file__).parents[2] / "docs" / "release.md").read_text(encoding="utf-8")
    assert [name for name in files() if f"`{name}`" not in page] == []


def test_the_card_tells_how_far_noise_reaches_and_of_whom_too_little_is_known():
    noisy = {
        "overall": {"accuracy": 0.66666, "balanced_accuracy": None},
        "groups": {"sex": {"f": {"accuracy": 1.0, "balanced_accuracy": None}}},
        "intervals": {
            "overall": {"accuracy": [0.6431, 0.6914], "balanced_accuracy": None},
            "groups": {"sex": {"f": {"accuracy": [0.0, 1.0], "balanced_accuracy": None}}},
        },
        "left_out": {"sex": ["f"]},
    }
    overall, by_sex, few = figure_tables(noisy)
    assert "| 0.667 (0.643 to 0.691) | – |" in overall
    assert "| f | 1.000 (0.000 to 1.000) | – |" in by_sex
    assert few == "Not known to have 10 records or more, so a figure of theirs says little: f."
    exact = {name: noisy[name] for name in ("overall", "groups")}
    assert "| 0.667 | – |" in figure_tables(exact)[0]


def test_the_checklist_names_the_groups_that_were_compared_and_no_others():
    compared = {"sex": {"f": {"count": 20, "accuracy": 0.5}}}  # the schema has the grouping class, too
    lines = lines_of(document(files(metrics=metrics() | {"groups": compared}), "checklist"))
    assert "for the groups by sex, exactly" in lines["groups"]["answer"]
    assert "what a model without noise learnt" in lines["diagnostics"]["answer"]
    bare = {name: of for name, of in metrics().items() if name != "cost_of_privacy"}
    alone = lines_of(document(files(metrics=bare), "checklist"))
    assert alone["groups"]["answer"].startswith("This run made no comparison")
    assert (alone["cost_of_privacy"]["answer"], alone["cost_of_privacy"]["status"]) == (
        "Not measured by this run.",
        "open",
    )
    assert "group sizes. None of it" in alone["diagnostics"]["answer"]


def test_the_registry_says_what_gives_epsilon_where_the_events_do_not():
    """Of a budget they give less: they depended on outputs."""
    kept = {"filter_order": 12.0, "filter_total": 0.75, "epsilon_fixed_before_training": False}
    said = answer_to("accounting", statement(**kept))
    assert "their ε is NOT the guarantee" in said
    assert "0.75 at the order 12" in said
    assert "suffices to recompute" in answer_to("accounting", statement())
    chosen = answer_to("accounting", statement(trials={"law": "geometric", "mean": 4.0}, charged=[]))
    assert chosen.count("random number") == 1
    assert "privacy.json lists the events one by one" in chosen
    assert "gives ε from those listed as charged and the declared law" in chosen


def test_a_query_that_looks_at_several_rows_leaves_preprocessing_open():
    nested = "SELECT x - (SELECT avg(x) FROM t) AS x FROM t"
    for sql, word in (
        ("SELECT * FROM t", ""), ("SELECT x - avg(x) OVER () AS x FROM t", "OVER"), (nested, "a nested SELECT")
    ):  # fmt: skip
        found = files(card=card(source_options={"sql": sql}))
        for name in ("checklist", "registry"):
            line = lines_of(document(found, name))["preprocessing"]
            assert (line["status"], f"a query with {word}:" in line["answer"]) == (
                ("answered", "open")[word != ""],
                word != "",
            )
            assert "avg" not in found[f"{name}.json"].decode()


def test_of_rows_that_a_catalog_gives_no_document_says_that_each_was_made_alone():
    """The entry may be a query with averages, which the run does not see."""
    found = files(card=card(source_options={"catalog": "visits_of_my_clinic"}))
    for name in ("checklist", "registry"):
        line = lines_of(document(found, name))["preprocessing"]
        assert line["status"] == "open"
        assert "an entry of the curator's catalog" in line["answer"]
        assert "visits_of_my_clinic" not in found[f"{name}.json"].decode()


def test_the_card_tells_whose_mean_noised_figures_are():
    """A unit with several records counts once in the histogram."""
    of_patients = {"part": "test", "epsilon": 1.0, "delta": 1e-5, "unit": "patient", "overall": {"accuracy": 0.5}}
    found = of_patients | {"groups": {"sex": {"f": {"accuracy": 0.5}}}, "left_out": {"sex": ["f"]}}
    text = files(released_metrics=found)["README.md"].decode()
    assert "Each patient counts once, whatever the number of its records." in text
    assert "Not known to have 10 patients or more" in text
    assert "counts once" not in files(released_metrics=found | {"unit": "record"})["README.md"].decode()


def test_what_intervals_leave_out_goes_out_with_them():
    """They said 95 %, of ten visits of each patient they held 70 %, and only a page that stays inside said so."""
    found = {"part": "test", "epsilon": 1.0, "delta": 1e-5, "unit": "record", "overall": {"accuracy": 0.5}}
    released = files(released_metrics=found | {"groups": {}, "notes": ["Visits are taken for independent."]})
    assert "Visits are taken for independent." in released["README.md"].decode()
    assert document(released, "metrics_release")["notes"] == ["Visits are taken for independent."]


def test_the_annex_sends_nobody_to_an_audit_that_the_task_does_not_have():
    ranks = SCHEMA.to_dict() | {"classes": ("low", "some", "high"), "task": "ordinal"}
    for found, told in ((files(card=card(schema=ranks), audit=None), False), (files(audit=None), True)):
        assert ("The pipeline audit makes one" in found["reidentification.md"].decode()) is told
        assert ("the pipeline audit is for classification" in found["reidentification.md"].decode()) is not told


def test_the_card_promises_no_noised_figures_of_tasks_that_have_none():
    ranks = SCHEMA.to_dict() | {"classes": ("low", "some", "high"), "task": "ordinal"}
    assert "with noise would stand here" not in files(card=card(schema=ranks))["README.md"].decode()
    assert "with noise would stand here" in files()["README.md"].decode()


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({"membership": None}, "the number of training records, 900;"),
        ({"membership": {"how": "strata", "key": "seed=0"}}, "the number of training records, 900;"),
        (
            {"membership": {"how": "hash", "key": "seed=0"}},
            "the number of records in the table, and so the expected number of training records, 900;",
        ),
        (
            {"membership": {"how": "hash", "key": "seed=0"}, "records_declared": True},
            "the declared number of training records, 900;",
        ),
    ],
)
def test_what_is_taken_as_public_is_told_as_it_is(changes, size):
    """By hash how many train is random, and not public: what is public is of how many they were drawn."""
    assert size in answer_to("unprotected", statement(**changes))


def test_trainings_that_were_declared_are_no_choice():
    """Under a cap all of them may be published, and none need be the best."""
    assert "At most 3 trainings were declared" in answer_to("trials", statement(trials={"max": 3}))
    law = {"law": "geometric", "mean": 4.0}
    assert "It was chosen from several" in answer_to("trials", statement(trials=law))
    for found in ({"max": 3}, law):  # a grid may be declared after runs in research mode on the same records
        assert "what was learnt from these records to declare them" in answer_to("trials", statement(trials=found))


def answer_to(key: str, privacy: dict[str, Any]) -> str:
    """A line of the registry's tier 3."""
    return json.loads(registry(privacy))["topics"]["Tier 3: details"][key]["answer"]


def test_codes_of_missing_values_go_out_for_the_columns_that_a_model_reads():
    columns = {"w": {"kind": "numeric", "maximum": 9, "column": "weight"}, "sex": {"kind": "group"}}
    options = {"label": "y", "features": columns, "groups": {"sex": {"column": "g"}, "ward": {}}}
    codes = {"weight": ["-1"], "g": ["9"], "y": ["8"], "ward": ["7"]}
    found = files(card=card(source="table", source_options=options | {"na_values": codes}))
    assert json.loads(found["config.json"])["encoding"]["na_values"] == {"weight": ["-1"], "g": ["9"], "y": ["8"]}


def test_the_card_promises_no_bounds_of_what_a_network_makes_of_a_record():
    names = [f"backbone.{i}" for i in range(3)]
    network = {"model": "backbone", "options": {"network": "timm:resnet18", "weights": "w.safetensors"}}
    stored = {"size": 128, "path": "skin"}
    found = card(**network, schema=SCHEMA.to_dict() | {"feature_names": names}, source="images", source_options=stored)
    text = files(card=found)["README.md"].decode()
    assert "It takes features of shape 3, which a fixed public map makes of each record, and gives" in text
    assert "*Score new records*. Images are read as squares of 128 pixels" in text
    assert "The network's own weights are not in this folder.\n\nWhat the model answers" in text
    assert "what a fixed public map makes of each record as a whole" in files(card=found)["checklist.md"].decode()
    assert "tabular data" not in files(card=found)["registry.md"].decode()
    assert json.loads(files(card=found)["config.json"])["encoding"] == {"source": "images", "size": 128}
    assert "the network timm:resnet18, without its last layer. They have no declared bounds." in text
    assert "from 0 to 1" not in text
    assert "raw rows" not in text


SEX = {"sex": {"kind": "group"}, "old": {"kind": "group", "group": "age_band"}}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("csv", {}),
        ("adult", {}),
        ("csv", {"features": SEX}),
        ("csv", {"classes": [], "class_map": {"sick": ["ill"], "fine": ["well"]}}),
        ("csv", {"label": "age", "classes": ["a", "b", "c"], "class_edges": [30, 50], "ordered": True}),
    ],
)
def test_the_code_of_the_card_scores_raw_rows(name, more, tmp_path, monkeypatch):
    options = write_tiny(name, tmp_path) | more
    if options.get("classes") == []:
        del options["classes"]
    known = source(name, options)
    records = known.read(known.locate(tmp_path))
    trained = build_model("logistic", records.schema, seed=3)
    of = card(schema=records.schema.to_dict(), source=name, source_options=options)
    facts = released_facts(of, 8, statement(), ReleaseSettings())
    for path, content in release_files(facts, trained.state_dict()).items():
        (tmp_path / path).write_bytes(content)
    people = tmp_path / "mine" / "people.csv"
    rows = pd.read_csv(people, dtype=str, keep_default_na=False) if name == "csv" else known.example().astype(str)
    rows.to_csv(tmp_path / "rows.csv", index=False)
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(encoding="utf-8"), re.DOTALL):
        exec(block, found)
    assert torch.equal(found["features"], known.encode(rows))
    assert torch.equal(found["model"](found["features"]), trained(known.encode(rows)))
    answers = task_of(records.schema).predict(trained(known.encode(rows)))
    assert list(found["answers"]) == list(records.schema.classes)  # by name, and in no logits
    assert np.array_equal(found["answers"].to_numpy(), answers.detach().numpy())


def test_the_code_of_the_card_scores_raw_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card went from the weights to the answers, and config.json named no column, nor how many words are read."""
    options = {"path": "rows.csv", "label": "y", "classes": ["a", "b"], "text": "body", "length": 5, "vocabulary": 50}
    rows = pd.DataFrame({"body": ["a letter on pain", "thank you"], "y": ["a", "b"]})
    rows.to_csv(tmp_path / "rows.csv", index=False)
    known = source("table", options)
    records = known.read(known.locate(tmp_path))
    of = card(schema=records.schema.to_dict(), source="table", source_options=options, model="bilstm", options={})
    trained = build_model("bilstm", records.schema, seed=3)
    for path, content in release_files(
        released_facts(of, 8, statement(), ReleaseSettings()), trained.state_dict()
    ).items():
        (tmp_path / path).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (tmp_path / "README.md").read_text(encoding="utf-8"), re.DOTALL):
        exec(block, found)
    assert torch.equal(found["features"], known.encode(rows))
    assert len(found["answers"]) == 2


@pytest.mark.parametrize(("kind", "told"), [("text", 'declared["tokenizer"] = "network"'), ("image", "`decode_all`")])
def test_the_card_of_an_adapted_network_says_what_it_reads(kind: str, told: str) -> None:
    shape, tokenizer = ([16], "ab" * 32) if kind == "text" else ([3, 64, 64], "")
    schema = SCHEMA.to_dict() | {"kind": kind, "shape": shape, "tokenizer": tokenizer, "feature_names": []}
    assert told in files(card=card(schema=schema))["README.md"].decode()
