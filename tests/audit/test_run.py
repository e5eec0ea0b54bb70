"""The whole audit: what it returns, what it refuses, and who turns out to be exposed."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math

import numpy as np
import pytest
import torch
from tests.audit.toy import records, setup_of, split
from torch import nn

from equidp.accounting.trials import Trials
from equidp.algorithms import algorithm_settings
from equidp.audit import AuditSettings, epsilon_lower_bound, run
from equidp.audit.figures import bounds_beside_claims, exposure_by_group
from equidp.audit.page import points
from equidp.data.records import Schema
from equidp.errors import EquidpError

pytestmark = pytest.mark.usefixtures("coarse")

audit = importlib.import_module("equidp.audit.run")  # whose name the package gives to its function
QUICK = AuditSettings(gradient_canaries=2000, input_canaries=50, reference_models=2, resamples=20)


def _wide(schema: Schema) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 256), nn.ReLU(), nn.Linear(256, 2))


@pytest.fixture(scope="module")
def findings() -> dict:
    # labels are pure noise, so whatever the model knows about them it knows by heart
    how = dataclasses.replace(
        setup_of("dpsgd", count=150, batch_size=50, epochs=60), build_model=_wide, optimizer="adam", learning_rate=0.02
    )
    return run(split(150, signal=False), how, QUICK, seed=1, groupings=("class", "sex"))


def test_findings_are_plain_json(findings: dict) -> None:
    assert json.loads(json.dumps(findings)) == findings


def test_canaries_are_told_beside_the_claim(findings: dict) -> None:
    found = findings["gradient_canaries"]
    assert (found["canaries"], found["guesses"], found["delta"]) == (2000, 100, 0.3 / 2000)
    assert found["epsilon_lower_bound"] <= found["epsilon_claimed"] < findings["claim"]["epsilon"] <= 2.0
    assert found["consistent"] is True
    assert found["epsilon_within_reach"] == epsilon_lower_bound(2000, 100, 100, 0.3 / 2000)
    assert found["refutable"] is True
    assert findings["input_canaries"]["refutable"] is False  # two guesses
    assert findings["input_canaries"]["canaries"] == 50


def test_what_the_canaries_achieve_lies_below_the_claimed_curve(findings: dict) -> None:
    curve, found = findings["claim"]["trade_off"], findings["gradient_canaries"]
    assert len(found["achieved"]) == len(audit.FALSE_ALARMS)
    for accused, caught in found["achieved"]:
        # chance, of about 1,000 canaries on either side: the threshold that accuses this share may in truth accuse more
        truly = accused + 4 * math.sqrt(accused * (1 - accused) / 1000)
        allowed = 1 - float(np.interp(truly, curve["false_alarms"], curve["misses"]))
        assert caught <= allowed + 4 * math.sqrt(allowed * (1 - allowed) / 1000)
    drawn = {name: sorted(shown) for name, shown in points(findings).items()}
    assert drawn["gradient canaries"] == found["achieved"]
    assert "loss threshold" not in drawn  # 150 records are too few for a rate at 1 % of false alarms


def test_what_membership_inference_achieves_is_a_point_too(findings: dict) -> None:
    exposure = {"loss": {"overall": {"tpr_at_1_percent_fpr": 0.02}}}
    drawn = points(findings | {"membership": {findings["algorithm"]: exposure}})
    assert drawn["loss threshold"] == [(0.01, 0.02)]


def test_canaries_accused_are_counted_by_hand() -> None:
    scores, included = torch.arange(200.0), torch.arange(200) % 2 == 1
    # those left out score 0, 2, … 198, the members 1, 3, … 199; above the third of the former, 194, lie 2 and 3, and a
    # fourth in 101 would be expected to lie there
    assert audit.achieved(scores, included)[1] == [3 / 101, 0.03]


def test_an_attack_that_sees_nothing_lies_on_blind_guessing() -> None:
    """At 0 % and 0.2 % of false alarms it was drawn with 1 % recognised, above the curve of an honest claim."""
    generator, drawn = torch.Generator().manual_seed(0), []
    for _ in range(2000):
        scores = torch.rand(200, generator=generator)
        drawn.append(audit.achieved(scores, torch.arange(200) % 2 == 1))
    accused, caught = torch.tensor(drawn, dtype=torch.float64).mean(0).T
    assert torch.allclose(caught, accused, rtol=0.1)


def test_membership_leaks_before_privacy_and_not_after(findings: dict) -> None:
    for attack in ("loss", "reference"):
        before, after = (findings["membership"][m][attack]["overall"] for m in ("sgd", "dpsgd"))
        assert before["auc_interval"][0] > 0.55
        assert after["auc_interval"][0] < 0.5 < after["auc_interval"][1]
        assert 130 < before["members"] == before["non_members"] <= 150


def test_intervals_of_membership_know_of_units() -> None:
    part = dataclasses.replace(records(36, 1), unit=torch.arange(36) % 9)
    sides = torch.rand(36, generator=torch.Generator().manual_seed(0)), torch.zeros(36)
    of_units, of_records = (
        audit._exposures(sides, one, one, QUICK, 1, ["sex"]) for one in (part, dataclasses.replace(part, unit=None))
    )
    assert (of_units["overall"]["auc"], of_units["overall"]["members"]) == (None, 36)  # nine units tell too little
    assert of_records["overall"]["auc"] == of_records["groups"]["sex"]["f"]["auc"] == 1.0
    assert of_units["groups"]["sex"]["f"]["auc"] is None


def test_every_group_is_told(findings: dict) -> None:
    groups = findings["membership"]["sgd"]["reference"]["groups"]
    assert list(groups) == ["class", "sex"]
    assert list(groups["sex"]) == ["f", "m", "x"]
    assert sum(found["members"] for found in groups["class"].values()) == 150
    everyone = findings["membership"]["sgd"]["reference"]["overall"]
    assert sum(found["members"] for found in groups["sex"].values()) == everyone["members"]


def test_sides_with_other_shares_of_a_group_are_not_taken_for_a_leak() -> None:
    """Of a large group no more are attacked than of a small one, so that a rare class is half of the members."""
    one, other = records(400, 1), records(400, 2)
    shares = torch.arange(400) < 300, torch.arange(400) < 100  # of class 1
    parts = [dataclasses.replace(part, labels=of.long()) for part, of in zip((one, other), shares, strict=True)]
    parts = [dataclasses.replace(part, groups=part.groups | {"class": part.labels}) for part in parts]
    noise = torch.rand(800, generator=torch.Generator().manual_seed(0))
    sides = noise[:400] - parts[0].labels.float(), noise[400:] - parts[1].labels.float()  # class 1 is hard
    found = audit._exposures(sides, *parts, QUICK, 1, ["class", "sex"])
    assert (found["overall"]["members"], found["overall"]["non_members"]) == (200, 200)
    low, high = found["overall"]["auc_interval"]
    assert low < 0.5 < high
    assert [of["members"] for of in found["groups"]["class"].values()] == [100, 300]
    assert all(abs(of["auc"] - 0.5) < 0.15 for of in found["groups"]["sex"].values() if of["auc"] is not None)


@pytest.mark.parametrize("name", ["dpsgd", "dpis"])
def test_of_declared_trials_the_claim_is_that_of_the_one_that_is_audited(name: str) -> None:
    """Beside what twenty cost together one could have a third of its noise, and nothing was shown."""
    one = setup_of(name)
    trials = dataclasses.replace(one.plan, trials=Trials(cap=20))
    several = dataclasses.replace(one, plan=one.algorithm.calibrated(trials, 3.0))
    stated = several.algorithm.epsilon(several.plan).value
    assert stated == pytest.approx(3.0, rel=0.01)
    assert audit.claimed(several, several.plan.delta) < stated / 2
    alone = dataclasses.replace(one.plan, noise_multiplier=several.plan.noise_multiplier)
    if name == "dpsgd":
        assert audit.claimed(several, 1e-4) == one.algorithm.epsilon(dataclasses.replace(alone, delta=1e-4)).value
    curve = audit.claimed_curve(several)
    assert curve is not None
    assert curve["recognised_at_1_percent"] < 0.2


def test_a_claim_is_refuted_as_soon_as_the_bound_is_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that tell more and more of the coins: the verdict turns with the bound, not some way above the claim."""
    settings = AuditSettings(gradient_canaries=2000, input_canaries=0, membership=False)
    gaps = []
    for blur in (4.0, 1.0, 0.8, 0.7, 0.6, 0.5, 0.0):
        noise = blur * torch.randn(2000, generator=torch.Generator().manual_seed(0))
        monkeypatch.setattr(audit, "gradient_scores", lambda how, train, coins, *_, noise=noise, **__: coins + noise)
        found = run(split(60), setup_of("dpsgd"), settings, seed=1)["gradient_canaries"]
        gaps.append(found["epsilon_lower_bound"] - found["epsilon_claimed"])
        assert found["consistent"] is (gaps[-1] <= 0)
    assert gaps == sorted(gaps)
    assert min(gaps) < 0
    assert any(0 < gap < 0.5 for gap in gaps)


def test_attacks_can_be_left_out() -> None:
    settings = AuditSettings(gradient_canaries=200, input_canaries=0, membership=False)
    found = run(split(60), setup_of("dpsgd"), settings, seed=1)
    assert found["gradient_canaries"]["canaries"] == 200
    assert found["input_canaries"] is None
    assert found["membership"] == {}
    others = AuditSettings(gradient_canaries=0, input_canaries=20, membership=False)
    found = run(split(60), setup_of("dpsgd"), others, seed=1)
    assert found["gradient_canaries"] is None
    assert found["input_canaries"]["canaries"] == 20
    with pytest.raises(EquidpError, match="Every attack is left out"):
        run(split(60), setup_of("dpsgd"), AuditSettings(**settings.model_dump() | {"gradient_canaries": 0}), seed=1)


def test_a_run_without_a_claim_is_not_audited() -> None:
    with pytest.raises(EquidpError, match="nothing to audit"):
        run(split(60), setup_of("sgd"), QUICK, seed=1)


def test_a_run_whose_test_records_decide_on_steps_is_not_audited() -> None:
    """They would pass for records that had no part in the training."""
    annealed = algorithm_settings("sa_dpsgd", {"energy": "test"}).build()
    with pytest.raises(EquidpError, match="energy=test trains with the test records"):
        run(split(60), dataclasses.replace(setup_of("dpsgd"), algorithm=annealed), QUICK, seed=1)


def test_settings_are_validated() -> None:
    assert AuditSettings().guesses_of(10_000) == 500
    for number, told in ((0, "greater than or equal to 2"), (9, "a multiple of 2")):
        with pytest.raises(EquidpError, match=rf"guesses={number} is not valid: Input should be {told}"):
            AuditSettings(guesses=number)
    assert AuditSettings(guesses=900).guesses_of(101) == 100
    assert AuditSettings(delta=1e-6).delta_of(10) == 1e-6
    with pytest.raises(EquidpError, match="even number"):
        AuditSettings(reference_models=3)
    with pytest.raises(EquidpError, match="Unknown setting of AuditSettings 'canarys'"):
        AuditSettings(canarys=3)  # type: ignore[call-arg]


def test_the_bound_is_drawn_beside_the_claim(findings: dict) -> None:
    chart = bounds_beside_claims(findings)
    drawn = {trace.name: dict(zip(trace.x, trace.y, strict=True)) for trace in chart.data}
    assert drawn["claimed"]["gradient canaries"] == findings["gradient_canaries"]["epsilon_claimed"]
    assert drawn["lower bound"]["mislabelled records"] == findings["input_canaries"]["epsilon_lower_bound"]


def test_exposure_is_drawn_per_group(findings: dict) -> None:
    chart = exposure_by_group(findings, "sex")
    drawn = {trace.name: list(trace.y) for trace in chart.data}
    expected = findings["membership"]["dpsgd"]["reference"]["groups"]["sex"]
    assert drawn["dpsgd"] == [expected[name]["auc"] for name in ("f", "m", "x")]
    assert set(drawn) == {"sgd", "dpsgd"}
