"""DPIS: the estimate, the constant length, and the budget that its noise is chosen within."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equidp.accounting.budget import renyi
from equidp.accounting.events import Event
from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.algorithms.budgeted import _best
from equidp.algorithms.dpis import ImportanceSampling
from equidp.errors import EquidpError
from equidp.mechanism.noise import SeededRandom


def gradients(lab: Any, trainer: Any) -> Tensor:
    """`[n, d]` gradients of all records, from one-hot weights."""
    everyone = trainer.population.batch(torch.arange(trainer.population.size))
    trainer.engine.norms(everyone.features, everyone.labels)
    return torch.stack([trainer.engine.weighted_sum(row) for row in torch.eye(trainer.population.size)])


class Released(SeededRandom):
    """Releases these numbers in turn; keeps the exact ones, and how they are noised."""

    def __init__(self, *values: float) -> None:
        super().__init__(0, "cpu")
        self.values, self.heard = list(values), list[tuple[float, float, float]]()

    def perturb(self, values: Tensor, *, sensitivity: Any, noise_multiplier: float) -> Tensor:
        if not self.values:
            return super().perturb(values, sensitivity=sensitivity, noise_multiplier=noise_multiplier)
        self.heard.append((float(values), float(sensitivity), noise_multiplier))
        return torch.full_like(values, self.values.pop(0))


class TestEstimate:
    """What a step adds, and what it is on average."""

    def started(self, lab: Any, clip_norm: float = 1.0, **options: Any) -> Any:
        """A trainer at the start of its first epoch, all noise 0: Ñ = N, K̃ = Σ min(n, C)."""
        trainer = lab.trainer("dpis", {"clip_norm": clip_norm, **options}, random=lab.random(noise=0.0))
        trainer.begin_epoch(0)
        return trainer

    def inclusion(self, trainer: Any, norms: Tensor) -> Tensor:
        """Probability of being drawn and kept."""
        sampling = trainer.sampling
        clipped = torch.minimum(norms.double().clamp(max=sampling.clip), sampling.proposals)
        return sampling.rates() * clipped / sampling.proposals

    def test_everybody_kept_adds_the_same_length(self, lab: Any) -> None:
        trainer = self.started(lab)
        norms = trainer.norms_of_all()
        weights = trainer.weights(norms, torch.zeros(40, dtype=torch.long), trainer.public_values(trainer.segments[0]))
        length = trainer.sampling.norm_sum / 40
        torch.testing.assert_close(weights * norms, torch.full((40,), length), rtol=1e-5, atol=0)
        assert length == pytest.approx(float(norms.clamp(max=1.0).mean()), rel=1e-5)

    def test_the_estimate_is_the_mean_clipped_gradient(self, lab: Any) -> None:
        trainer = self.started(lab)
        g = gradients(lab, trainer)
        norms = g.norm(dim=1)
        chance = self.inclusion(trainer, norms)
        assert (chance <= trainer.sampling.rate * (1 + 1e-9)).all()
        length = trainer.sampling.contribution
        estimate = (chance.float() * length / norms) @ g / trainer.plan.batch_size
        clipped_mean = (norms.clamp(max=1.0) / norms) @ g / 40
        torch.testing.assert_close(estimate, clipped_mean, rtol=1e-4, atol=1e-6)

    def test_outgrown_proposals_bias_it_as_stated(self, lab: Any) -> None:
        # E = (1/Ñ)·Σ g·min(1, C/n, ĝ/n): norms have grown since the proposals were made
        trainer = self.started(lab, clip_norm=100.0)
        trainer.sampling.proposals /= 20
        g = gradients(lab, trainer)
        norms = g.norm(dim=1)
        proposals = trainer.sampling.proposals.float()
        estimate = (self.inclusion(trainer, norms).float() * trainer.sampling.contribution / norms) @ g / 10
        stated = torch.minimum((proposals / norms), torch.ones(40)) @ g / 40
        torch.testing.assert_close(estimate, stated, rtol=1e-4, atol=1e-6)
        assert (proposals < norms).any()

    def test_draws_and_second_coins_have_those_chances(self, lab: Any) -> None:
        trainer = self.started(lab)
        norms = trainer.norms_of_all()
        chance, before = self.inclusion(trainer, norms), trainer.sampling.proposals.clone()
        kept, rounds = torch.zeros(40, dtype=torch.float64), 3000
        for _ in range(rounds):
            draw = trainer.draw()
            kept[draw.units] += trainer.sampling.kept(draw, norms[draw.units]).double()
            trainer.sampling.proposals.copy_(before)
        spread = (chance * (1 - chance) / rounds).sqrt()
        assert ((kept / rounds - chance).abs() <= 4.5 * spread + 1e-9).all()

    def test_who_fails_the_second_coin_adds_nothing(self, lab: Any) -> None:
        # k = 5 makes a record be proposed five times as often as it is charged for: the second coin has to count
        trainer = self.started(lab, proposal_multiplier=5.0)
        public, everyone = trainer.public_values(trainer.segments[0]), torch.arange(40)
        batch, before = trainer.population.batch(everyone), trainer.sampling.proposals.clone()
        norms, g = trainer.norms_of_all(), gradients(lab, trainer)
        coins = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        keep = coins < torch.minimum(norms.double().clamp(max=1.0), before) / before
        assert 0 < keep.sum() < 20
        total = trainer.weighted_sum([batch], public, draws=[type(trainer.draw())(everyone, coins)])
        length = trainer.sampling.contribution
        torch.testing.assert_close(total, (keep * length / norms) @ g, rtol=1e-4, atol=1e-6)

    def test_proposals_follow_what_was_seen(self, lab: Any) -> None:
        # k = 5, g_L = 0.01·C, capped at K̃/b: K̃ = 20, b = 10 gives 2
        trainer = self.started(lab)
        sampling = trainer.sampling
        sampling.norm_sum = 20.0
        draw = type(trainer.draw())(torch.arange(4), torch.zeros(4, dtype=torch.float64))
        sampling.kept(draw, torch.tensor([0.0, 0.1, 0.9, float("nan")]))
        assert sampling.proposals[:4].tolist() == pytest.approx([0.05, 0.5, 2.0, 0.05])

    def test_outgrown_proposals_are_counted_as_a_diagnostic(self, lab: Any) -> None:
        run = lab.trained("dpis", {"clip_norm": 100.0, "proposal_multiplier": 1.0}, diagnostics=True, learning_rate=3.0)
        assert 0 < run.history[0]["nonprivate/outgrown_proposals"] <= 1

    def test_a_proposal_without_its_cap_is_caught(self, lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """The planted fault: rates beyond 1 make the estimate shrink, and the paper's division exceed K̃/Ñ."""

        def uncapped(self: ImportanceSampling, clipped: Tensor) -> Tensor:
            return self.part.proposal_multiplier * clipped.clamp(min=0.01 * self.clip)

        capped = self.started(lab)
        assert capped.sampling.rates().max() <= 1
        monkeypatch.setattr(ImportanceSampling, "_proposals", uncapped)
        faulty = self.started(lab)
        assert faulty.sampling.rates().max() > 1
        # the text divides by q·p with q = min(rate, 1): somebody then adds more than K̃/Ñ
        norms = faulty.norms_of_all().double()
        clipped = norms.clamp(max=1.0)
        q, p = faulty.sampling.rates().clamp(max=1.0), clipped / faulty.sampling.proposals
        assert float((10 * clipped / (40 * q * p)).max()) > faulty.sampling.contribution * 1.01

    def test_non_finite_norms_count_as_zero(self, lab: Any) -> None:
        records = lab.records(40)
        sums = []
        for spoil in (0.0, float("nan"), 1e30):  # whose squares are infinite
            records.features[3] = 0.0
            trainer = lab.trainer("dpis", records=records, random=lab.random(noise=0.0))
            records.features[3] = spoil
            trainer.begin_epoch(0)
            sums.append(trainer.sampling.norm_sum)
        assert trainer.norms_of_all()[3] == torch.inf
        clean, *spoilt = sums
        assert spoilt[0] == spoilt[1]
        assert 0 < clean - spoilt[0] <= 1.0  # one record's clipped norm, no more

    @pytest.mark.parametrize("options", [{"clip_multiplier": 2.0}, {"external_clip_norm": 4.0}])
    def test_settings_of_adaptive_clipping_are_refused_without_it(self, options: dict[str, float]) -> None:
        with pytest.raises(EquidpError, match=r"dpis\.options is not valid: .* no effect unless adaptive_clip is true"):
            algorithm_settings("dpis", options)

    def test_adaptive_clipping_follows_the_mean_norm(self, lab: Any) -> None:
        # C_2 = max(0.01·C_1, λ·Σ min(n, C*)/N), C* = 4·C_1, and no K* in the last epoch
        trainer = self.started(lab, adaptive_clip=True, clip_multiplier=0.5)
        assert trainer.sampling.next_clip == 1.0  # the only epoch is the last
        trainer = lab.trainer(
            "dpis",
            {"adaptive_clip": True, "clip_multiplier": 0.5},
            random=lab.random(noise=0.0),
            plan=lab.plan(epochs=2),
        )
        trainer.begin_epoch(0)
        expected = 0.5 * float(trainer.norms_of_all().clamp(max=4.0).mean())
        assert trainer.sampling.next_clip == pytest.approx(expected, rel=1e-5)
        trainer.begin_epoch(1)
        assert trainer.sampling.clip == pytest.approx(expected, rel=1e-5)
        gaussians = sum(e.count for e in trainer.ledger.events if e.sampling_rate == 1)
        assert gaussians == 1 + 2 + 1

    @pytest.mark.parametrize("spoil", [0.0, 1e-3, -1e6, float("nan")])
    def test_a_record_moves_count_and_sums_by_no_more_than_they_are_noised_for(self, lab: Any, spoil: float) -> None:
        records = lab.records(40)
        records.features[3] = spoil
        others = torch.tensor([k for k in range(40) if k != 3])
        options = {"clip_norm": 0.5, "adaptive_clip": True, "external_clip_norm": 3.0, "sum_noise_fraction": 0.1}
        heard = []
        for part in (records, records.take(others)):
            random = Released(60.0, 20.0, 40.0)
            trainer = lab.trainer("dpis", options, plan=lab.plan(epochs=2), records=part, random=random)
            trainer.begin_epoch(0)
            heard.append(random.heard)
            assert trainer.ledger.events == (Event(1.0, 0.02 * 40), Event(1.0, 0.1 * 40, 2))
        expected = ((1.0, 0.8), (0.5, 4.0), (3.0, 4.0))
        for (with_it, bound, noise), (without, *_), stated in zip(*heard, expected, strict=True):
            assert (bound, noise) == pytest.approx(stated)
            assert -1e-9 <= with_it - without <= bound * (1 + 1e-9)
        assert heard[0][0][0] == 40
        if spoil == -1e6:
            assert [one[0] - other[0] for one, other in zip(*heard, strict=True)] == pytest.approx([1.0, 0.5, 3.0])

    def test_noise_rates_and_lengths_follow_from_what_was_released_alone(self, lab: Any) -> None:
        """One record less, of which nothing is released, changes none of them."""
        found = []
        for records in (lab.records(40), lab.records(40).take(torch.arange(39))):
            trainer = lab.trainer(
                "dpis",
                {"adaptive_clip": True},
                plan=lab.plan(epochs=2),
                records=records,
                random=Released(60.0, 20.0, 40.0),
            )
            trainer.begin_epoch(0)
            sampling = trainer.sampling
            facts = (sampling.noise(trainer.segments[0]), sampling.rate, sampling.next_clip, sampling.contribution)
            found.append((facts, sampling.shown()))
        assert found[0] == found[1]
        assert found[0][0][1:] == pytest.approx((10 / 20, 40 / 60, 20 / 60))

    def test_refuses_a_batch_as_large_as_the_data(self, lab: Any) -> None:
        with pytest.raises(EquidpError, match="noised number of records"):
            lab.trained("dpis", plan=lab.plan(batch_size=40), random=lab.random(noise=0.0))


PLAN = Plan(records=2000, batch_size=100, epochs=10, groups=1, delta=1e-5, noise_multiplier=1.0)


class Puppet:
    """A run whose norms are given, and whose ledger and coins are real: training without a model."""

    def __init__(self, lab: Any, plan: Plan, norms: Any, **options: Any) -> None:
        self.algorithm = algorithm_settings("dpis", options).build()
        self.combination = self.algorithm.combination
        self.sampling_rate = self.algorithm.sampler.sampling_rate(plan)
        self.plan, self.norms = plan, norms
        self.random = lab.random(3)
        trainer = lab.trainer("dpis")
        self.ledger = trainer.ledger
        self.population = type("P", (), {"size": 2000, "device": torch.device("cpu")})()
        self.sampling = self.algorithm.sampler.start(self)

    def reduce(self, total: Tensor) -> Tensor:
        return total

    def norms_of_all(self) -> Tensor:
        return next(self.norms).expand(2000).clone()

    def run(self) -> list[float]:
        """All epochs; the noise of each."""
        noise, segment = [], self.algorithm.schedule.segments(self.plan)[0]
        for epoch, length in enumerate(self.plan.epoch_lengths()):
            if self.sampling.exhausted:
                break
            self.sampling.begin_epoch(epoch)
            noise.append(self.sampling.gradient_noise)
            for _ in range(length):
                if not self.sampling.exhausted:
                    self.ledger.append(Event(self.sampling.rate, self.sampling.noise(segment)))
                    self.sampling.draw()
        return noise


@pytest.fixture(scope="module")
def target() -> Plan:
    """A plan calibrated to ε = 3."""
    return algorithm_settings("dpis").build().calibrated(PLAN, 3.0)


class TestBudget:
    """The noise of an epoch depends on outputs; what may be spent does not."""

    @settings(max_examples=25)
    @given(norms=st.lists(st.sampled_from([0.0, 1e-6, 0.01, 0.3, 1.0, 1e6]), min_size=10, max_size=10))
    def test_is_never_exceeded_whatever_the_norms_do(self, lab: Any, target: Plan, norms: list[float]) -> None:
        puppet = Puppet(lab, target, iter(torch.tensor(norms)))
        puppet.run()
        budget = puppet.sampling.budget
        assert budget.holds(puppet.ledger.events)
        assert puppet.algorithm.covers(target, puppet.ledger.events)
        assert puppet.algorithm.epsilon(target).value == 3.0

    @settings(max_examples=5)
    @given(norms=st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=10, max_size=10), first=st.floats(0, 1))
    def test_is_never_exceeded_with_adaptive_clipping_and_other_phases(
        self, lab: Any, norms: list[float], first: float
    ) -> None:
        options = {"adaptive_clip": True, "first_phase_fraction": first}
        plan = algorithm_settings("dpis", options).build().calibrated(PLAN, 2.0)
        puppet = Puppet(lab, plan, iter(torch.tensor(norms)), **options)
        puppet.run()
        assert puppet.sampling.budget.holds(puppet.ledger.events)
        assert puppet.sampling.contribution <= puppet.sampling.clip * (1 + 1e-9)

    def test_is_used_up_when_every_norm_is_clipped(self, lab: Any, target: Plan) -> None:
        puppet = Puppet(lab, target, itertools.repeat(torch.tensor(5.0)))
        noise = puppet.run()
        spent = renyi(puppet.ledger.events, puppet.sampling.budget.order)
        assert 0.98 < spent / puppet.sampling.budget.total <= 1 + 1e-9
        assert max(noise) < 1.1 * target.noise_multiplier

    def test_noise_falls_in_the_second_phase(self, lab: Any, target: Plan) -> None:
        # the paper's Figure 1: as K̃ stays below its worst case, the last 20 % of the epochs get by with much less noise
        noise = Puppet(lab, target, itertools.repeat(torch.tensor(0.4))).run()
        assert len(noise) == 10
        assert noise[:8] == sorted(noise[:8], reverse=True)
        assert noise[8] < 0.75 * noise[7]

    def test_without_a_second_phase_it_falls_little(self, lab: Any, target: Plan) -> None:
        noise = Puppet(lab, target, itertools.repeat(torch.tensor(0.4)), first_phase_fraction=1.0).run()
        assert noise[8] > 0.8 * noise[7]

    def test_a_given_noise_multiplier_is_kept(self, lab: Any) -> None:
        puppet = Puppet(lab, PLAN, itertools.repeat(torch.tensor(0.4)))
        puppet.sampling.records = 2001.0  # as if Ñ had come out above N_0
        assert puppet.run() == [1.0] * 10
        assert puppet.algorithm.covers(PLAN, puppet.ledger.events)

    def test_a_small_count_raises_the_noise_rather_than_the_cost(self, lab: Any) -> None:
        puppet = Puppet(lab, PLAN, itertools.repeat(torch.tensor(5.0)))
        puppet.sampling.records = 1900.0
        noise = puppet.run()
        assert 1.0 < max(noise) < 1.1
        assert puppet.sampling.budget.holds(puppet.ledger.events)

    def test_is_kept_by_a_run_that_a_crash_has_charged_too_much(self, lab: Any, target: Plan) -> None:
        first, again = (Puppet(lab, target, itertools.repeat(torch.tensor(0.4))) for _ in range(2))
        first.sampling.begin_epoch(0)
        step = Event(first.sampling.rate, first.sampling.noise(first.algorithm.schedule.segments(target)[0]))
        budget = first.sampling.budget
        for event in first.ledger.events:
            again.ledger.append(event)
        for event in (step, Event(1.0, 40.0)):  # and sums of norms, until there is no room for one more
            while budget.holds((*again.ledger.events, event)):
                again.ledger.append(event)
        owed = again.ledger.events
        again.sampling.load_state_dict(first.sampling.state_dict())
        assert again.sampling.exhausted
        again.sampling.begin_epoch(1)
        assert again.sampling.exhausted
        assert again.ledger.events == owed
        assert budget.holds(owed)

    @pytest.mark.parametrize("whole", [False, True])
    def test_an_epoch_whose_beginning_has_no_room_takes_no_step(self, lab: Any, whole: bool) -> None:
        trainer = lab.trainer("dpis", plan=lab.plan(epochs=2))
        trainer.run_steps(4)
        budget, ledger = trainer.sampling.budget, trainer.ledger
        left = budget.total - renyi(ledger.events, budget.order)  # of which a Gaussian, α/(2σ²), takes nearly all
        ledger.append(Event(1.0, (budget.order / (2 * left * 0.999)) ** 0.5))
        owed = ledger.events
        assert not trainer.finished
        if whole:
            trainer.train(progress=False)
        else:
            trainer.run_steps(1)
        assert trainer.finished
        assert (trainer.steps_done, ledger.events) == (4, owed)

    def test_an_epoch_whose_beginning_has_room_for_one_of_two_sums_releases_none(self, lab: Any) -> None:
        trainer = lab.trainer("dpis", {"adaptive_clip": True}, plan=lab.plan(epochs=3))
        trainer.run_steps(4)
        budget, ledger = trainer.sampling.budget, trainer.ledger
        (_, sums) = trainer.algorithm.sampler.releases(trainer.plan)
        room = 1.5 * renyi([Event(1.0, sums.noise_multiplier)], budget.order)
        left = budget.total - renyi(ledger.events, budget.order) - room  # of which a Gaussian, α/(2σ²), takes all
        ledger.append(Event(1.0, (budget.order / (2 * left)) ** 0.5))
        owed = ledger.events
        trainer.run_steps(1)
        assert trainer.finished
        assert (trainer.steps_done, ledger.events) == (4, owed)
        assert budget.holds(owed)

    @pytest.mark.parametrize("noise", [None, 1.0])
    def test_where_no_noise_leaves_later_epochs_their_sums_no_step_is_taken(
        self, lab: Any, noise: float | None
    ) -> None:
        """With infinite noise it would be within the budget, and the model be none."""
        plan = lab.plan(epochs=4)
        plan = plan if noise else algorithm_settings("dpis").build().calibrated(plan, 20.0)
        trainer = lab.trainer("dpis", plan=plan)
        trainer.run_steps(4)
        budget, ledger = trainer.sampling.budget, trainer.ledger
        (_, sums) = trainer.algorithm.sampler.releases(plan)
        room = 1.5 * renyi([Event(1.0, sums.noise_multiplier)], budget.order)
        left = budget.total - renyi(ledger.events, budget.order) - room  # of which a Gaussian, α/(2σ²), takes all
        ledger.append(Event(1.0, (budget.order / (2 * left)) ** 0.5))
        trainer.run_steps(1)
        assert trainer.finished
        assert trainer.steps_done == 4
        assert budget.holds(ledger.events)
        assert trainer.engine.flatten().isfinite().all()

    def test_a_run_that_an_epochs_beginning_has_ended_stays_so_when_it_is_resumed(self, lab: Any) -> None:
        sampler = {"sum_noise_fraction": 0.006}  # a sum of norms costs more than a step
        plan = algorithm_settings("dpis", sampler).build().calibrated(PLAN, 3.0)
        first, again = (Puppet(lab, plan, itertools.repeat(torch.tensor(0.4)), **sampler) for _ in range(2))
        sampling = first.sampling
        sampling.begin_epoch(0)
        step = Event(sampling.rate, sampling.noise(first.algorithm.schedule.segments(plan)[0]))
        budget, opening = sampling.budget, Event(1.0, 0.006 * 2000)
        left = budget.total - renyi([*first.ledger.events, step, step], budget.order)
        first.ledger.append(Event(1.0, (budget.order / (2 * left)) ** 0.5))
        assert budget.holds([*first.ledger.events, step])
        assert not budget.holds([*first.ledger.events, opening])
        sampling.begin_epoch(1)
        assert sampling.exhausted
        again.ledger = again.sampling.run.ledger = first.ledger
        again.sampling.load_state_dict(sampling.state_dict())
        assert again.sampling.exhausted

    @pytest.mark.parametrize("room", [0.5, 1.5, 2.5])
    def test_is_kept_where_a_crash_leaves_room_for_part_of_an_epoch(self, lab: Any, target: Plan, room: float) -> None:
        puppet = Puppet(lab, target, itertools.repeat(torch.tensor(5.0)))
        sampling, ledger = puppet.sampling, puppet.ledger
        sampling.begin_epoch(0)
        step = Event(sampling.rate, sampling.noise(puppet.algorithm.schedule.segments(target)[0]))
        budget = sampling.budget
        spent, cost = renyi(ledger.events, budget.order), renyi([step], budget.order)
        left = budget.total - spent - room * cost  # of which a Gaussian, α/(2σ²), takes all
        ledger.append(Event(1.0, (budget.order / (2 * left)) ** 0.5))
        sampling.load_state_dict(sampling.state_dict())
        taken = 0
        while not sampling.exhausted:
            sampling.draw()
            ledger.append(step)
            taken += 1
        assert taken == int(room)
        assert budget.holds(ledger.events)

    def test_reserves_the_sums_of_later_epochs(self, lab: Any) -> None:
        # in the costliest case σ is the same from the first epoch to the last: none lives on what a later one needs
        sampler = {"sum_noise_fraction": 0.006}  # a fifth of the budget goes to sums
        plan = algorithm_settings("dpis", sampler).build().calibrated(PLAN, 3.0)
        puppet = Puppet(lab, plan, itertools.repeat(torch.tensor(5.0)), **sampler)
        puppet.sampling.records = 2000.0
        noise = puppet.run()
        assert noise == pytest.approx([noise[0]] * 10, rel=0.01)

    @pytest.mark.parametrize("wanted", [0.5, 3.0, None])
    def test_stands_for_the_epsilon_that_is_reported(self, wanted: float | None) -> None:
        # ε = R* + ln((α−1)/α) − (ln δ + ln α)/(α−1), as docs/privacy.md tells a reader to recompute it
        algorithm = algorithm_settings("dpis").build()
        plan = PLAN if wanted is None else algorithm.calibrated(PLAN, wanted)
        budget = algorithm.sampler.budget(plan)
        a, delta = budget.order, plan.delta
        converted = budget.total + math.log((a - 1) / a) - (math.log(delta) + math.log(a)) / (a - 1)
        assert converted == pytest.approx(algorithm.epsilon(plan).value, rel=1e-9)
        assert wanted is None or algorithm.epsilon(plan).value == wanted

    def test_takes_a_fractional_order_where_that_needs_less_noise(self, target: Plan) -> None:
        sampler = algorithm_settings("dpis").build().sampler
        budget, whole = sampler.budget(target), _best(sampler, target, target.noise_multiplier)
        assert budget.order % 1 > 0
        assert float(whole.order).is_integer()
        assert whole.epsilon > 3.0 >= _best(sampler, target, target.noise_multiplier, (budget.order,)).epsilon

    def test_keeps_to_integer_orders_where_the_costliest_case_announces_epsilon(self) -> None:
        sampler = algorithm_settings("dpis").build().sampler
        for noise in (0.7, 1.0, 1.4, 3.0):
            assert float(sampler.budget(replace(PLAN, noise_multiplier=noise)).order).is_integer()

    def test_is_nearly_the_rdp_guarantee_of_dpsgd(self, target: Plan) -> None:
        # worst case with plain RDP: σ for ε = 3 differs from DP-SGD's only by the cost of Ñ and K̃
        from equidp.accounting.epsilon import rdp_epsilon

        plain = rdp_epsilon([Event(0.05, target.noise_multiplier, 200)], 1e-5)
        assert 2.5 < plain < 3.0

    def test_an_unreachable_target_names_what_costs_it(self) -> None:
        with pytest.raises(EquidpError, match="sum_noise_fraction"):
            algorithm_settings("dpis", {"sum_noise_fraction": 1e-4}).build().calibrated(PLAN, 0.5)

    @settings(max_examples=100)
    @given(
        order=st.integers(2, 64),
        rate=st.floats(1e-4, 0.3),
        noise=st.floats(0.5, 5.0),
        share=st.floats(0.0, 1.0),
    )
    def test_the_costliest_sum_is_the_largest(self, order: int, rate: float, noise: float, share: float) -> None:
        # K̃ between b·C and Ñ·C: rate b·C/K̃ and multiplier σ·C·Ñ/K̃, worst at K̃ = Ñ·C at integer orders
        fill = rate + share * (1 - rate)  # K̃/(Ñ·C)
        inside = renyi([Event(min(1.0, rate / fill), noise / fill)], order)
        assert inside <= renyi([Event(rate, noise)], order) * (1 + 1e-6) + 1e-12

    def test_what_is_told_of_its_rates_holds(self, lab: Any) -> None:
        # norms of 0.1 to 10 below C = 100: a rate of b·C/K̃, many times b/N_0
        run = lab.trained("dpis", {"clip_norm": 100.0, "sum_noise_fraction": 1e-3}, plan=lab.plan(epochs=2))
        sampler = run.trainer.algorithm.sampler
        rates = [event.sampling_rate for event in run.trainer.ledger.events if event.sampling_rate < 1]
        assert max(rates) > 2 * sampler.sampling_rate(run.trainer.plan)
        assert run.trainer.sampling.rate == rates[-1]
        assert "at most the sampling rate that the ledger has for that step" in sampler.description("record")

    def test_the_published_figure_leaves_out_and_amplifies(self, lab: Any) -> None:
        run = lab.trained("dpis", plan=lab.plan(epochs=2))
        published = run.trainer.algorithm.published_epsilon(run.trainer.plan, run.trainer.outcome())
        assert not published.guarantee
        assert "amplified" in published.formula
        assert 0 < published.value < run.trainer.algorithm.epsilon(run.trainer.plan).value
