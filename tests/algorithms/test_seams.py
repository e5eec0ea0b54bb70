"""What an algorithm of one's own may use: facts of a step, releases at chosen steps, an optimiser, other weights."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from equidp.accounting.events import Event, counted, fuse
from equidp.accounting.plan import Plan
from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.algorithms.dpsgd_f import GroupClipCounts
from equidp.algorithms.dpsgd_quantile import QuantileCount
from equidp.errors import EquidpError
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import ExponentialAverage, FlatClip, Run, StepFacts, Update, Updating
from equidp.parameters import PrivacySettings, TrainingSettings
from equidp.training import plan_run


class CorrectedAdam(Update):
    """Adam whose second moment leaves out what the noise adds to it; `sign` is for a planted fault."""

    sign: float = -1.0

    def start(self, run: Run) -> Updating:
        return Correcting(self)


class Correcting(Updating):
    first, second, bias = 0.9, 0.5, 1e-3

    def __init__(self, part: CorrectedAdam) -> None:
        self.part = part
        self.moments: list[Any] = [0.0, 0.0, 0.0]

    def direction(self, noisy_sum: Tensor, facts: StepFacts) -> Tensor:
        mean, size = noisy_sum / facts.plan.batch_size, facts.plan.batch_size
        noise = (facts.noise_multiplier * facts.sensitivity / size) ** 2
        seen = (mean, mean**2, noise)
        decays = (self.first, self.second, self.second)
        self.moments = [d * m + (1 - d) * s for d, m, s in zip(decays, self.moments, seen, strict=True)]
        t = facts.step + 1
        m, v, phi = (moment / (1 - d**t) for d, moment in zip(decays, self.moments, strict=True))
        return size * m / (v + self.part.sign * phi).clamp(min=self.bias).sqrt()

    def state_dict(self) -> dict[str, Any]:
        return {"moments": list(self.moments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.moments = list(state["moments"])


def corrected(sign: float = -1.0) -> Algorithm:
    return Algorithm(name="mine", weights=FlatClip(), initial={"clip_norm": 1.0}, update=CorrectedAdam(sign=sign))


def counting(**settings: Any) -> Algorithm:
    return Algorithm(
        name="mine", weights=FlatClip(), initial={"clip_norm": 1.0}, side_release=QuantileCount(**settings)
    )


class TestFacts:
    """An update and a side release know the step's public figures."""

    @pytest.mark.parametrize("sign", [-1.0, 1.0])
    def test_a_golden_tells_v_minus_phi_from_v_plus_phi(self, lab: Any, sign: float) -> None:
        updating = corrected(sign).update.start(lab.trainer("dpsgd"))
        # B = 10, σ = 1, Δ = 3: φ = 0.09. g = 0.5: m̂ = 0.5, v̂ = 0.25, 0.5/√(0.25 − 0.09) = 1.25
        # then g = 0: m̂ = 0.045/0.19, v̂ = (0.5·0.125)/0.75, below φ: the floor 0.001
        facts = lab.facts(sensitivity=torch.tensor(3.0))
        first = updating.direction(torch.tensor([5.0]), facts)
        then = updating.direction(torch.tensor([0.0]), dataclasses.replace(facts, step=1))
        found, expected = [float(first) / 10, float(then) / 10], [1.25, 0.045 / 0.19 / 0.001**0.5]
        assert (found == pytest.approx(expected, rel=1e-5)) == (sign < 0)

    def test_the_facts_that_a_part_sees_are_those_of_the_step(self, lab: Any) -> None:
        seen: list[StepFacts] = []

        class Watching(QuantileCount):
            def later(self, noised: Tensor, public: Any, facts: StepFacts) -> dict[str, Tensor]:
                seen.append(facts)
                return super().later(noised, public, facts)

        algorithm = dataclasses.replace(corrected(), side_release=Watching(), initial={"clip_norm": 2.0})
        trainer = lab.trainer("mine", algorithm=algorithm)
        seen.clear()  # of bounds that were tried before the first step
        call, given = trainer.updating.direction, list[StepFacts]()
        trainer.updating.direction = lambda total, facts: given.append(facts) or call(total, facts)
        trainer.run_steps(2)
        assert [(f.step, f.noise_multiplier, f.dimension, f.sampling_rate) for f in given] == [
            (0, 1.0, 21, 0.25),
            (1, 1.0, 21, 0.25),
        ]
        assert [float(f.sensitivity) for f in given] == [2.0, float(seen[-1].sensitivity)]
        assert given[0].plan == trainer.plan

    def test_a_release_that_alone_gives_the_bound_is_told_of_none_before_it(self, lab: Any) -> None:
        class Giving(GroupClipCounts):
            def now(self, noised: Tensor, public: Any, facts: StepFacts) -> dict[str, Tensor]:
                assert float(facts.sensitivity) == float("inf")
                return {"clip_norm": torch.ones(3)}

            def statistic(self, norms: Tensor, groups: Tensor, public: Any, plan: Plan) -> Tensor:
                return torch.zeros(6)

        lab.trainer("mine", algorithm=Algorithm(name="mine", weights=FlatClip(), side_release=Giving())).run_steps(1)


class TestChosenSteps:
    """A side release at some steps costs at these steps."""

    def test_every_third_step_pays(self, lab: Any) -> None:
        plan, algorithm = lab.plan(epochs=3), counting(every=3, count_noise_multiplier=0.5)
        run = lab.trained("mine", algorithm=algorithm, plan=plan)
        paid = {(0.25, fuse(1.0, 0.5)): 4, (0.25, 1.0): 8}
        assert counted(run.trainer.ledger.events) == counted(algorithm.events(plan)) == paid
        assert algorithm.covers(plan, run.trainer.ledger.events)

    @pytest.mark.slow
    def test_epsilon_its_path_and_the_noise_for_a_target_count_the_steps_that_pay(self, lab: Any) -> None:
        plan, algorithm = lab.plan(epochs=3), counting(every=3, count_noise_multiplier=0.5)
        target = algorithm.epsilon(plan).value
        assert target < counting(count_noise_multiplier=0.5).epsilon(plan).value
        assert algorithm.epsilon_path(plan)[-1] == pytest.approx(target, rel=1e-2)
        assert algorithm.calibrated(plan, target).noise_multiplier == pytest.approx(1.0, rel=1e-2)

    def test_segments_of_a_schedule_are_crossed(self, lab: Any) -> None:
        options = {
            "side_release": {"name": "quantile", "every": 3, "count_noise_multiplier": 1.0},
            "schedule": {"name": "steps", "phases": 2, "noise_decay": 0.5},
        }
        plan = lab.plan(epochs=2)  # steps 0 to 3, then 4 to 7; released at 0, 3, 6
        algorithm = algorithm_settings("custom", options).build()
        run = lab.trained("custom", options, plan=plan)
        paid = {(0.25, fuse(1.0, 1.0)): 2, (0.25, 1.0): 2, (0.25, fuse(0.5, 1.0)): 1, (0.25, 0.5): 3}
        assert counted(run.trainer.ledger.events) == counted(algorithm.events(plan)) == paid

    def test_what_was_given_holds_until_the_next_release_also_in_a_resumed_run(self, lab: Any) -> None:
        options = {"side_release": {"name": "group_clip_counts", "every": 2}}
        trainer, bounds, states = lab.trainer("custom", options), [], []
        for _ in range(4):
            trainer.run_steps(1)
            bounds.append(trainer.shown["clip_norm"].tolist())
            states.append(trainer.state_dict())
        assert bounds[0] == bounds[1] != bounds[2] == bounds[3]
        again = lab.trainer("custom", options, ledger=trainer.ledger)
        again.load_state_dict(states[0])
        again.run_steps(1)
        assert again.shown["clip_norm"].tolist() == bounds[1]

    @pytest.mark.parametrize(
        ("steps", "gives", "words"),
        [
            (range(9), False, "has the steps 0 to 3"),
            (range(3, 0, -1), False, "in ascending order"),
            (range(2, 4), True, "before the first release of .* no value of clip_norm"),
        ],
    )
    def test_steps_that_cannot_be_are_refused(self, lab: Any, steps: range, gives: bool, words: str) -> None:
        class Sometimes(GroupClipCounts):
            chosen: ClassVar[range] = steps

            def at(self, plan: Plan) -> range:
                return self.chosen

        initial = {} if gives else {"clip_norm": 1.0}
        algorithm = Algorithm(name="mine", weights=FlatClip(), initial=initial, side_release=Sometimes())
        with pytest.raises(EquidpError, match=words):
            algorithm.events(lab.plan())

    def test_a_release_at_one_step_is_charged_once(self, lab: Any) -> None:
        class Once(QuantileCount):
            def at(self, plan: Plan) -> range:
                return range(1, 2)

        algorithm = dataclasses.replace(counting(), side_release=Once(count_noise_multiplier=1.0))
        run = lab.trained("mine", algorithm=algorithm)
        assert run.trainer.ledger.events == (Event(0.25, 1.0), Event(0.25, fuse(1.0, 1.0)), Event(0.25, 1.0, 2))


class TestOptimizer:
    """An algorithm may bring its optimiser, and then has no other."""

    def test_an_algorithm_trains_with_its_own_optimiser(self, lab: Any) -> None:
        own = dataclasses.replace(algorithm_settings("dpsgd").build(), optimizer="adam")
        assert torch.equal(
            lab.trained("mine", algorithm=own).parameters, lab.trained("dpsgd", optimizer="adam").parameters
        )

    def test_a_function_that_makes_an_optimiser_is_accepted(self, lab: Any) -> None:
        def tripled(parameters: Any, rate: float) -> torch.optim.Optimizer:
            return torch.optim.SGD(parameters, lr=3 * rate)

        own = dataclasses.replace(algorithm_settings("dpsgd").build(), optimizer=tripled)
        plain = lab.trained("dpsgd", learning_rate=0.3).parameters
        torch.testing.assert_close(lab.trained("mine", algorithm=own).parameters, plain)

    def test_another_optimiser_is_refused_before_anything_is_trained(self) -> None:
        training = TrainingSettings(optimizer="momentum", batch_size=10)
        with pytest.raises(EquidpError, match=r"psasc_momentum brings its own.*set training\.optimizer=null"):
            plan_run(
                algorithm_settings("psasc_momentum").build(),
                units=40, groups=3, privacy=PrivacySettings(noise_multiplier=1.0, delta=1e-5), training=training,
            )  # fmt: skip

    def test_a_misspelt_optimiser_is_refused_with_the_nearest_name(self) -> None:
        with pytest.raises(EquidpError, match="Did you mean 'adam'"):
            Algorithm(name="mine", weights=None, optimizer="adan")


class TestReleasedWeights:
    """What leaves the run need not be what is trained."""

    def test_an_average_leaves_and_training_goes_on_as_without(self, lab: Any) -> None:
        algorithm = dataclasses.replace(
            algorithm_settings("dpsgd").build(), released_weights=ExponentialAverage(decay=0.5)
        )
        plain, averaged = lab.trainer("dpsgd"), lab.trainer("mine", algorithm=algorithm)
        expected = plain.engine.flatten()
        for step in range(1, 5):
            plain.run_steps(1)
            averaged.run_steps(1)
            decay = min(0.5, (1 + step) / (10 + step))
            expected = decay * expected + (1 - decay) * plain.engine.flatten()
        assert torch.equal(plain.engine.flatten(), averaged.engine.flatten())
        left = torch.cat([p.reshape(-1) for p in averaged.released_model().parameters()])
        torch.testing.assert_close(left, expected)
        assert averaged.released_model() is not averaged.model
        assert plain.released_model() is plain.model

    def test_what_is_evaluated_is_what_leaves(self, lab: Any) -> None:
        seen: list[Tensor] = []

        def look(row: dict[str, float], model: torch.nn.Module) -> dict[str, float]:
            seen.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
            return {}

        trainer = lab.trainer("custom", {"released_weights": "average"})
        trainer.train(look, progress=False)
        assert not torch.equal(seen[-1], trainer.engine.flatten())
        assert torch.equal(seen[-1], trainer.releasing.weights())

    def test_a_refused_step_is_not_averaged(self, lab: Any) -> None:
        options = {"released_weights": {"name": "average", "decay": 0.0}, "acceptance": "annealing"}
        run = lab.trained("custom", options, plan=lab.plan(epochs=4), learning_rate=5.0)
        assert run.trainer.outcome().accepted_steps < run.trainer.steps_done
        torch.testing.assert_close(run.released, run.parameters)
        assert run.trainer.releasing.taken == run.trainer.outcome().accepted_steps


def test_the_complete_example_of_the_docs_trains_and_charges_what_it_announced(lab: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    module = ModuleType("dpsgd_sign")
    sys.modules[module.__name__] = module  # where pydantic looks for the names in annotations
    try:
        exec(compile(code, "docs/extending.md", "exec"), module.__dict__)
        algorithm, plan = module.SignDPSGD().build(), lab.plan(epochs=3)
    finally:
        del sys.modules[module.__name__]
    trainer = lab.trainer("dpsgd_sign", algorithm=algorithm, plan=plan)
    trainer.train(progress=False)
    assert counted(trainer.ledger.events) == counted(algorithm.events(plan))
    assert float(trainer.public["clip_norm"]) >= 0.1


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_docs_say_of_every_column_of_the_history_whether_it_may_be_published(lab: Any, name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    table = page.split("## What the history's columns mean")[1].split("\n## ")[0]
    told = {column.partition("/")[0] for column in re.findall(r"`([^`]+)`", table)}
    columns = {column.partition("/")[0] for row in lab.trained(name).history for column in row}
    assert columns - {"epoch"} <= told
