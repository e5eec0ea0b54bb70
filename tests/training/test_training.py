"""Training from plain tensors: the loss of a record, what is stated, and the code that a run depends on."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equidp.accounting.epsilon import epsilon
from equidp.accounting.events import Event
from equidp.accounting.plan import Plan, Segment
from equidp.accounting.trials import Trials
from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.algorithms.dpsgd_quantile import QuantileCount
from equidp.data.records import Membership, Records, Schema, Split
from equidp.data.splitting import split
from equidp.errors import EquidpError
from equidp.mechanism.algorithm import Outcome
from equidp.mechanism.parts import Added, FlatClip, Part, Public, Schedule, StepFacts, WeightRule
from equidp.parameters import DataSettings, ModelSettings, PrivacySettings, TrainingSettings
from equidp.pipelines.training.nodes import plan_training
from equidp.reporting.privacy_report import DECIDING, UNPROTECTED, privacy_report
from equidp.system import installed
from equidp.training import TrainingRequest, plan_run, predict, prepare, privacy_statement, record_loss, train_model
from equidp.training.conclusion import Trained

pytestmark = pytest.mark.usefixtures("coarse")

CPU = torch.device("cpu")


def test_a_records_loss_is_weighed_by_its_own_class_alone() -> None:
    outputs, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 1.0]]), torch.tensor([0, 1, 1])
    plain = record_loss(None, ("ill", "well"), CPU)(outputs, labels)
    loss = record_loss((2.0, 0.25), ("ill", "well"), CPU)  # whose mean over these labels is not 1
    torch.testing.assert_close(loss(outputs, labels), plain * torch.tensor([2.0, 0.25, 0.25]))
    torch.testing.assert_close(loss(outputs[:1], labels[:1]), 2.0 * plain[:1])


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0, 3.0)])
def test_weights_that_are_not_one_per_class_are_refused(weights: tuple[float, ...]) -> None:
    words = rf"class_weights has {len(weights)} numbers; give one for each of the 2 classes, in this order: ill, well\."
    with pytest.raises(EquidpError, match=words):
        record_loss(weights, ("ill", "well"), CPU)


PLAN = Plan(records=120, batch_size=10, epochs=3, groups=2, delta=1e-5, noise_multiplier=1.0)  # 36 steps


def stated(*spent: Event, secure: bool = False, diagnostics: bool = False) -> dict[str, Any]:
    """The privacy statement of a dpsgd run that charged these events."""
    return privacy_statement(
        algorithm_settings("dpsgd").build(),
        PLAN,
        Outcome(spent, 36, 36),
        privacy=PrivacySettings(noise_multiplier=1.0, secure=secure),
        training=TrainingSettings(diagnostics=diagnostics),
        seed=7,
    )


@pytest.mark.parametrize(
    "spent",
    [
        pytest.param((), id="nothing"),
        pytest.param((Event(1 / 12, 1.0, 35),), id="a step too few"),
        pytest.param((Event(1 / 12, 0.9, 36),), id="less noise"),
        pytest.param((Event(1 / 12, 1.0, 36), Event(1.0, 50.0)), id="a release that nobody planned"),
    ],
)
def test_a_ledger_that_is_not_the_plans_has_no_epsilon(spent: tuple[Event, ...]) -> None:
    with pytest.raises(EquidpError, match="The ledger differs from the plan"):
        stated(*spent)


def test_to_resume_without_a_workplace_is_no_second_training_in_silence() -> None:
    with pytest.raises(EquidpError, match="resume=True needs the workplace"):
        TrainingRequest(
            algorithm_settings("dpsgd").build(), PLAN, grouping="class", model=ModelSettings(name="logistic"),
            privacy=PrivacySettings(noise_multiplier=1.0), training=TrainingSettings(), seed=0, resume=True,
        )  # fmt: skip


def test_a_run_that_protects_units_draws_units_and_leaves_with_the_average_that_was_asked_for() -> None:
    features = torch.rand(60, 2, generator=torch.Generator().manual_seed(0))
    labels = (features[:, 0] > 0.5).long()
    schema = Schema("toy", "tabular", (2,), ("a", "b"), {"class": ("a", "b")}, ("x", "y"))
    part = Records(features, labels, {"class": labels}, schema, unit=torch.arange(60) // 3)
    algorithm = algorithm_settings("dpsgd").build()
    privacy = PrivacySettings(noise_multiplier=1.0, unit="unit")
    settings = TrainingSettings(batch_size=5, average=0.9, device="cpu")
    plan = plan_run(algorithm, units=20, groups=2, privacy=privacy, training=settings)
    request = TrainingRequest(
        algorithm, plan, grouping="class", model=ModelSettings(name="logistic"), privacy=privacy, training=settings,
        seed=0,
    )  # fmt: skip
    trainer = prepare(request, Split(part, part, part)).trainer
    assert trainer.population.size == 20
    assert trainer.algorithm == algorithm.averaged(0.9)


def test_steps_that_a_crash_has_charged_twice_are_in_epsilon() -> None:
    planned, again = stated(Event(1 / 12, 1.0, 36)), stated(Event(1 / 12, 1.0, 40))
    assert planned["epsilon"] == epsilon([Event(1 / 12, 1.0, 36)], 1e-5).value
    assert again["epsilon"] == epsilon([Event(1 / 12, 1.0, 40)], 1e-5).value > planned["epsilon"]


def test_the_history_of_a_run_that_stops_early_ends_in_its_epsilon() -> None:
    """In that of the cap: an epoch's own ε is less, and that the run has stopped there depended on outputs."""
    features = torch.rand(200, 2, generator=torch.Generator().manual_seed(0))
    labels = (features[:, 0] > 0.5).long()
    schema = Schema("toy", "tabular", (2,), ("a", "b"), {"class": ("a", "b")}, ("x", "y"))
    parts = split(
        Records(features, labels, {"class": labels}, schema), seed=0, public_fraction=0.1, membership="strata"
    )
    # by the paper's count it may take 10 steps, hence 30 candidates, five epochs of them
    options = {"energy_records": 16, "max_rejections": 2, "stop_on": "published_epsilon", "published_epsilon": 6.0}
    algorithm = algorithm_settings("sa_dpsgd", options).build()
    privacy, settings = PrivacySettings(noise_multiplier=1.0), TrainingSettings(epochs=8, batch_size=24, device="cpu")
    plan = plan_run(algorithm, units=len(parts.train), groups=2, privacy=privacy, training=settings)
    request = TrainingRequest(
        algorithm, plan, grouping="class", model=ModelSettings(name="logistic"), privacy=privacy, training=settings,
        seed=0,
    )  # fmt: skip
    trained = train_model(request, parts, progress=False)
    path, capped = trained.history["epsilon"], [Event.from_dict(event) for event in trained.privacy["charged"]]
    assert len(path) < 5
    assert capped == [Event(1 / 6, 1.0, 30)]
    assert path.iloc[-1] == trained.privacy["epsilon"] == epsilon(capped, 1e-5).value
    assert path.is_monotonic_increasing
    assert repr(trained) == "<Trained by sa_dpsgd, 2 epochs: ε ≤ 6.690 at δ=1e-05>"


def test_an_energy_of_test_records_is_told_and_refused_where_a_run_is_released() -> None:
    features = torch.rand(60, 2, generator=torch.Generator().manual_seed(0))
    labels = (features[:, 0] > 0.5).long()
    schema = Schema("toy", "tabular", (2,), ("a", "b"), {"class": ("a", "b")}, ("x", "y"))
    parts = split(Records(features, labels, {"class": labels}, schema), seed=0, membership="strata")
    settings = TrainingSettings(epochs=2, batch_size=24, device="cpu")

    def trained(energy: str, parts: Split, *, secure: bool = False) -> Trained:
        privacy = PrivacySettings(noise_multiplier=1.0, secure=secure)
        algorithm = algorithm_settings("sa_dpsgd", {"energy_records": 16, "energy": energy}).build()
        plan = plan_run(algorithm, units=len(parts.train), groups=2, privacy=privacy, training=settings)
        request = TrainingRequest(
            algorithm, plan, grouping="class", model=ModelSettings(name="logistic"), privacy=privacy,
            training=settings, seed=0,
        )  # fmt: skip
        return train_model(request, parts, progress=False)

    by_test, by_public = trained("test", parts), trained("public", dataclasses.replace(parts, public=parts.test))
    assert by_test.history.equals(by_public.history)  # the same decisions
    assert any("loss of *test* records decided" in told for told in by_test.privacy["releases"])
    assert not any("*test*" in told for told in by_public.privacy["releases"])
    assert by_test.privacy["test_records_decide"] is True
    assert "test_records_decide" not in by_public.privacy
    assert DECIDING in (told := privacy_report(by_test.privacy))
    assert UNPROTECTED.format(part="test") not in told
    with pytest.raises(EquidpError, match="not in a secure run"):
        trained("test", parts, secure=True)


@pytest.mark.parametrize("of", [{"secure": True}, {"evaluation": {"epsilon": 1.0}}])
def test_an_energy_of_test_records_is_refused_before_anything_is_charged(of: dict[str, Any]) -> None:
    """A run is planned before it is entered in its data set's ledger, from which nothing is removed."""
    algorithm = algorithm_settings("sa_dpsgd", {"energy": "test"}).build()
    privacy = PrivacySettings.model_validate({"noise_multiplier": 1.0, **of})
    with pytest.raises(EquidpError, match="energy=test chooses steps by test records"):
        plan_run(algorithm, units=100, groups=2, privacy=privacy, training=TrainingSettings(batch_size=10))


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("sa_dpsgd", {}, "the public part"),
        ("sa_dpsgd", {"energy": "test"}, "the test part"),
        ("dpsgd", {}, None),
        # whose records chose, and the trained model was said to have ε for them
        ("dpsgd", {"law": "geometric", "mean": 5.0}, "a part whose exact figures chose"),
    ],
)
def test_epsilon_is_not_said_to_hold_for_tables_that_differ_in_an_unprotected_record(
    name: str, options: dict[str, Any], parts: str | None
) -> None:
    trials = Trials(**options) if "law" in options else Trials()
    algorithm = algorithm_settings(name, {} if "law" in options else options).build()
    plan = dataclasses.replace(PLAN, trials=trials)
    spent = Outcome(algorithm.events(plan), plan.steps, plan.steps)
    settings = {"privacy": PrivacySettings(noise_multiplier=1.0), "training": TrainingSettings(), "seed": 0}
    drawn = Membership("hash", key="seed=0", records=plan.records)
    found = privacy_statement(algorithm, plan, spent, public=30, membership=drawn, **settings)
    (said,) = (text for text in found["assumptions"] if "ε holds for tables too" in text)
    assert f"unless the key puts that record into {parts}," in said if parts else "unless" not in said


def test_under_a_law_of_trials_the_statement_assumes_a_score_of_records_that_nobody_trains_on() -> None:
    """By the test figures of trials that draw their test parts anew, records would choose that others protect."""
    algorithm = algorithm_settings("dpsgd").build()
    privacy = PrivacySettings(noise_multiplier=1.0, trials_law="geometric", trials_mean=5.0)
    plan = dataclasses.replace(PLAN, trials=privacy.trials)
    spent = Outcome(algorithm.events(plan), plan.steps, plan.steps)
    found = privacy_statement(algorithm, plan, spent, privacy=privacy, training=TrainingSettings(), seed=0)
    assert any("measured on records that none of them trains on" in text for text in found["assumptions"])
    assert any("settings of each at random from one list" in text for text in found["assumptions"])


@pytest.mark.parametrize("trials", [{"max_trials": 4}, {"trials_law": "geometric", "trials_mean": 5.0}])
def test_the_statement_assumes_trials_of_the_same_events_where_epsilon_is_of_such(trials: dict[str, Any]) -> None:
    """It said `at most this run's ledger`, which tells nothing of fewer steps at another rate; such may cost more."""
    algorithm, privacy = algorithm_settings("dpsgd").build(), PrivacySettings(noise_multiplier=1.0, **trials)
    plan = dataclasses.replace(PLAN, trials=privacy.trials)
    spent = Outcome(algorithm.events(plan), plan.steps, plan.steps)
    found = privacy_statement(algorithm, plan, spent, privacy=privacy, training=TrainingSettings(), seed=0)
    assert any("the same sampling rate, noise and steps" in text for text in found["assumptions"])
    assert "sampling rate, noise and steps of this one" in privacy_report(found).replace("\n", " ")


@pytest.mark.parametrize(("name", "told"), [("sa_dpsgd", 30), ("dpsgd", 0)])
def test_a_public_part_is_told_of_where_it_is_used(name: str, told: int) -> None:
    """Of others it would be untrue, and its size, a share of all records, tells DPIS's N, which may be private."""
    algorithm = algorithm_settings(name).build()
    settings = {"privacy": PrivacySettings(noise_multiplier=1.0), "training": TrainingSettings(), "seed": 7}
    spent = Outcome(algorithm.events(PLAN), 36, 36)
    assert privacy_statement(algorithm, PLAN, spent, public=30, **settings)["public_records"] == told


@pytest.mark.parametrize(("options", "declared"), [({}, False), ({"declared_records": 100}, True)])
def test_a_number_of_records_that_stands_for_the_private_one_is_not_stated_as_theirs(
    options: dict[str, Any], declared: bool
) -> None:
    """Of DPIS's N_0 it was said that so many were trained on, and that their number was public."""
    algorithm = algorithm_settings("dpis", options).build()
    settings = {"privacy": PrivacySettings(noise_multiplier=1.0), "training": TrainingSettings(), "seed": 7}
    spent = Outcome(algorithm.sampler.releases(algorithm.adapt(PLAN)), 0, 0)
    facts = privacy_statement(algorithm, PLAN, spent, **settings)
    assert (facts["records"], facts["records_declared"]) == (100 if declared else 120, declared)
    for text in (facts["assumptions"][0], privacy_report(facts)):
        assert ("how many there are is protected" in text) == declared
    assert ("(120 of them)" in privacy_report(facts)) == (not declared)
    assert ("number of training records (120)" in facts["assumptions"][0]) == (not declared)


def test_exact_figures_and_predictable_noise_are_stated() -> None:
    spent = Event(1 / 12, 1.0, 36)
    plain, watched = stated(spent, secure=True), stated(spent, diagnostics=True)
    assert (plain["diagnostics_published"], watched["diagnostics_published"]) == ([], ["nonprivate/*"])
    assert (plain["secure"], plain["seed"]) == (True, None)
    assert (watched["secure"], watched["seed"]) == (False, 7)


@pytest.mark.parametrize(
    ("trials", "steps", "bounds"),
    [
        pytest.param(Trials(), 36, True, id="one training"),
        pytest.param(Trials(), 100, False, id="64 steps again"),
        pytest.param(Trials(20), 36, False, id="one of twenty"),
        pytest.param(Trials(1, "geometric", 3.0), 36, False, id="the best of some"),
    ],
)
def test_the_published_figure_of_one_training_is_no_bound_on_more(trials: Trials, steps: int, bounds: bool) -> None:
    plan, spent = dataclasses.replace(PLAN, trials=trials), Outcome((Event(1 / 12, 1.0, steps),), 36, 36)
    settings: dict[str, Any] = {"privacy": PrivacySettings(noise_multiplier=1.0), "training": TrainingSettings()}
    found = privacy_statement(algorithm_settings("dpsgd").build(), plan, spent, **settings, seed=7)
    assert found["epsilon_published"]["guarantee"] is bounds
    assert bounds == (found["epsilon_published"]["value"] >= found["epsilon"])


@pytest.mark.parametrize("library", ["dp-accounting", "kymatio", "numpy", "scipy", "torchvision"])
def test_another_version_of_what_sets_sums_and_noise_is_other_code(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    known = installed.version
    monkeypatch.setattr(installed, "version", lambda name: "another" if name == library else known(name))
    assert installed._code_digest() != installed.CODE_DIGEST


class BoundTooSmall(FlatClip):
    def bound(self, public: Public) -> Tensor:
        return public["clip_norm"] / 2


class LooksAtOthers(FlatClip):
    def weights(self, norms: Tensor, public: Public) -> Tensor:
        return (public["clip_norm"] / norms.max()).clamp(max=1.0).expand(len(norms))


class Negative(FlatClip):
    def weights(self, norms: Tensor, public: Public) -> Tensor:
        return -super().weights(norms, public)


class OneForAll(FlatClip):
    def weights(self, norms: Tensor, public: Public) -> Tensor:
        return super().weights(norms, public).sum()


class BrokenInOnePlace(FlatClip):
    """Whole from 1.7 to 1.75 times the bound."""

    def weights(self, norms: Tensor, public: Public) -> Tensor:
        share = norms / public["clip_norm"]
        return torch.where((share > 1.7) & (share < 1.75), 1.0, super().weights(norms, public))


class BoundOfItsOwn(FlatClip):
    """Bounds by a number of its own, and weighs by the carried one."""

    own: float = 1.0

    def bound(self, public: Public) -> Tensor:
        return torch.full_like(public["clip_norm"], self.own)


class Rising(Schedule):
    def segments(self, plan: Plan) -> tuple[Segment, ...]:
        return (Segment(plan.steps - 4), Segment(3, clip=5.0), Segment(1))


class Louder(Schedule):
    def segments(self, plan: Plan) -> tuple[Segment, ...]:
        return (Segment(plan.steps - 4), Segment(4, noise=20.0))


class NineTenths(QuantileCount):
    """Its noise stays, and what is charged is so much of the gradients': enough where these have less noise."""

    def noise(self, plan: Plan) -> float:
        return 12.0

    def joint_noise(self, rule: WeightRule, plan: Plan, noise_multiplier: float) -> float:
        return 0.9 * noise_multiplier


class HalfTheRun(Schedule):
    def segments(self, plan: Plan) -> tuple[Segment, ...]:
        return (Segment(plan.steps // 2),)


def planned(name: str = "dpsgd", epsilon: float | None = None, **parts: Part) -> Plan:
    algorithm = dataclasses.replace(algorithm_settings(name).build(), **parts)
    noise = {"noise_multiplier": 1.0} if epsilon is None else {"epsilon": epsilon}
    privacy, settings = PrivacySettings(**noise), TrainingSettings(epochs=3, batch_size=10)
    return plan_run(algorithm, units=100, groups=3, privacy=privacy, training=settings)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (BoundTooSmall(), r"lets a record add 1, more than the 0\.5 of its `bound`"),
        (LooksAtOthers(), "weighs a record by the others of its batch"),
        (Negative(), "gives weights that are below 0"),
        (OneForAll(), r"gives weights of shape \(\) for 2200 records"),
        (BrokenInOnePlace(), r"lets a record add 1\.7\d*, more than the 1 of its `bound`"),
    ],
)
def test_a_weight_rule_that_breaks_its_promise_is_refused_before_an_epsilon_is_told(
    rule: FlatClip, reason: str
) -> None:
    with pytest.raises(EquidpError, match=f"the weight rule {type(rule).__name__} {reason}"):
        planned(weights=rule)


def test_a_plan_of_another_run_is_no_way_around_the_trial() -> None:
    """Such as one that was written before the rule was edited."""
    features, labels = torch.rand(60, 2, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2
    schema = Schema("toy", "tabular", (2,), ("a", "b"), {"class": ("a", "b")}, ("x", "y"))
    part = Records(features, labels, {"class": labels}, schema)
    broken = dataclasses.replace(algorithm_settings("dpsgd").build(), weights=BoundTooSmall())
    privacy, settings = PrivacySettings(noise_multiplier=1.0), TrainingSettings(batch_size=5, device="cpu")
    plan, model = Plan(60, 5, 2, 2, 1e-5, 1.0), ModelSettings(name="logistic")
    request = TrainingRequest(broken, plan, "class", model=model, privacy=privacy, training=settings, seed=0)
    with pytest.raises(EquidpError, match="the weight rule BoundTooSmall lets a record add 1, more than"):
        prepare(request, Split(part, part, part))


class KeepsWhatItScores(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.seen = self.seen + x.mean(0)
        return super().forward(x)


def test_a_model_that_keeps_what_it_scores_is_refused() -> None:
    """Test records, which `privacy.evaluation.epsilon` may protect, would leave with it."""
    with pytest.raises(EquidpError, match="'seen' of the model or its loss changes in a forward pass"):
        predict(KeepsWhatItScores(), torch.ones(5, 2))


def test_equal_records_have_equal_scores_in_noised_figures_wherever_they_stand() -> None:
    """Of 335 at once, as many as such wide records allow, a processor may round the last three otherwise."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(50_000, 1), nn.Sigmoid(), nn.Linear(1, 2))
    for _ in range(10):
        assert len(predict(network, torch.randn(1, 50_000).expand(336, -1), alike=True).unique(dim=0)) == 1


def test_a_bound_is_tried_in_every_kind_of_step() -> None:
    assert planned(weights=BoundOfItsOwn()).steps
    with pytest.raises(EquidpError, match=r"BoundOfItsOwn lets a record add 5, more than the 1 of its `bound`"):
        planned(weights=BoundOfItsOwn(), schedule=Rising())


def test_what_is_charged_is_tried_at_the_noise_of_every_kind_of_step_and_at_the_one_that_is_solved_for() -> None:
    assert planned("dpsgd_quantile", side_release=NineTenths()).steps
    for other in ({"schedule": Louder()}, {"epsilon": 0.01}):
        with pytest.raises(EquidpError, match="the side release NineTenths lets a record of norm"):
            planned("dpsgd_quantile", side_release=NineTenths(), **other)


class ReachesFurther(FlatClip):
    """Says of a short gradient that it adds a tenth of what it adds."""

    def reach(self, unit: str, upto: float) -> float:
        return 0.1 * upto


class CountsAllAsFew(QuantileCount):
    """Counts everybody, and says that only short gradients are counted."""

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        return torch.full((1,), float(len(norms)))

    def added(self) -> tuple[Added, ...]:
        return Added(1.0, self.counts_below), Added(0.0)


class CountsTwice(QuantileCount):
    """Its sensitivity is 2."""

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        return 2 * super().statistic(norms, groups, public, plan)


class CountsOthersToo(QuantileCount):
    """What a record moves depends on who else is there."""

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        return super().statistic(norms, groups, public, plan) * len(norms)


SHORT = {"counts_below": 0.6, "count_noise_multiplier": 1.25}


@pytest.mark.parametrize(
    "parts",
    [
        {"weights": ReachesFurther(), "side_release": QuantileCount(counts_below=0.9, count_noise_multiplier=1.0)},
        {"side_release": CountsAllAsFew(**SHORT)},
        {"side_release": CountsTwice(**SHORT)},
        {"side_release": CountsTwice(count_noise_multiplier=50)},
        {"side_release": CountsOthersToo()},
    ],
)
def test_a_side_release_that_breaks_its_promise_is_refused_before_an_epsilon_is_told(parts: dict[str, Part]) -> None:
    name = type(parts["side_release"]).__name__
    with pytest.raises(EquidpError, match=f"the side release {name} lets a record of norm .* in group . move it and"):
        planned("dpsgd_quantile", **parts)


class NotClamped(QuantileCount):
    """Leads the bound by a share that noise may carry below 0."""

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        return {"clip_norm": public["clip_norm"] * noised.mean()}


class Divides(QuantileCount):
    """By a count that noise may make 0."""

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        return {"clip_norm": noised.sum() / noised.sum()}


class Misspelt(QuantileCount):
    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        return {"clip_nrom": public["clip_norm"]}


class OfOne(QuantileCount):
    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        return {"clip_norm": 0.1 + noised.clamp(0, 1)}


class Forgets(QuantileCount):
    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        return {}


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        (NotClamped(), r"makes clip_norm = -?0\.0 of the noised statistic .*clamp what `later` and `now` make"),
        (Divides(), r"makes clip_norm = nan of the noised statistic \[0\.0\]"),
        (Misspelt(), r"returns 'clip_nrom' in `later`, which it does not declare. Did you mean 'clip_norm'\?"),
        (OfOne(), r"makes 'clip_norm' of shape \(1,\), and must make it of \(\) for all records, or of \[3\]"),
        (Forgets(), "declares 'clip_norm', and `later` does not return it"),
    ],
)
def test_a_side_release_whose_values_bound_nothing_is_refused(release: QuantileCount, reason: str) -> None:
    with pytest.raises(EquidpError, match=f"the side release {type(release).__name__} {reason}"):
        planned("dpsgd_quantile", side_release=release)


class Cautious(QuantileCount):
    """Says that a record moves the count by ten."""

    def sensitivity(self) -> float:
        return 10.0


class FarBound(FlatClip):
    def bound(self, public: Public) -> Tensor:
        return 10 * public["clip_norm"]


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"weights": FarBound()}, "moves more than 0.1 of what the weight rule FarBound is charged for"),
        (
            {"side_release": Cautious(count_noise_multiplier=0.5)},
            "of what the side release Cautious with the gradients is charged for",
        ),
        ({}, ""),
    ],
)
def test_a_bound_that_no_record_comes_near_is_told_of(parts: dict[str, Part], told: str, caplog) -> None:
    planned("dpsgd_quantile", **parts)
    assert told in caplog.text
    assert bool(caplog.text) == bool(told)


def test_a_bound_that_noise_carried_below_zero_lets_nobody_in() -> None:
    public = {"clip_norm": torch.tensor([0.5, -3.0])}
    assert FlatClip().weights(torch.tensor([1.0, 2.0]), public).tolist() == [0.5, 0.0]


def test_a_schedule_of_other_steps_than_the_run_is_refused() -> None:
    with pytest.raises(EquidpError, match=r"HalfTheRun come to 15 steps where the run has 30"):
        planned(schedule=HalfTheRun())


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_keeps_its_promises(name: str) -> None:
    assert planned(name).steps


def test_settings_are_not_the_algorithm_that_they_build() -> None:
    with pytest.raises(EquidpError, match=r"no algorithm: build one.*\.build\(\)"):
        plan_run(
            algorithm_settings("dpsgd"), units=100, groups=2, privacy=PrivacySettings(noise_multiplier=1.0),
            training=TrainingSettings(batch_size=10),
        )  # fmt: skip


TRIALS = {"law": {"trials_law": "geometric", "trials_mean": 5.0}, "cap": {"max_trials": 5}, "one": {}}


@pytest.mark.parametrize("trials", sorted(TRIALS))
@pytest.mark.parametrize(
    ("drawn", "moves"),
    [
        ({}, True),  # the seed is the key
        ({"membership": "strata"}, True),
        ({"key": "2026"}, False),
        ({"provided": True}, False),
        ({"provided": True, "evaluate_on": "validation"}, True),
    ],
)
def test_trials_whose_seeds_draw_other_test_records_are_refused_under_a_law_and_warned_of_under_a_cap(
    drawn: dict[str, Any], moves: bool, trials: str, caplog: pytest.LogCaptureFixture
) -> None:
    given, kept = drawn.get("provided", False), {k: v for k, v in drawn.items() if k != "provided"}
    labels = torch.arange(200) % 2
    schema = Schema("toy", "tabular", (1,), ("a", "b"), {"class": ("a", "b")}, ("x",))
    records = Records(
        torch.arange(200.0)[:, None], labels, {"class": labels}, schema,
        part=(torch.arange(200) % 4 == 0).byte() if given else None,
    )  # fmt: skip

    def planned_by(*, secure: bool) -> dict[str, Any]:
        settings = SimpleNamespace(
            algorithm=lambda name: algorithm_settings(name).build(),
            data=DataSettings(**kept),
            privacy=PrivacySettings(noise_multiplier=2.0, secure=secure, delta=1e-5, **TRIALS[trials]),
            training=TrainingSettings(epochs=1, batch_size=20),
        )
        return plan_training(split(records, seed=0, **kept).train, settings, algorithm="dpsgd")

    logging.getLogger("equidp").propagate = True
    refused = pytest.raises(EquidpError, match=r"trials_law=geometric does not hold here: .*one data\.key for all")
    with refused if moves and trials == "law" else contextlib.nullcontext():
        planned_by(secure=False)
    caplog.clear()
    planned_by(secure=True)
    assert any("one data.key for all trials" in r.message for r in caplog.records) == (moves and trials != "one")
