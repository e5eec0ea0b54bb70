"""Canaries: each has the gradient it should have, disturbs nothing else, and gives away a mechanism that lies."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.audit.toy import HalfNoise, ThirdNoise, algorithm_of, linear, records, setup_of
from tests.thorough import ONE_OF_EACH, first
from torch import nn

from equidp.algorithms import ALGORITHMS
from equidp.audit import AuditSettings, one_run
from equidp.audit.canaries import (
    CanaryModel,
    Listener,
    canary_loss,
    coins,
    gradient_scores,
    input_scores,
    joined,
    mislabelled,
    strongest_norm,
    verdict,
    with_canaries,
)
from equidp.audit.run import audited_delta, claimed
from equidp.audit.setup import TrainingSetup
from equidp.data.records import Records, Schema
from equidp.gradients.engine import GradientEngine
from equidp.mechanism.augmentation import Augmentation
from equidp.mechanism.noise import SeededRandom
from equidp.mechanism.parts import FlatClip
from equidp.mechanism.secure import SecureRandom

pytestmark = pytest.mark.usefixtures("coarse")

PRIVATE = [name for name in ALGORITHMS if name != "sgd"]
SETTINGS = AuditSettings()
CANARIES = 10_000
FEWER = {"psasc_momentum_gd": 2_000}
"""It keeps a vector per record: ten thousand canaries would be ten thousand times ten thousand numbers."""

WORSE = frozenset({"psasc_momentum_gd", "dpis", "asc"})
"""Where half the noise is not enough to see: with few canaries, and for budgets that are a fifth looser than PLD."""


def _bound(name: str, source: type[SeededRandom], seed: int = 1) -> tuple[float, float]:
    """(lower bound, claim) of an audit with gradient canaries."""
    how = setup_of(name)
    canaries = FEWER.get(name, CANARIES)
    included = coins(canaries, seed, "test")
    scores = gradient_scores(how, records(60, 1), included, source(seed, "cpu"))
    delta = audited_delta(how, SETTINGS, canaries)
    found = verdict(scores, included, guesses=SETTINGS.guesses_of(canaries), delta=delta)
    return found.epsilon_lower_bound, claimed(how, found.delta)


class TestVerdict:
    """Guessing by rank."""

    def test_delta_may_reveal_canaries_that_are_not_guessed(self) -> None:
        included = torch.arange(1000) >= 500
        found = verdict(torch.arange(1000.0), included, guesses=20, delta=1e-4)
        assert found.correct == 20
        assert found.epsilon_lower_bound == one_run.epsilon_lower_bound(1000, 20, 20, 1e-4)
        assert found.epsilon_lower_bound < one_run.epsilon_lower_bound(20, 20, 20, 1e-4) - 0.01

    def test_by_hand(self) -> None:
        # ranked 5 4 3 2 1 0: the two largest are guessed in (one is), the two smallest out (both are): 3 of 4
        scores = torch.tensor([3.0, 5.0, 0.0, 4.0, 1.0, 2.0])
        included = torch.tensor([True, False, False, True, False, True])
        found = verdict(scores, included, guesses=4, delta=0.0)
        assert (found.canaries, found.guesses, found.correct) == (6, 4, 3)

    def test_guesses_that_are_all_wrong_are_told_as_such(self) -> None:
        included = torch.tensor([True, False] * 10)
        assert verdict((~included).float(), included, guesses=8, delta=0.0).correct == 0

    def test_scores_without_information_show_nothing(self) -> None:
        included = coins(5000, 3, "test")
        assert verdict(torch.zeros(5000), included, guesses=250, delta=1e-6).epsilon_lower_bound == 0.0

    def test_perfect_scores_show_a_lot(self) -> None:
        included = coins(5000, 3, "test")
        assert verdict(included.double(), included, guesses=250, delta=1e-7).epsilon_lower_bound > 4

    def test_coins_are_fair_and_of_their_own(self) -> None:
        assert abs(int(coins(10_000, 1, "gradient").sum()) - 5000) < 200
        assert not torch.equal(coins(100, 1, "gradient"), coins(100, 1, "input"))
        assert torch.equal(coins(100, 1, "input"), coins(100, 1, "input"))


class TestGradientCanaries:
    """The engine's view of them."""

    @pytest.fixture
    def mixed(self) -> tuple[CanaryModel, Records]:
        real = records(6, 1)
        model = CanaryModel(linear(real.schema), real.schema, real.features.dtype, 5)
        return model, with_canaries(real, torch.tensor([True, False, False, True, True]))

    def test_each_has_its_own_direction_and_the_asked_norm(self, mixed: tuple[CanaryModel, Records]) -> None:
        model, data = mixed
        model.strength = 7.0
        engine = GradientEngine(model, canary_loss(nn.CrossEntropyLoss(reduction="none")))
        norms = engine.norms(data.features, data.labels)
        assert torch.equal(norms[6:], torch.full((3,), 7.0))
        for position, canary in zip((6, 7, 8), (0, 3, 4), strict=True):
            gradient = engine.weighted_sum(torch.eye(9)[position])
            expected = torch.zeros(engine.dimension)
            expected[1 + canary] = 7.0
            assert torch.equal(gradient, expected)

    def test_real_records_keep_their_gradients(self, mixed: tuple[CanaryModel, Records]) -> None:
        model, data = mixed
        real, loss = records(6, 1), nn.CrossEntropyLoss(reduction="none")
        plain = GradientEngine(linear(real.schema), loss)
        engine = GradientEngine(model, canary_loss(loss))
        assert torch.allclose(engine.norms(data.features, data.labels)[:6], plain.norms(real.features, real.labels))
        seen = engine.weighted_sum(torch.tensor([1.0] * 6 + [0.0] * 3))
        assert torch.equal(seen[:6], torch.zeros(6))
        assert torch.allclose(seen[6:], plain.weighted_sum(torch.ones(6)), atol=1e-6)

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
    def test_numbers_and_features_survive_the_packing(self, dtype: torch.dtype) -> None:
        schema = Schema("x", "image", (1, 2, 2), ("a", "b"), {"class": ("a", "b")})
        features = torch.arange(8).reshape(2, 1, 2, 2).to(dtype)
        real = Records(features, torch.tensor([0, 1]), {"class": torch.tensor([0, 1])}, schema)
        seen: list[torch.Tensor] = []

        class Inner(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                seen.append(x)
                return torch.zeros(len(x), 2)

        model = CanaryModel(Inner(), schema, dtype, 70_000)
        nn.init.normal_(model.table.weight)
        included = torch.zeros(70_000, dtype=torch.bool)
        included[[0, 300, 69_999]] = True
        data = with_canaries(real, included)
        outputs = model(data.features)
        assert seen[0].dtype == dtype
        assert torch.equal(seen[0][:2], features)
        assert outputs[:, -2].tolist() == [1, 1, 0, 0, 0]
        assert torch.equal(outputs[2:, -1], model.table.weight[[1, 301, 70_000], 0])
        assert (outputs[:2, -1] == 0).all()

    def test_canaries_are_spread_over_groups_and_units_of_their_own(self) -> None:
        real = dataclasses.replace(records(6, 1), unit=torch.tensor([0, 0, 1, 1, 2, 2]))
        data = with_canaries(real, torch.ones(9, dtype=torch.bool))
        assert torch.bincount(data.groups["sex"][6:]).tolist() == [3, 3, 3]
        assert data.unit is not None
        assert len(data.unit.unique()) == 3 + 9

    def test_the_strongest_norm(self) -> None:
        # a clipped gradient counts fully from C on, so the largest norm on offer is as good as C
        assert strongest_norm(FlatClip(), {"clip_norm": torch.tensor(2.0), "scale": torch.tensor(1.0)}) == 1e6

    @pytest.mark.parametrize("name", PRIVATE)
    def test_the_strongest_norm_reaches_the_bound_of_every_rule(self, name: str) -> None:
        algorithm = algorithm_of(name)
        rule = algorithm.weights
        assert rule is not None
        public = {key: torch.tensor(1.0) for key in rule.reads | {"scale"}}
        public |= {key: torch.tensor(float(value)) for key, value in algorithm.initial.items()}
        norm = torch.tensor([strongest_norm(rule, public)])
        assert float(rule.weights(norm, public) * norm) >= 0.999 * float(rule.bound(public).max())

    def test_the_score_is_the_likelihood_ratio(self) -> None:
        model = CanaryModel(nn.Linear(4, 2), records(1, 1).schema, torch.float32, 3)
        listener = Listener(SeededRandom(0, "cpu"), model, rate=0.25)
        listener._hear(torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64), noise_multiplier=2.0)
        x = torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64)
        density = lambda centre: torch.exp(-((x - centre) ** 2) / 8)  # noqa: E731
        expected = torch.log((0.75 * density(0) + 0.25 * density(1)) / density(0))
        assert torch.allclose(listener.scores, expected)

    def test_a_release_is_heard_in_units_of_its_sensitivity(self) -> None:
        model, heard = CanaryModel(nn.Linear(4, 2), records(1, 1).schema, torch.float32, 3), []
        for sensitivity in (1.0, 4.0):
            listener = Listener(SeededRandom(0, "cpu"), model, rate=0.25)
            released = sensitivity * torch.arange(float(listener._dimension))
            listener.perturb(released, sensitivity=sensitivity, noise_multiplier=2.0)
            heard.append(listener.scores)
        assert heard[0].any()
        torch.testing.assert_close(heard[0], heard[1])

    def test_side_releases_are_not_mistaken_for_gradients(self) -> None:
        model = CanaryModel(nn.Linear(4, 2), records(1, 1).schema, torch.float32, 3)
        listener = Listener(SeededRandom(0, "cpu"), model, rate=1.0)
        listener.perturb(torch.ones(4), sensitivity=1.0, noise_multiplier=1.0)
        assert (listener.scores == 0).all()


class TestAuditsCatch:
    """Every algorithm's claim survives an honest audit, and does not survive half the noise."""

    @pytest.mark.parametrize("name", first(PRIVATE, ONE_OF_EACH[::2]))
    def test_the_claim_survives(self, name: str) -> None:
        bound, claim = _bound(name, SeededRandom)
        assert 0.2 < bound <= claim  # the audit sees something, but no more than it may

    @pytest.mark.parametrize("name", first(PRIVATE, ONE_OF_EACH[::2]))
    def test_half_the_noise_is_caught(self, name: str) -> None:
        bound, claim = _bound(name, ThirdNoise if name in WORSE else HalfNoise)
        assert bound > claim

    def test_canaries_stay_themselves_on_views_and_under_an_average(self) -> None:
        plain = setup_of("dpsgd")
        views = Augmentation(2, ("noise",), key=1, shape=(4,), sd=3.0)
        setup = dataclasses.replace(plain, algorithm=plain.algorithm.averaged(0.9), augmentation=views)
        included = coins(400, 1, "gradient")
        on_views, without = (
            gradient_scores(some, records(60, 1), included, SeededRandom(3, "cpu")) for some in (setup, plain)
        )
        torch.testing.assert_close(on_views, without, rtol=1e-3, atol=1e-4)  # their coordinates' releases are the same
        assert on_views[included].mean() > on_views[~included].mean()

    def test_secure_noise_is_heard_too(self) -> None:
        how, included = setup_of("dpsgd"), coins(CANARIES, 1, "test")
        scores = gradient_scores(how, records(60, 1), included, SecureRandom("cpu"))
        found = verdict(scores, included, guesses=500, delta=3e-5)
        assert 0.2 < found.epsilon_lower_bound <= claimed(how, 3e-5)


class TestInputCanaries:
    """Mislabelled records."""

    def test_every_label_is_wrong_and_every_wrong_one_occurs(self) -> None:
        schema = dataclasses.replace(SCHEMA_OF_FIVE)
        labels = torch.arange(1000) % 5
        real = Records(torch.zeros(1000, 1), labels, {"class": labels}, schema)
        wrong = mislabelled(real, seed=2)
        assert (wrong.labels != labels).all()
        assert len(torch.stack([labels, wrong.labels]).unique(dim=1).T) == 20
        assert torch.equal(wrong.groups["class"], wrong.labels)

    def test_a_model_without_privacy_gives_them_away(self) -> None:
        # 40 records in 4 dimensions are soon learnt by heart by a wide model without noise
        how = dataclasses.replace(
            setup_of("sgd", count=40, batch_size=40, epochs=300), build_model=_wide, learning_rate=0.5, optimizer="adam"
        )
        how = dataclasses.replace(how, learning_rate=0.01)
        real, chosen = records(80, 4, signal=False), torch.arange(40)
        included = coins(40, 6, "test")
        scores = input_scores(how, real, chosen, included, SeededRandom(1, "cpu"), seed=1)
        assert scores[included].mean() > scores[~included].mean() + 1.0

    def test_who_is_out_is_out_under_its_own_label_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Were its true label trained on, runs would differ in two records, and honest algorithms be accused."""
        trained: list[Records] = []
        monkeypatch.setattr(
            TrainingSetup, "train", lambda self, data, *_, **__: trained.append(data) or self.build_model(data.schema)
        )
        real, chosen = records(12, 4), torch.tensor([1, 5, 7, 8])
        included = torch.tensor([True, False, False, True])
        input_scores(setup_of("dpsgd"), real, chosen, included, SeededRandom(1, "cpu"), seed=1)
        (seen,) = trained
        there = [bool((seen.features == row).all(1).any()) for row in real.features]
        assert there == [position not in (5, 7) for position in range(12)]
        assert len(seen) == 10

    def test_joining_keeps_units_apart(self) -> None:
        one = dataclasses.replace(records(4, 1), unit=torch.tensor([0, 0, 1, 1]))
        both = joined(one, records(3, 2))
        assert both.unit is not None
        assert both.unit.tolist() == [0, 0, 1, 1, 2, 3, 4]
        assert len(both) == 7


SCHEMA_OF_FIVE = Schema("five", "tabular", (1,), tuple("abcde"), {"class": tuple("abcde")})


def _wide(schema: Schema) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2))
