"""The loop on its own: devices, denominators, gradient masking, losses."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from equidp.accounting.epsilon import rdp_epsilon
from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.data.records import Records, Schema
from equidp.errors import EquidpError
from equidp.gradients.losses import Loss
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.device import choose_device
from equidp.mechanism.diagnostics import Diagnostics
from equidp.mechanism.float32 import SHORTEST
from equidp.mechanism.noise import SeededRandom
from equidp.mechanism.parts import Objective, Public, Pursuing
from equidp.mechanism.sampling import Population
from equidp.mechanism.states import global_random
from equidp.mechanism.trainer import Trainer
from equidp.training.journal import Journal, JournaledLedger


def records(size: int = 12, *, unit: Tensor | None = None) -> Records:
    features = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(size) % 2
    schema = Schema(
        name="toy", kind="tabular", shape=(4,), classes=("a", "b"), groupings={"class": ("a", "b")},
        feature_names=tuple("abcd"),
    )  # fmt: skip
    return Records(features=features, labels=labels, groups={"class": labels}, schema=schema, unit=unit)


class Listening(SeededRandom):
    """Keeps what is released before it is noised, its sensitivity and its noise multiplier."""

    def __init__(self, seed: int, device: str) -> None:
        super().__init__(seed, device)
        self.heard: list[tuple[Tensor, float, float]] = []

    def perturb(self, values: Tensor, *, sensitivity: float | Tensor, noise_multiplier: float) -> Tensor:
        self.heard.append((values.clone(), float(sensitivity), noise_multiplier))
        return super().perturb(values, sensitivity=sensitivity, noise_multiplier=noise_multiplier)


def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels, reduction="none")


def trainer(
    data: Records,
    name: str = "dpsgd",
    *,
    by_unit: bool = False,
    seed: int = 0,
    model: nn.Module | None = None,
    noise: float = 1.0,
    epochs: int = 1,
    algorithm: Algorithm | None = None,
    plan: Plan | None = None,
    listening: bool = False,
    optimizer: str = "sgd",
    **options: Any,
) -> Trainer:
    torch.manual_seed(0)
    population = Population(data, data.groups["class"], by_unit=by_unit)
    return Trainer(
        model=model or nn.Linear(4, 2),
        loss=loss,
        algorithm=algorithm or algorithm_settings(name, options).build(),
        plan=plan or Plan(12, 6, epochs, 2, 1e-5, 0.0 if name == "sgd" else noise),
        population=population,
        random=(Listening if listening else SeededRandom)(seed, "cpu"),
        ledger=Ledger(),
        learning_rate=1.0,
        optimizer=optimizer,
    )


class Weighed(Objective):
    """Losses times the bound that the side release leads."""

    reads: ClassVar[frozenset[str]] = frozenset({"clip_norm"})

    def start(self, loss: Loss, plan: Plan, device: torch.device) -> Pursuing:
        return Weighing(loss)


class Weighing(Pursuing):
    """Its factor is multiplied by parameters' functions, so autograd keeps it."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(lambda outputs, labels: loss(outputs, labels) * self.factor)
        self.factor = torch.ones(())

    def follow(self, public: Public) -> None:
        self.factor = public["clip_norm"]


def test_an_objective_may_multiply_by_a_value_that_a_side_release_leads() -> None:
    algorithm = algorithm_settings("dpsgd_quantile").build()
    run = trainer(records(), algorithm=dataclasses.replace(algorithm, objective=Weighed()))
    run.run_steps(2)
    assert float(run.pursuing.factor) == float(run.public["clip_norm"]) != 1.0


class TestDevice:
    """Where to train."""

    def test_auto_is_one_that_exists(self) -> None:
        assert choose_device("auto").type in ("cpu", "cuda")
        assert choose_device("cpu").type == "cpu"

    def test_auto_on_a_mac_is_the_cpu(self, monkeypatch) -> None:
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert choose_device("auto").type == "cpu"  # coins are float64, and MPS has none

    @pytest.mark.parametrize("name", ["mps", "meta", "xpu", "gpu"])
    def test_refuses_another_kind(self, name: str) -> None:
        with pytest.raises(EquidpError, match=f"training.device='{name}' is not supported: use auto, cpu or cuda"):
            choose_device(name)

    @pytest.mark.parametrize("name", ["cuda:x", "cuda:99"])
    def test_refuses_one_that_does_not(self, name: str) -> None:
        with pytest.raises(EquidpError, match=r"training\.device"):
            choose_device(name)


class TestLoopOfOnesOwn:
    """What a user's loop around `run_steps` may do."""

    def test_a_loop_of_ones_own_ends_with_the_plan(self) -> None:
        run = trainer(records(), epochs=2)
        while not run.finished:
            run.run_steps(1)
        assert run.steps_done == run.plan.steps == 4
        with pytest.raises(EquidpError, match="all 4 steps of its plan"):
            run.run_steps(1)
        assert sum(event.count for event in run.ledger.events) == 4

    def test_a_schedule_of_torchs_leads_the_rate_and_has_nothing_to_warn_of(self) -> None:
        run, other = trainer(records(), epochs=2), trainer(records(), epochs=2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
        for step in range(4):
            run.run_steps(1)
            schedule.step()  # a warning would be an error
            other.optimizer.param_groups[0]["lr"] = 0.5**step
            other.run_steps(1)
        assert torch.equal(run.engine.flatten(), other.engine.flatten())

    def test_another_optimiser_may_take_the_place_of_the_first(self) -> None:
        run, plain = trainer(records()), trainer(records())
        run.optimizer = torch.optim.AdamW(run.engine.parameters, lr=1.0, weight_decay=0.1)
        plain.optimizer = torch.optim.Adam(plain.engine.parameters, lr=1.0)
        before = run.engine.flatten()
        run.run_steps(1)
        plain.run_steps(1)
        torch.testing.assert_close(run.engine.flatten(), plain.engine.flatten() - 0.1 * before)

    def test_an_optimiser_that_forgets_its_gradients_is_given_the_next_ones(self) -> None:
        run, forgetting = trainer(records()), trainer(records())
        for _ in range(2):
            run.run_steps(1)
            forgetting.optimizer.zero_grad()
            forgetting.run_steps(1)
        assert torch.equal(run.engine.flatten(), forgetting.engine.flatten())

    def test_a_step_that_accelerate_holds_back_is_not_charged(self) -> None:
        """It was charged, and its noised gradient was thrown away."""
        run = trainer(records())
        # what `Accelerator.prepare` gives has this, and `accumulate` sets it
        held: Any = SimpleNamespace(sync_gradients=False)
        vars(run.optimizer)["gradient_state"] = held
        with pytest.raises(EquidpError, match=r"Leave accumulate out; `physical_batch_size` passes a batch in parts"):
            run.run_steps(1)
        assert not run.ledger.events
        held.sync_gradients = True
        run.run_steps(1)
        assert run.ledger.count == 1

    def test_a_state_that_is_refused_leaves_the_trainer_as_it_was(self) -> None:
        """The random numbers of another model's run had been taken over, so that noise could come again."""
        run, larger = trainer(records()), trainer(records(), model=nn.Linear(4, 3))
        run.run_steps(2)
        larger.run_steps(1)
        before = run.state_dict()
        for other, words in (
            (larger.state_dict(), r"of another model: 'weight' is in one of them alone, or has another shape"),
            ({"state": before}, r"no 'steps_done': give what trainer\.state_dict\(\) has returned"),
        ):
            with pytest.raises(EquidpError, match=words):
                run.load_state_dict(other)
            for name in ("random", "model", "steps_done"):
                torch.testing.assert_close(run.state_dict()[name], before[name], rtol=0, atol=0)

    def test_a_continuation_that_forgot_the_ledger_is_refused(self) -> None:
        first, again = trainer(records(), epochs=2), trainer(records(), epochs=2)
        first.run_steps(3)
        with pytest.raises(EquidpError, match="of 3 steps, and the ledger holds 0 events"):
            again.load_state_dict(first.state_dict())
        again.ledger = Ledger(first.ledger.events)
        again.load_state_dict(first.state_dict())
        again.run_steps(1)
        assert sum(event.count for event in again.ledger.events) == 4

    def test_groups_that_the_plan_does_not_have_are_refused(self) -> None:
        data = records()
        with pytest.raises(EquidpError, match="groups are from 1 to 2, and the plan has 2"):
            trainer(dataclasses.replace(data, groups={"class": data.labels + 1}, schema=dataclasses.replace(
                data.schema, groupings={"class": ("a", "b", "c")}
            )), "dpsgd_f")  # fmt: skip

    def test_an_optimiser_of_no_such_name_is_refused(self) -> None:
        run = trainer(records())
        with pytest.raises(EquidpError, match="Did you mean 'adam'"):
            Trainer(
                model=nn.Linear(4, 2), loss=loss, algorithm=run.algorithm, plan=run.plan, population=run.population,
                random=run.random, ledger=Ledger(), learning_rate=1.0, optimizer="adamm",
            )  # fmt: skip


class TestBuilding:
    """What is seen before the first step."""

    @pytest.mark.parametrize("clip_norm", [1e-46, 1e-40, 1e-30])
    def test_a_bound_that_float32_does_not_hold_is_refused_as_it_does_not_hold_the_noise(
        self, clip_norm: float
    ) -> None:
        with pytest.raises(EquidpError, match=r"bounded by .*in float32"):
            trainer(records(), clip_norm=clip_norm)

    @pytest.mark.parametrize("size", [1e14, 1e16, 1e18, 6e18])
    def test_the_least_bound_holds_for_gradients_as_long_as_float32_has(self, size: float) -> None:
        """Weights without their digits let one of 1e14 go a quarter beyond a bound of 1e-30."""
        data = records()
        trained = trainer(dataclasses.replace(data, features=size * data.features), clip_norm=SHORTEST)
        public = trained.public_values(trained.segments[0])
        moved = [trained.weighted_sum([trained.population.batch(torch.tensor([i]))], public) for i in range(len(data))]
        lengths = torch.stack(moved).double().norm(dim=1) / SHORTEST
        assert lengths.max() == pytest.approx(1.0, rel=1e-5)

    def test_a_bound_that_is_led_far_down_and_then_scheduled_is_refused(self) -> None:
        schedule = {"name": "phases", "phases": 2, "clip_decay": 1e-6}
        with pytest.raises(EquidpError, match="bounded by 1e-18"):
            trainer(records(), "custom", side_release="quantile", schedule=schedule)

    @pytest.mark.parametrize(
        ("name", "options", "words"),
        [
            (
                "custom",
                {
                    "side_release": {"name": "group_clip_counts", "max_clip_ratio": 1e-12},
                    "initial": {"clip_norm": 1e-16},
                },
                "bounded by 1e-28",
            ),
            ("naive", {"base_clip_norm": 1e-7, "count_noise_multiplier": 1e30}, "bounded by 5e-38"),
            ("dpsgd_f", {"count_noise_multiplier": 3e38}, r"side release's noise would be 3e\+38"),
        ],
        ids=["clip norms", "weights", "counts"],
    )
    def test_a_bound_that_a_side_release_gives_beyond_float32_is_refused(
        self, name: str, options: dict[str, Any], words: str
    ) -> None:
        """Of 1e-28, one gradient of 8e16 was rounded to 1.6 times that."""
        with pytest.raises(EquidpError, match=words):
            trainer(records(), name, **options)

    def test_a_noise_that_float32_does_not_hold_is_refused(self) -> None:
        with pytest.raises(EquidpError, match=r"noise be 1e\+42, in float32"):
            trainer(records(), clip_norm=1e12, noise=1e30)

    @pytest.mark.parametrize(
        "options",
        [{"clip_norm": 1e-36, "noise_decay": 1e-3, "clip_decay": 1.0}, {"clip_norm": 1e-38, "clip_decay": 1e3}],
        ids=["noise of the first phase", "bound of the last"],
    )
    def test_a_noise_or_bound_beyond_float32_in_a_later_step_is_refused(self, options: dict[str, float]) -> None:
        with pytest.raises(EquidpError, match="in some step"):
            trainer(records(), "sad_dpsgd", phases=2, phase_decay=1.0, **options)

    def test_a_noise_beyond_float32_for_empty_groups_is_refused(self) -> None:
        with pytest.raises(EquidpError, match=r"noise be 1\.5e\+37"):  # θ = B/K = 3; where 18 are counted it is 1/6
            trainer(records(), "naive", noise=5e36, count_noise_multiplier=1.0)

    def test_a_weight_that_would_be_infinite_is_refused_as_a_nan_would_tell_who_has_it(self) -> None:
        with pytest.raises(EquidpError, match="infinite weight"):
            trainer(records(), "dpsgd_global", strict_clip_norm=1e-300)

    def test_a_batch_norm_that_was_frozen_stays_so(self) -> None:
        frozen = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3).eval(), nn.Linear(3, 2))
        trainer(records(), model=frozen).train(progress=False)
        assert frozen[1].running_mean.eq(0).all()
        assert frozen[0].training


class TestStep:
    """One step, recomputed by hand."""

    def test_done_again_after_a_crash_drops_out_the_same(self) -> None:
        dropping = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        first, again = (trainer(records(), model=copy.deepcopy(dropping)) for _ in range(2))
        first.run_steps(1)
        state = first.state_dict()
        first.run_steps(1)
        torch.rand(3)  # whatever else the process draws
        again.ledger = first.ledger
        again.load_state_dict(state)
        again.run_steps(1)
        assert torch.equal(first.engine.flatten(), again.engine.flatten())

    def test_divides_by_the_expected_batch_size(self) -> None:
        run = trainer(records(), "sgd")
        before = run.engine.flatten()
        units = SeededRandom(0, "cpu").bernoulli(0.5, 12).nonzero().squeeze(1)
        assert len(units) != 6  # the actual size differs
        expected = run.engine.plain_sum(run.population.records.features[units], run.population.records.labels[units])
        run.run_steps(1)
        torch.testing.assert_close(before - run.engine.flatten(), expected / 6)

    def test_a_record_without_a_finite_gradient_adds_nothing(self) -> None:
        data = records()
        data.features[5] = 1e30  # the square of its gradient is infinite
        spoilt, without = trainer(data), trainer(data)
        everyone = torch.arange(12)
        public = spoilt.public_values(spoilt.segments[0])
        whole = spoilt.weighted_sum([spoilt.population.batch(everyone)], public)
        rest = without.weighted_sum([without.population.batch(everyone[everyone != 5])], public)
        torch.testing.assert_close(whole, rest)

    def test_of_each_chunk_its_own_records_without_a_finite_gradient_are_left_out(self) -> None:
        data = records()
        data.features[[1, 6]] = 1e30  # the second of the first chunk, the third of the next one
        run, everyone = trainer(data), torch.arange(12)
        public = run.public_values(run.segments[0])
        chunked = run.weighted_sum([run.population.batch(units) for units in everyone.split(4)], public)
        torch.testing.assert_close(chunked, run.weighted_sum([run.population.batch(everyone)], public))

    def test_the_trial_of_a_contribution_moves_no_generator_that_dropout_draws_from(self) -> None:
        """A resumed run tries again: its masks would be others, beside the same noise."""
        run = trainer(records(), model=nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)))
        before, draw = torch.get_rng_state(), run.draw()
        run.try_contribution([draw])
        assert len(draw.units) > 1
        assert torch.equal(torch.get_rng_state(), before)

    def test_masks_that_an_interrupted_step_drew_are_not_drawn_again(self) -> None:
        found = []
        for interrupted in (False, True):
            torch.manual_seed(1)
            run = trainer(records(), model=nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 2)))
            run.run_steps(1)
            if interrupted:
                run.drawn = iter([global_random(torch.device("cpu"))])
            torch.manual_seed(7)
            run.run_steps(1)
            found.append(run.engine.flatten())
        torch.testing.assert_close(*found)

    def test_losses_of_a_model_in_which_records_meet_are_refused(self) -> None:
        class Centred(nn.Module):
            def forward(self, features: Tensor) -> Tensor:
                return features - features.mean(0)

        with pytest.raises(EquidpError, match="mixes records"):
            trainer(records(), model=nn.Sequential(Centred(), nn.Linear(4, 2))).losses(torch.arange(4))

    def test_a_record_without_a_finite_gradient_is_counted_as_one_of_length_0(self) -> None:
        data = records()
        data.features[:3] = 1e30
        run = trainer(data, "dpsgd_quantile", clip_norm=1e-3, listening=True, plan=Plan(12, 12, 1, 2, 1e-5, 1.0))
        run.run_steps(1)
        counted, _, _ = run.random.heard[0]
        assert counted.tolist() == [3.0]  # all others exceed the bound

    @pytest.mark.parametrize("centred", [False, True])
    def test_the_noise_of_a_side_release_is_the_one_it_names_whatever_its_sensitivity(self, centred: bool) -> None:
        run = trainer(records(), "dpsgd_quantile", listening=True, centred=centred, count_noise_multiplier=3.0)
        run.run_steps(1)
        _, sensitivity, noise_multiplier = run.random.heard[0]
        assert (sensitivity, sensitivity * noise_multiplier) == (0.5 if centred else 1.0, 3.0)

    def test_private_and_plain_runs_of_a_seed_draw_the_same_batches(self) -> None:
        private, plain = trainer(records()), trainer(records(), "sgd")
        for _ in range(2):
            assert torch.equal(private.draw().units, plain.draw().units)
            private.random.normal(1000)  # noise has a stream of its own

    def test_losses_of_units_are_means_over_their_records(self) -> None:
        data = records(unit=torch.arange(12) // 3)
        run = trainer(data, by_unit=True)
        with torch.no_grad():
            single = loss(run.model(data.features), data.labels)
        torch.testing.assert_close(run.losses(torch.tensor([2, 0])), single.view(4, 3).mean(1)[[2, 0]])

    def test_norms_of_all_do_not_depend_on_the_chunks(self) -> None:
        run = trainer(records())
        whole = run.norms_of_all()
        run.physical_batch_size = 5
        torch.testing.assert_close(run.norms_of_all(), whole)

    def test_diagnostics_count_what_was_sampled(self) -> None:
        run = trainer(records(), clip_norm=1e-3)
        run.diagnostics = Diagnostics()
        copy = SeededRandom(0, "cpu")
        sizes = [int(copy.bernoulli(0.5, 12).sum()) for _ in range(2)]
        (row,) = run.train(progress=False)
        assert row["nonprivate/batch_size"] == sum(sizes) / 2
        assert sum(v for k, v in row.items() if "gradient_norm_histogram" in k) == sum(sizes)
        assert -1 <= row["nonprivate/cosine"] <= 1
        assert 0 < row["nonprivate/mean_weight"] < 1

    def test_the_figure_shown_on_the_way_is_that_of_the_charges_at_the_runs_own_delta(self) -> None:
        run = trainer(records())
        (row,) = run.train(progress=False)
        charged = rdp_epsilon(run.ledger.events, run.plan.delta)
        assert charged * (1 - 1e-9) <= row["epsilon_rdp"] <= charged * 1.02  # of integer orders alone

    def test_a_history_leaves_out_what_is_charged_ahead_for_steps_that_are_yet_to_be_repeated(
        self, tmp_path: Path
    ) -> None:
        whole, again = trainer(records(), epochs=2), trainer(records(), epochs=2)
        ahead = whole.algorithm.events(whole.plan)
        with contextlib.closing(Journal(tmp_path / "journal.jsonl", {})) as journal:
            again.ledger = JournaledLedger(journal, ahead=ahead)
            assert again.train(progress=False) == whole.train(progress=False)

    @pytest.mark.parametrize("name", ["sgd", "dpsgd"])
    def test_progress_goes_to_a_file_in_few_frames(self, capsys, name: str) -> None:
        trainer(records(), name, epochs=50).train()
        assert 1 <= capsys.readouterr().err.count("step/s]") <= 2

    def test_progress_moves_within_an_epoch_and_counts_on_from_where_a_run_goes_on(
        self, capsys, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("equidp.system.progress.SECONDS_IN_A_FILE", 0.0)
        run = trainer(records(), epochs=5)
        run.train(on_step=lambda: time.sleep(0.02))
        assert re.search(rf" 3/{run.plan.steps} .*1 of 5 epochs, ε ≤ [0-9.]+ by RDP", capsys.readouterr().err)
        again = trainer(records(), epochs=5)
        again.run_steps(4)
        again.train(on_step=lambda: time.sleep(0.02))
        assert f" 1/{run.plan.steps - 4} " in capsys.readouterr().err

    def test_no_progress_shows_less_than_what_was_charged(self, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
        """Three digits are rounded up."""
        monkeypatch.setattr("equidp.system.progress.SECONDS_IN_A_FILE", 0.0)
        below = 0
        for noise in (1.0, 1.1, 1.2, 1.3):
            first, _ = trainer(records(), epochs=2, noise=noise).train(on_step=lambda: time.sleep(0.02))
            shown, spent = re.search(r"ε ≤ ([0-9.]+) by RDP", capsys.readouterr().err), first["epsilon_rdp"]
            assert shown is not None
            assert spent <= float(shown[1]) <= spent + 1e-3
            below += round(spent, 3) < spent
        assert below  # that the nearest three digits would be less

    def test_the_model_is_trained_in_training_mode(self) -> None:
        run = trainer(records())
        run.model.eval()
        run.train(progress=False)
        assert run.model.training
