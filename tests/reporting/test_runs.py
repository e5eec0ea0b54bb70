"""Tracked runs become the frames that figures read."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from equidp.errors import EquidpError
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
            "params.training.epochs": ["20", "20", "20", "20", None],
            "params.privacy.epsilon": ["None", "3", "3", "3", None],
            "params.model.name": ["logistic"] * 4 + [None],
            "params.resolved.noise_multiplier": [None, "1.0", "1.1", "1.1", None],
            "params.dpsgd.options.clip_norm": [None, "0.5", None, None, None],
            "params.dpsgd_f.options.base_clip_norm": [None, None, "0.5", "0.5", None],
        }
    )


COSTS = {"b": (0.02, 0.08), "c": (0.01, 0.02), "d": (0.02, None)}


def document(run: str) -> dict[str, Any]:
    """`metrics.json` of a run: the baseline's has no costs."""
    if run not in COSTS:
        return {}
    groups = {name: {"accuracy": cost} for name, cost in zip(("Female", "Male"), COSTS[run], strict=True)}
    return {"cost_of_privacy": {"groups": {"sex": groups}}}


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


def test_tunings_and_audits_are_no_trainings(tracked):
    """They have an algorithm's tag and no metrics.json, of which MLflow made an error in its own words."""
    others = pd.DataFrame({"run_id": ["t"], "tags.algorithm": ["dpsgd"], "tags.seed": ["0"], "metrics.epsilon": [8.0]})
    every = pd.concat([tracked.assign(**{"tags.private": ["false", *["true"] * 3, None]}), others], ignore_index=True)
    assert list(runs_frame(every)["algorithm"]) == ["sgd", "dpsgd", "dpsgd_f", "dpsgd_f"]
    asked: list[str] = []
    group_costs(every, "sex", lambda run: asked.append(run) or document(run))
    assert "t" not in asked


def test_costs_come_once_per_run_and_group(tracked):
    costs = group_costs(tracked, "sex", document)
    assert len(costs) == 5  # one is undefined, and the baseline has none
    male = costs[(costs["algorithm"] == "dpsgd") & (costs["group"] == "Male")]
    assert male["cost"].tolist() == [0.08]
    chart = figures.cost_against(costs, "training.epochs")
    assert {t.name for t in chart.data} == {"dpsgd, Female", "dpsgd, Male", "dpsgd_f, Female", "dpsgd_f, Male"}
    assert group_costs(tracked, "race", document).empty


def test_attempts_that_did_not_finish_and_older_runs_of_a_seed_do_not_count(tracked):
    again = pd.concat([tracked, tracked.iloc[1:2], tracked.iloc[1:2], tracked.iloc[1:2]], ignore_index=True)
    again["status"] = ["FINISHED"] * 6 + ["KILLED", "FINISHED"]
    again["start_time"] = pd.to_datetime([1, 2, 3, 4, 5, 6, 7, 0])
    again["run_id"] = list("abcdefgh")
    again["params.resume"] = "False"
    again.loc[5, ["metrics.test/accuracy", "params.resume"]] = [0.76, "True"]
    runs = runs_frame(again)
    assert runs[runs["algorithm"] == "dpsgd"]["accuracy"].tolist() == [0.76]
    again["tags.secure"] = "true"
    assert runs_frame(again)["algorithm"].tolist().count("dpsgd") == 3


def test_rows_of_other_settings_are_no_seeds(tracked):
    tracked["tags.seed"] = list("01234")
    tracked["params.data.evaluate_on"] = ["test", "test", "test", "validation", "test"]
    with pytest.raises(EquidpError, match=r"dpsgd_f's runs at training\.epochs = 20 .* in data\.evaluate_on: draw"):
        figures.metric_against(runs_frame(tracked), "training.epochs")
    tracked["params.sgd.options.learning_rate"] = [None, "None", "0.5", "0.1", None]
    with pytest.raises(EquidpError, match=r"sgd\.options\.learning_rate"):
        figures.cost_against(group_costs(tracked.drop(columns="params.data.evaluate_on"), "sex", document), "epsilon")


def test_a_search_that_found_nothing_and_a_misspelt_setting_are_refused(tracked):
    nothing = pd.DataFrame({"run_id": [], "status": []})
    for draw in (
        lambda: figures.privacy_utility(runs_frame(nothing)),
        lambda: figures.metric_against(runs_frame(nothing), "training.epochs"),
        lambda: figures.cost_against(group_costs(nothing, "class", document), "training.epochs"),
    ):
        with pytest.raises(EquidpError, match="No run is among those given"):
            draw()
    with pytest.raises(EquidpError, match=r"'training\.epoch'\. Did you mean 'training\.epochs'"):
        figures.metric_against(runs_frame(tracked), "training.epoch")


def test_a_level_of_baselines_is_of_one_setting(tracked):
    two = pd.concat([tracked.iloc[:1].assign(**{"tags.seed": "1", "params.privacy.delta": "1e-6"}), tracked])
    two = two.reset_index(drop=True)
    assert figures.privacy_utility(runs_frame(two)).layout.shapes[0].y0 == pytest.approx(0.81)
    two.loc[0, "params.training.epochs"] = "30"
    with pytest.raises(EquidpError, match=r"baseline's runs .* differ in training\.epochs"):
        figures.privacy_utility(runs_frame(two))


def test_means_of_a_sweep_are_no_runs(tracked):
    tracked["tags.summary"] = [None, "seeds", None, None, None]
    assert list(runs_frame(tracked)["algorithm"]) == ["sgd", "dpsgd_f", "dpsgd_f"]


def test_no_runs_at_all():
    assert runs_frame(pd.DataFrame({"run_id": []})).empty
    assert not figures.privacy_utility(
        runs_frame(pd.DataFrame()).reindex(columns=["algorithm", "epsilon", "accuracy"])
    ).data
