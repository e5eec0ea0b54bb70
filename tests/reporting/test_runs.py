"""Tracked runs become the frames that figures read."""

from __future__ import annotations

import pandas as pd
import pytest

from equidp.reporting import figures
from equidp.reporting.runs import group_costs, runs_frame


@pytest.fixture
def tracked() -> pd.DataFrame:
    """Four runs as MLflow lists them: settings are text, everything absent is missing."""
    return pd.DataFrame(
        {
            "run_id": list("abcde"),
            "tags.algorithm": ["sgd", "dpsgd", "dpsgd_f", "dpsgd_f", None],
            "tags.dataset": ["adult"] * 4 + [None],
            "tags.seed": ["0", "0", "0", "1", None],
            "metrics.epsilon": [None, 3.0, 3.0, 3.0, None],
            "metrics.test/accuracy": [0.81, 0.75, 0.79, 0.80, 0.5],
            "metrics.cost_of_privacy/accuracy/sex:Female": [None, -0.02, -0.01, -0.02, None],
            "metrics.cost_of_privacy/accuracy/sex:Male": [None, -0.08, -0.02, None, None],
            "params.training.epochs": ["20", "20", "20", "20", None],
            "params.privacy.epsilon": ["None", "3", "3", "3", None],
            "params.model.name": ["logistic"] * 4 + [None],
            "params.resolved.noise_multiplier": [None, "1.0", "1.1", "1.1", None],
            "params.dpsgd.options.clip_norm": [None, "0.5", None, None, None],
            "params.dpsgd_f.options.base_clip_norm": [None, None, "0.5", "0.5", None],
        }
    )


def test_settings_are_numbers_and_options_are_those_of_the_runs_own_algorithm(tracked):
    runs = runs_frame(tracked)
    assert list(runs["algorithm"]) == ["sgd", "dpsgd", "dpsgd_f", "dpsgd_f"]  # the stray run is left out
    assert list(runs["seed"]) == [0, 0, 0, 1]
    assert list(runs["training.epochs"]) == [20] * 4
    assert runs["privacy.epsilon"].tolist()[1:] == [3] * 3
    assert runs["privacy.epsilon"].isna().iloc[0]
    assert list(runs["model.name"]) == ["logistic"] * 4
    assert runs["noise_multiplier"].tolist()[1:] == [1.0, 1.1, 1.1]
    assert runs["options.clip_norm"].tolist()[1] == 0.5
    assert runs["options.base_clip_norm"].notna().tolist() == [False, False, True, True]
    chart = figures.privacy_utility(runs)
    assert [t.name for t in chart.data] == ["dpsgd", "dpsgd_f", "sgd"]
    assert chart.data[1].y[0] == pytest.approx(0.795)


def test_costs_come_once_per_run_and_group(tracked):
    costs = group_costs(tracked, "sex")
    assert len(costs) == 5  # one is undefined, and the baseline has none
    male = costs[(costs["algorithm"] == "dpsgd") & (costs["group"] == "Male")]
    assert male["cost"].tolist() == [-0.08]
    chart = figures.cost_against(costs, "training.epochs")
    assert {t.name for t in chart.data} == {"dpsgd, Female", "dpsgd, Male", "dpsgd_f, Female", "dpsgd_f, Male"}
    assert group_costs(tracked, "race").empty


def test_groupings_of_one_slug_are_told_apart(tracked):
    tracked["params.data.groups"] = "['性別', '民族']"
    columns = {f"metrics.cost_of_privacy/accuracy/{slug}:a": cost for slug, cost in (("__", -0.1), ("___2", -0.2))}
    costs = {name: group_costs(tracked.assign(**columns), name)["cost"].tolist() for name in ("性別", "民族", "年齢")}
    assert costs == {"性別": [-0.1] * 4, "民族": [-0.2] * 4, "年齢": []}


def test_no_runs_at_all():
    assert runs_frame(pd.DataFrame({"run_id": []})).empty
    assert not figures.privacy_utility(
        runs_frame(pd.DataFrame()).reindex(columns=["algorithm", "epsilon", "accuracy"])
    ).data
