"""SA-DPSGD: who is accepted, what a refusal leaves behind, and what is charged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from equidp.accounting.epsilon import epsilon
from equidp.accounting.events import Event, counted
from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.algorithms.sa_dpsgd import published_count
from equidp.errors import EquidpError

pytestmark = pytest.mark.usefixtures("coarse")


def annealer(lab: Any, **options: Any) -> Any:
    """The acceptance of a fresh trainer, which it would not keep alive by itself."""
    trainer = lab.trainer("sa_dpsgd", options)
    trainer.accepting.owner = trainer
    return trainer.accepting


class TestDecision:
    """Golden values of the rule."""

    def coin(self, monkeypatch: pytest.MonkeyPatch, accepting: Any, value: float) -> None:
        monkeypatch.setattr(accepting.owner.random, "uniform", lambda size, stream: torch.tensor([value]))

    def test_the_chance_falls_with_the_change_and_with_every_acceptance(
        self, lab: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Q = 10 before and after the first acceptance (τ = 1), then 20: exp(−0.05·10) = 0.6065, exp(−0.05·20) = 0.3679
        accepting = annealer(lab)
        self.coin(monkeypatch, accepting, 0.6)
        assert accepting.decide(0.05)
        assert accepting.decide(0.05)
        assert accepting.temperature == 20.0
        assert not accepting.decide(0.05)
        self.coin(monkeypatch, accepting, 0.36)
        assert accepting.decide(0.05)
        assert (accepting.accepted, accepting.rejected) == (3, 1)

    def test_no_worse_is_always_accepted(self, lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        accepting = annealer(lab)
        self.coin(monkeypatch, accepting, 0.999999)
        assert accepting.decide(0.0)
        assert accepting.decide(-1e-9)

    def test_after_enough_refusals_in_a_row_anything_is_accepted(self, lab: Any) -> None:
        accepting = annealer(lab, max_rejections=3)
        decisions = [accepting.decide(1e9) for _ in range(8)]
        assert decisions == [False, False, False, True] * 2

    def test_a_resumed_run_has_as_many_refusals_left_and_does_not_begin_again(self, lab: Any) -> None:
        # the cap τ*·(μ_0 + 1) counts on both
        options = {"max_rejections": 3, "stop_on": "published_epsilon", "published_epsilon": 0.1}  # τ* = 1
        first, again, ended = (annealer(lab, **options) for _ in range(3))
        assert [first.decide(1e9) for _ in range(2)] == [False, False]
        again.load_state_dict(first.state_dict())
        assert [again.decide(1e9) for _ in range(2)] == [False, True]
        assert again.finished
        ended.load_state_dict(again.state_dict())
        assert ended.finished
        assert ended.shown() == {"accepted_steps": 1.0, "rejected_steps": 3.0}

    @pytest.mark.parametrize("change", [math.nan, math.inf])
    def test_a_broken_candidate_is_refused(self, lab: Any, change: float) -> None:
        assert not annealer(lab).decide(change)

    def test_frequencies(self, lab: Any) -> None:
        accepting = annealer(lab, max_rejections=10**6)
        taken = []
        for _ in range(4000):
            accepting.accepted = 1
            taken.append(accepting.decide(0.05))
        assert sum(taken) / 4000 == pytest.approx(math.exp(-0.5), abs=0.03)


class TestRefusal:
    """A refused step leaves nothing but its charge."""

    def test_restores_parameters_and_optimiser(self, lab: Any) -> None:
        trainer = lab.trainer("sa_dpsgd", optimizer="adam")
        trainer.run_steps(1)
        before, memory = trainer.engine.flatten(), trainer.state_dict()["optimizer"]
        trainer.accepting.decide = lambda change: False
        trainer.run_steps(1)
        assert torch.equal(trainer.engine.flatten(), before)
        after = trainer.state_dict()["optimizer"]
        assert all(torch.equal(after["state"][k][n], v) for k, e in memory["state"].items() for n, v in e.items())

    def test_restores_momentum_too(self, lab: Any) -> None:
        options = {"update": "outer_momentum", "acceptance": "annealing"}
        trainer = lab.trainer("custom", options)
        trainer.run_steps(1)
        memory = trainer.updating.memory.clone()
        trainer.accepting.decide = lambda change: False
        trainer.run_steps(1)
        assert torch.equal(trainer.updating.memory, memory)

    def test_leaves_the_past_iterates_that_a_record_is_looked_at(self, lab: Any) -> None:
        trainer = lab.trainer("custom", {"contribution": "inner_momentum", "acceptance": "annealing"})
        start = trainer.engine.flatten()
        trainer.accepting.decide = lambda change: True
        trainer.run_steps(1)
        trainer.accepting.decide = lambda change: False
        trainer.run_steps(1)
        (past,) = trainer.contributing.past
        assert torch.equal(past, start)

    def test_is_charged_like_an_acceptance(self, lab: Any) -> None:
        trainer = lab.trainer("sa_dpsgd", plan=lab.plan(epochs=3))
        trainer.accepting.decide = lambda change: False
        trainer.train(progress=False)
        assert trainer.ledger.events == (Event(0.25, 1.0, 12),)

    def test_counts_are_told(self, lab: Any) -> None:
        run = lab.trained("sa_dpsgd", plan=lab.plan(epochs=5), learning_rate=5.0)
        last = run.history[-1]
        assert last["accepted_steps"] + last["rejected_steps"] == 20
        assert last["rejected_steps"] > 0


class TestEnergy:
    """Where J comes from."""

    def test_is_the_public_mean_loss(self, lab: Any) -> None:
        trainer = lab.trainer("sa_dpsgd")
        public = trainer.public_part
        trainer.accepting.begin()
        with torch.no_grad():
            expected = lab.cross_entropy(trainer.model(public.features), public.labels).mean()
        assert trainer.accepting.current == pytest.approx(float(expected), rel=1e-6)

    def test_takes_only_so_many_public_records(self, lab: Any) -> None:
        trainer = lab.trainer("sa_dpsgd")
        public = trainer.public_part
        with torch.no_grad():
            expected = lab.cross_entropy(trainer.model(public.features[:5]), public.labels[:5]).mean()
        assert trainer.public_loss(5) == pytest.approx(float(expected), rel=1e-6)

    def test_a_candidate_is_compared_with_where_the_model_stands_not_with_a_refused_one(self, lab: Any) -> None:
        trainer = lab.trainer("sa_dpsgd")
        trainer.accepting.decide = lambda change: False
        for _ in range(2):
            trainer.run_steps(1)
            assert trainer.accepting.current == trainer.public_loss(1024)

    def test_both_energies_of_a_comparison_are_of_one_loss_where_losses_move(
        self, lab: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        release = {"name": "clip_counts_and_shares", "count_noise_multiplier": 1.0}
        options = {"objective": "logit_adjusted", "side_release": release, "acceptance": "annealing"}
        trainer = lab.trainer("custom", options)
        compared: list[tuple[float, float]] = []

        def decide(change: float) -> bool:
            candidate, after = trainer.public_loss(16), trainer.engine.flatten()
            trainer.engine.load_(before)
            compared.append((change, candidate - trainer.public_loss(16)))
            trainer.engine.load_(after)
            return True

        monkeypatch.setattr(trainer.accepting, "decide", decide)
        for _ in range(3):
            before = trainer.engine.flatten()
            trainer.run_steps(1)
        for change, expected in compared:
            assert change == pytest.approx(expected, abs=1e-6)

    def test_is_refused_without_public_records(self, lab: Any) -> None:
        with pytest.raises(EquidpError, match=r"data\.public_fraction"):
            lab.trainer("sa_dpsgd", public=None)
        assert algorithm_settings("sa_dpsgd").build().needs_public
        assert not algorithm_settings("dpsgd").build().needs_public

    def test_a_private_energy_needs_none_and_is_charged_per_candidate(self, lab: Any) -> None:
        options = {"energy": "private", "energy_records": 20, "energy_noise_multiplier": 7.0}
        run = lab.trained("sa_dpsgd", options, public=None)
        assert run.trainer.ledger.events == (Event(0.25, 1.0), Event(0.5, 7.0)) * 4
        assert run.trainer.algorithm.covers(run.trainer.plan, run.trainer.ledger.events)

    def test_a_private_energy_moves_by_at_most_the_loss_bound(self, lab: Any) -> None:
        # one record joins V: the sum of differences of clipped losses moves by at most c, whatever its losses
        records = lab.records(40)
        records.features[0] = 1e4
        trainer = lab.trainer(
            "sa_dpsgd", {"energy": "private", "energy_records": 40, "loss_bound": 2.0}, records=records, public=None
        )
        records.features[1] = float("nan")
        accepting = trainer.accepting
        accepting.begin()
        trainer.engine.load_(torch.randn(trainer.engine.dimension, generator=torch.Generator().manual_seed(0)) * 5)
        terms = accepting._clipped() - accepting._before
        assert terms.isfinite().all()
        assert float(terms.abs().max()) <= 2.0

    def test_the_noise_of_the_energy_is_that_of_the_charge_times_the_loss_bound(
        self, lab: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = {"energy": "private", "energy_records": 20, "energy_noise_multiplier": 7.0, "loss_bound": 2.5}
        trainer = lab.trainer("sa_dpsgd", options, public=None)
        perturb, noises = trainer.random.perturb, []

        def listen(values: torch.Tensor, **how: Any) -> torch.Tensor:
            if len(values) == 1:
                noises.append(float(how["sensitivity"]) * how["noise_multiplier"])
            return perturb(values, **how)

        monkeypatch.setattr(trainer.random, "perturb", listen)
        trainer.run_steps(2)
        assert noises == [7.0 * 2.5] * 2

    @pytest.mark.parametrize("loss", [math.nan, math.inf])
    def test_a_loss_that_is_no_number_is_the_worst_there_is(self, lab: Any, loss: float) -> None:
        records = lab.records(40)
        records.features[3] = loss
        options = {"energy": "private", "energy_records": 40, "loss_bound": 2.0}
        trainer = lab.trainer("sa_dpsgd", options, records=records, public=None)
        trainer.accepting.begin()
        assert trainer.accepting._before[trainer.accepting._units == 3].tolist() == [2.0]

    def test_a_loss_below_zero_is_taken_as_zero(self, lab: Any) -> None:
        # else a term could come to more than c, whatever bounds it above
        options = {"energy": "private", "energy_records": 40, "loss_bound": 2.0}
        trainer = lab.trainer("sa_dpsgd", options, public=None, loss=lambda outputs, labels: 100 * outputs.sum(1))
        trainer.accepting.begin()
        assert (trainer.accepting._before.min(), trainer.accepting._before.max()) == (0.0, 2.0)

    @pytest.mark.parametrize("contribution", ["gradient", "record_momentum"])
    def test_a_model_in_which_records_meet_is_refused(self, lab: Any, contribution: str) -> None:
        # record_momentum takes every gradient alone, where nobody meets; the losses' sum would move by more than c
        class Centre(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x - x.mean(0)

        options = {
            "sampler": "full_batch",
            "contribution": contribution,
            "acceptance": {"name": "annealing", "energy": "private"},
        }
        model = torch.nn.Sequential(Centre(), torch.nn.Linear(6, 3))
        trainer = lab.trainer("custom", options, model=model, public=None)
        with pytest.raises(EquidpError, match="changes with the other records of its batch"):
            trainer.run_steps(1)

    def test_the_release_is_scaled_to_a_mean(self, lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        options = {"energy": "private", "energy_records": 40}
        trainer = lab.trainer("sa_dpsgd", options, public=None, random=lab.random(noise=0.0))
        seen: list[float] = []
        monkeypatch.setattr(trainer.accepting, "decide", lambda change: seen.append(change) or True)
        everyone = torch.arange(40)
        before = trainer.losses(everyone).clamp(0, 4)
        trainer.run_steps(1)
        after = trainer.losses(everyone).clamp(0, 4)
        assert seen[0] == pytest.approx(float((after - before).mean()), abs=1e-6)

    def test_the_mean_of_the_energy_is_over_the_declared_number_of_records(
        self, lab: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # over the actual one, who has left would show in a decision, without any noise
        options, seen = {"energy": "private", "energy_records": 20}, list[float]()
        for size in (40, 30):
            records = lab.records(40).take(torch.arange(size))
            trainer = lab.trainer("sa_dpsgd", options, records=records, plan=lab.plan(), public=None)
            monkeypatch.setattr(trainer.random, "perturb", lambda values, **how: torch.ones_like(values))
            monkeypatch.setattr(trainer.accepting, "decide", lambda change: seen.append(change) or True)
            trainer.accepting.begin()
            trainer.accepting.accept()
        assert seen == [1 / 20, 1 / 20]


class TestStopping:
    """The paper's stopping rule, and the cap that stands for it."""

    def test_the_papers_mnist_setting(self) -> None:
        # published 3 at σ = 1.23, B = 512; the sound figure of the cap τ*·11 is above 9
        options = {"stop_on": "published_epsilon", "published_epsilon": 3.0}
        algorithm = algorithm_settings("sa_dpsgd", options).build()
        plan = Plan(60000, 512, 500, 10, 1e-5, 1.23)
        rate = algorithm.sampler.sampling_rate(plan)
        allowed = algorithm.acceptance.allowed_steps(plan, rate)
        assert published_count(plan, rate, allowed) <= 3.0 < published_count(plan, rate, allowed + 1)
        (event,) = algorithm.events(plan)
        assert event.count == 11 * allowed
        assert epsilon([event], 1e-5).value == pytest.approx(9.3, abs=0.1)

    def test_stops_at_the_allowed_count_and_is_covered_by_its_cap(self, lab: Any) -> None:
        plan = lab.plan(records=400, epochs=2)
        six = published_count(plan, plan.sampling_rate, 6) + 1e-6
        options = {"stop_on": "published_epsilon", "published_epsilon": six}
        run = lab.trained("sa_dpsgd", options, plan=plan)
        algorithm = run.trainer.algorithm
        assert run.trainer.outcome().accepted_steps == 6
        assert run.trainer.finished
        assert run.trainer.steps_done < plan.steps
        assert algorithm.events(plan) == (Event(0.025, 1.0, 66),)
        outcome = run.trainer.outcome()
        assert algorithm.covers(plan, outcome.events, outcome.steps)
        assert not algorithm.covers(plan, outcome.events, outcome.steps - 1)  # the cap is not enough for two lives
        assert not algorithm.fixed
        assert len(algorithm.epsilon_path(plan)) == 2
        published = algorithm.published_epsilon(run.trainer.plan, outcome)
        assert published.value == pytest.approx(options["published_epsilon"], abs=1e-5)

    def test_no_epoch_begins_after_the_end(self, lab: Any) -> None:
        options = {"stop_on": "published_epsilon", "published_epsilon": 0.1, "max_rejections": 0}  # τ* = 1
        run = lab.trained("sa_dpsgd", options, plan=lab.plan(records=400, epochs=2))
        assert [row["epoch"] for row in run.history] == [1.0]

    def test_a_loop_of_ones_own_ends_there_too(self, lab: Any) -> None:
        plan = lab.plan(records=400, epochs=2)
        options = {"stop_on": "published_epsilon", "published_epsilon": 0.1, "max_rejections": 0}  # τ* = 1
        trainer = lab.trainer("sa_dpsgd", options, plan=plan)
        trainer.run_steps(plan.steps)
        assert trainer.finished
        assert counted(trainer.ledger.events) == counted(trainer.algorithm.events(plan))

    def test_a_target_cannot_be_solved_for(self, lab: Any) -> None:
        options = {"stop_on": "published_epsilon", "published_epsilon": 3.0}
        with pytest.raises(EquidpError, match=r"privacy\.noise_multiplier"):
            algorithm_settings("sa_dpsgd", options).build().calibrated(lab.plan(), 3.0)

    @pytest.mark.parametrize("options", [{"stop_on": "published_epsilon"}, {"published_epsilon": 3.0}])
    def test_rule_and_figure_belong_together(self, options: dict[str, Any]) -> None:
        with pytest.raises(EquidpError, match=r"sa_dpsgd\.options is not valid: .* belong together"):
            algorithm_settings("sa_dpsgd", options)

    @pytest.mark.parametrize("options", [{"loss_bound": 2.0}, {"energy_noise_multiplier": "5x", "energy": "test"}])
    def test_settings_of_a_private_energy_are_refused_beside_another(self, options: dict[str, Any]) -> None:
        with pytest.raises(EquidpError, match="has no effect unless energy is private"):
            algorithm_settings("sa_dpsgd", options)
        with pytest.raises(EquidpError, match="has no effect unless energy is private"):
            algorithm_settings("custom", {"acceptance": {"name": "annealing", **options}}).build()

    def test_the_published_figure_says_that_it_is_none(self, lab: Any) -> None:
        run = lab.trained("sa_dpsgd", plan=lab.plan(epochs=5), learning_rate=5.0)
        algorithm, plan = run.trainer.algorithm, run.trainer.plan
        published, sound = algorithm.published_epsilon(plan, run.trainer.outcome()), algorithm.epsilon(plan)
        assert not published.guarantee
        assert "no guarantee" in published.formula
        assert published.value < published_count(plan, plan.sampling_rate, 20)
        assert sound.value == epsilon([Event(0.25, 1.0, 20)], 1e-5).value

    def test_a_run_that_took_no_step_has_a_published_figure(self, lab: Any) -> None:
        trainer = lab.trainer("sa_dpsgd")
        trainer.accepting.decide = lambda change: False
        trainer.train(progress=False)
        published = trainer.algorithm.published_epsilon(trainer.plan, trainer.outcome())
        assert "the 0 accepted steps" in published.formula
        assert published.value == published_count(trainer.plan, trainer.sampling_rate, 1)  # no less than one is counted
