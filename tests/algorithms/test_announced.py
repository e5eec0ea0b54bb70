"""What an algorithm announces of a run before it begins: its events, however they are asked for, and their figures."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from pydantic import Field

from equidp.accounting.budget import Budget
from equidp.accounting.epsilon import published_epsilon
from equidp.accounting.events import counted
from equidp.accounting.trials import Trials
from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.errors import EquidpError
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import FlatClip, PoissonSampler

FREE_AT_LAST = {
    "side_release": {"name": "quantile", "counts_below": 0.5, "count_noise_multiplier": 1.0},
    "schedule": {"name": "linear", "noise_drop": 0.4},
}
"""The count costs something beside the first gradients, of noise 1, and nothing beside the last ones, of less noise."""

ANNOUNCED = [
    *((name, {}) for name in sorted(ALGORITHMS.keys() - {"sgd", "custom"})),
    ("dpis", {"adaptive_clip": True}),
    ("dc_sgd_e", {"every": 3}),
    ("sa_dpsgd", {"energy": "private"}),
    ("sa_dpsgd", {"energy": "private", "stop_on": "published_epsilon", "published_epsilon": 4.0, "max_rejections": 1}),
    ("custom", FREE_AT_LAST),
    ("custom", {"side_release": {"name": "norm_histogram", "every": 3}, "schedule": "linear"}),
]


@pytest.mark.parametrize(("name", "options"), ANNOUNCED)
class TestAnnounced:
    """One run of three epochs of seven steps."""

    def test_events_are_the_same_of_the_whole_of_its_epochs_and_of_its_steps(
        self, lab: Any, name: str, options: dict[str, Any]
    ) -> None:
        algorithm, plan = algorithm_settings(name, options).build(), lab.plan(records=70, epochs=3)
        plan = algorithm.adapt(plan)
        whole = counted(algorithm.events(plan))
        last = algorithm.acceptance.cap(plan, algorithm.sampler.sampling_rate(plan))
        assert 0 < last <= plan.steps
        assert counted(event for epoch in algorithm.events_by_epoch(plan) for event in epoch) == whole
        until = [counted(algorithm.events_until(plan, step)) for step in range(last + 1)]
        assert until[0] == counted(algorithm.sampler.releases(plan))
        assert until[-1] == whole
        more = {(after - before).total() for before, after in pairwise(until)}
        assert more == {1 + len(algorithm.acceptance.candidate_events(plan))}

    def test_a_published_figure_that_is_called_a_guarantee_pays_for_all_that_is_charged(
        self, lab: Any, name: str, options: dict[str, Any]
    ) -> None:
        algorithm, plan = algorithm_settings(name, options).build(), lab.plan(records=70, epochs=3)
        published = algorithm.published_epsilon(plan)
        assert published is not None
        if published.guarantee:
            least = published_epsilon(algorithm.events(plan), plan.delta, "improved")
            assert published.value >= least * (1 - 1e-9)


def test_a_budget_that_does_not_follow_the_declared_trials_is_refused(lab: Any) -> None:
    """Its ε would be that of one trial, and stand for three of them, or for the best of some."""

    class Budgeted(PoissonSampler):
        trials: int = Field(default=1)

        def budget(self, plan: Any) -> Budget:
            return Budget(8.0, 0.1, 1.0, self.trials)

    algorithm = Algorithm(name="mine", weights=FlatClip(), initial={"clip_norm": 1.0}, sampler=Budgeted())
    assert algorithm.epsilon(lab.plan()).value == 1.0
    for trials in (Trials(3), Trials(law="geometric", mean=3.0)):
        for asked in (algorithm.epsilon, algorithm.epsilon_path, algorithm.budget):
            with pytest.raises(EquidpError, match=r"mine: the budget of the sampler Budgeted is for 1 trials"):
                asked(lab.plan(trials=trials))
