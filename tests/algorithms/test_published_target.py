"""A target read as the paper's own count: the tables of the papers are made at equal *published* ε."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.thorough import ONE_OF_EACH, first

from equidp.accounting.epsilon import published_epsilon
from equidp.accounting.events import Event
from equidp.accounting.plan import Plan
from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.errors import EquidpError
from equidp.parameters import PrivacySettings, TrainingSettings
from equidp.training import plan_run

pytestmark = pytest.mark.usefixtures("coarse")

PLAN = Plan(records=2000, batch_size=500, epochs=2, groups=3, delta=1e-4, noise_multiplier=0.0)
FILTERED = {"asc", "dpis"}
"""Algorithms that keep a sound budget while they train."""

SETTINGS = {name: settings.build() for name, settings in ((n, algorithm_settings(n)) for n in ALGORITHMS)}
SOLVABLE = [name for name, algorithm in SETTINGS.items() if algorithm.private and name not in FILTERED]


def test_the_page_says_which_conversion_each_figure_takes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "privacy.md").read_text(encoding="utf-8")
    table = page.partition("| algorithms | the paper's figure |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", table, flags=re.M)
    told = {name: how for names, how in rows for name in re.findall(r"`(\w+)`", names)}
    assert told.keys() < SETTINGS.keys()
    for name, algorithm in SETTINGS.items():
        if algorithm.private:
            formula = algorithm.published_epsilon(replace(PLAN, noise_multiplier=1.0)).formula
            for conversion in ("classic conversion", "improved conversion"):
                assert (conversion in formula) == (conversion in told.get(name, dict(rows)["all others"])), name


@pytest.mark.parametrize(
    ("name", "options", "guarantee"),
    [
        ("dpsgd_quantile", {}, False),
        ("dpsgd_quantile", {"centred": True}, True),
        ("dpsgd_bounded", {}, True),
    ],
)
def test_the_papers_of_quantiles_charge_for_the_count(name: str, options: dict[str, Any], guarantee: bool) -> None:
    # Andrew et al., Theorem 1: z⁻² = z_Δ⁻² + (2σ_b)⁻²
    plan = replace(PLAN, noise_multiplier=1.0)
    algorithm = algorithm_settings(name, options | {"count_noise_multiplier": 1.5}).build()
    event = Event(plan.sampling_rate, (1.0 + 1 / 3.0**2) ** -0.5, plan.steps)
    found = algorithm.published_epsilon(plan)
    assert found.value == pytest.approx(published_epsilon([event], plan.delta, "improved"), rel=1e-12)
    assert found.guarantee == guarantee
    assert guarantee == (algorithm.events(plan) == (event,))


@pytest.mark.parametrize("name", first(SOLVABLE, (*ONE_OF_EACH, "naive", "sad_dpsgd", "dpsgd_f_slack")))
def test_the_published_figure_meets_the_target(name: str) -> None:
    algorithm = SETTINGS[name]
    plan = algorithm.calibrated(PLAN, 2.0, published=True)
    assert algorithm.published_epsilon(plan).value == pytest.approx(2.0, rel=1e-3)
    assert algorithm.published_epsilon(plan).value <= 2.0
    assert algorithm.epsilon(plan).value != pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("name", sorted(FILTERED))
def test_a_run_within_a_sound_budget_is_refused(name: str) -> None:
    with pytest.raises(EquidpError, match=f"{name}: what it samples.* within a sound budget.*epsilon_as=sound"):
        SETTINGS[name].calibrated(PLAN, 2.0, published=True)


def test_the_setting_reaches_the_plan() -> None:
    def noise(**privacy: Any) -> float:
        return plan_run(
            SETTINGS["dpsgd_f"],
            units=2000,
            groups=3,
            privacy=PrivacySettings(epsilon=2.0, delta=1e-4, **privacy),
            training=TrainingSettings(epochs=5, batch_size=100),
        ).noise_multiplier

    assert noise(epsilon_as="published") > noise()  # the classic conversion is the looser one


def test_without_a_target_there_is_nothing_to_read() -> None:
    with pytest.raises(EquidpError, match="tells how to read privacy"):
        PrivacySettings(noise_multiplier=1.0, epsilon_as="published")
