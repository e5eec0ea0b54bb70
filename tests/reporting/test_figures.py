"""Figures show the numbers they were given, in one style that survives print and odd names."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

from equidp.evaluation.live import live_metrics
from equidp.pipelines.ingestion.nodes import draw_group_counts
from equidp.pipelines.reporting.nodes import accuracy_figure, cost_figure
from equidp.reporting import figures
from equidp.reporting.style import bars, label, looks

from .conftest import HOSTILE


def runs() -> pd.DataFrame:
    """Two algorithms and the baseline, three seeds, two settings."""
    rows = [
        {"algorithm": a, "seed": s, "epsilon": e, "epochs": 10 * e, "group": g, "cost": c + 0.01 * s, "accuracy": 0.8}
        for a, c in (("dpsgd", -0.3), ("dpsgd_f", -0.1))
        for s in range(3)
        for e in (1, 3)
        for g in ("2", "8")
    ]
    return pd.DataFrame([*rows, {"algorithm": "sgd", "seed": 0, "epsilon": None, "accuracy": 0.9}])


def trace(chart: go.Figure, name: str):
    return next(t for t in chart.data if t.name == name)


@pytest.mark.slow
def test_bars_are_the_groups_figures_with_the_baseline_first(sample):
    chart = figures.metric_per_group(sample.documents, "sex", "auroc")
    assert [t.name for t in chart.data] == ["sgd", "dpsgd", "dpsgd_f"]
    expected = [sample.documents["dpsgd"]["groups"]["sex"][g]["auroc"] for g in ("Female", "Male")]
    assert list(trace(chart, "dpsgd").y) == [*expected, None]


def test_cost_leaves_the_baseline_out(sample):
    chart = figures.cost_per_group(sample.documents, "sex", "excess_loss")
    assert [t.name for t in chart.data] == ["dpsgd", "dpsgd_f"]
    cost = sample.documents["dpsgd_f"]["cost_of_privacy"]["groups"]["sex"]
    assert list(trace(chart, "dpsgd_f").y)[:2] == [cost["Female"]["excess_loss"], cost["Male"]["excess_loss"]]


def test_an_algorithm_keeps_its_colour_where_another_lacks_the_grouping(sample):
    documents = copy.deepcopy(sample.documents)
    del documents["dpsgd"]["groups"]["sex"], documents["dpsgd"]["cost_of_privacy"]["groups"]["sex"]
    for chart in (figures.metric_per_group, figures.cost_per_group):
        bar, before = (trace(chart(of, "sex"), "dpsgd_f") for of in (documents, sample.documents))
        assert bar.marker == before.marker


def test_bars_of_accuracy_carry_their_intervals_small_groups_too(sample):
    documents = copy.deepcopy(sample.documents)
    documents["dpsgd"]["groups"]["sex"]["Male"]["count"] = 9
    documents["dpsgd"]["cost_of_privacy"]["intervals"] = {"groups": {"sex": {"Female": [-0.5, -0.1], "Male": None}}}
    own = sample.documents["dpsgd"]["intervals"]["groups"]["sex"]

    bar = trace(figures.metric_per_group(documents, "sex"), "dpsgd")
    for k, group in enumerate(("Female", "Male")):
        assert (bar.y[k] - bar.error_y.arrayminus[k], bar.y[k] + bar.error_y.array[k]) == pytest.approx(own[group])
    assert (bar.y[2], bar.error_y.array[2]) == (None, 0)

    cost = trace(figures.cost_per_group(documents, "sex"), "dpsgd")
    assert (cost.y[0] - cost.error_y.arrayminus[0], cost.y[0] + cost.error_y.array[0]) == pytest.approx((-0.5, -0.1))
    assert cost.error_y.array[1] == 0
    for without in (figures.cost_per_group(sample.documents, "sex"), figures.metric_per_group(documents, "sex", "mcc")):
        assert trace(without, "dpsgd").error_y.array is None


def test_an_interval_is_drawn_as_far_as_its_figure_can_be(sample):
    documents = copy.deepcopy(sample.documents)
    for part in (documents["dpsgd"], documents["dpsgd"]["cost_of_privacy"]):
        part["intervals"] = {"groups": {"sex": {"Female": [-1.4, 1.65], "Male": None}}}
    for chart, least in ((figures.metric_per_group, 0), (figures.cost_per_group, -1)):
        bar = trace(chart(documents, "sex"), "dpsgd")
        assert (bar.y[0] - bar.error_y.arrayminus[0], bar.y[0] + bar.error_y.array[0]) == pytest.approx((least, 1))


def test_intervals_of_groups_with_few_test_records_do_not_squeeze_the_bars(sample):
    documents = copy.deepcopy(sample.documents)
    cost = documents["dpsgd"]["cost_of_privacy"]
    cost["intervals"] = {"groups": {"sex": {"Female": [0.0, 0.1], "Male": [-1.0, 1.0]}}}
    before = figures.cost_per_group(documents, "sex")
    assert before.layout.yaxis.range is None
    for document in documents.values():
        document["groups"]["sex"]["Male"]["count"] = 9
    drawn = figures.cost_per_group(documents, "sex")
    heights = [y for bar in drawn.data for y in bar.y if y is not None]
    low, high = drawn.layout.yaxis.range
    assert max(0.1, *heights) < high < 0.5
    assert -0.5 < low <= min(0, *heights)
    assert trace(drawn, "dpsgd").error_y.array == trace(before, "dpsgd").error_y.array


def test_intervals_of_few_test_records_are_seen_where_there_is_nothing_else(sample):
    documents = copy.deepcopy(sample.documents)
    for document in documents.values():
        for of in (document["groups"]["sex"], document.get("cost_of_privacy", {}).get("groups", {}).get("sex", {})):
            for group in of.values():
                group |= {"accuracy": 0.0, "count": 9}
    documents["dpsgd"]["cost_of_privacy"]["intervals"] = {"groups": {"sex": {"Female": [-0.1, 0.1], "Male": None}}}
    assert figures.cost_per_group({"dpsgd": documents["dpsgd"]}, "sex").layout.yaxis.range is None


def test_more_bars_than_one_tells_apart_become_a_map(sample, monkeypatch):
    documents = copy.deepcopy(sample.documents)
    documents["dpsgd"]["cost_of_privacy"]["intervals"] = {"groups": {"sex": {"Female": [-0.5, -0.1], "Male": None}}}
    documents["dpsgd_f"]["groups"]["sex"]["Male"]["count"] = 9
    before = {chart: chart(documents, "sex") for chart in (figures.metric_per_group, figures.cost_per_group)}
    monkeypatch.setattr("equidp.reporting.figures.groups.MOST_BARS", 5)
    for chart, barred in before.items():
        (found,) = chart(documents, "sex").data
        assert (found.type, list(found.y)) == ("heatmap", [bar.name for bar in barred.data])
        assert [list(row) for row in found.z] == [list(bar.y) for bar in barred.data]
        assert all(tuple(found.x) == bar.x for bar in barred.data)
    assert (found.zmin, found.zmax) == (-found.zmax, max(abs(z) for row in found.z for z in row if z is not None))
    female, male, _ = found.hovertext[0]
    assert female.endswith("test records, 95 % interval -0.500 to -0.100")
    assert male.endswith("test records")
    del documents["dpsgd"]["groups"]["sex"]["Female"], documents["dpsgd"]["cost_of_privacy"]["groups"]["sex"]["Female"]
    (short,) = figures.metric_per_group(documents, "sex").data
    (z, hover), full = (short.z[1], short.hovertext[1]), before[figures.metric_per_group].data[1]
    assert (z[0], z[1]) == (None, full.y[1])
    assert hover[1].startswith(full.hovertext[1])


def test_groups_with_few_test_records_are_marked(sample):
    documents = copy.deepcopy(sample.documents)
    for group, count in (("Female", 9), ("Male", 10)):
        for document in documents.values():
            document["groups"]["sex"][group]["count"] = count
    for chart in (figures.metric_per_group(documents, "sex"), figures.cost_per_group(documents, "sex")):
        assert list(trace(chart, "dpsgd").x) == ["Female †", "Male", "Not stated †"]


def test_groups_with_few_test_records_are_marked_among_the_counts_too(sample):
    assert list(trace(figures.group_counts(sample.group_table, "sex"), "train").x) == ["Female", "Male", "Not stated †"]
    untested = sample.group_table.drop(columns="test")
    assert list(trace(figures.group_counts(untested, "sex"), "train").x) == ["Female", "Male", "Not stated"]


def test_group_counts_ignore_columns_that_are_no_counts(sample):
    table = sample.group_table.assign(public=0, evaluable=True, note="")
    chart = figures.group_counts(table, "class")
    assert [t.name for t in chart.data] == ["train", "test"]
    assert list(trace(chart, "train").y)[8] == 40


def test_figures_that_are_shown_without_their_page_say_that_they_are_exact(sample):
    """In a notebook, Kedro-Viz and MLflow they have no caption."""
    settings = SimpleNamespace(data=SimpleNamespace(groups=["sex"], evaluate_on="validation"))
    counts = draw_group_counts(sample.group_table, settings)
    accuracy, cost = (
        draw(sample.documents["dpsgd"], settings, algorithm="dpsgd") for draw in (accuracy_figure, cost_figure)
    )
    outside = "outside the guarantee</sup>"
    assert counts.layout.title.text == f"Records by sex<br><sup>Exact numbers: {outside}"
    assert accuracy.layout.title.text == f"Accuracy by sex<br><sup>Exact figures of validation records: {outside}"
    assert cost.layout.title.text.endswith(
        f"<br><sup>Exact figures of validation records and of the baseline: {outside}"
    )


def test_clip_norms_per_group_or_one_for_all(sample):
    history = sample.histories["dpsgd_f"]
    few = figures.clip_norms(history.drop(columns=[f"clip_norm/{k}" for k in range(6, 10)]), "dpsgd_f")
    assert [t.name for t in few.data] == list("012345")
    (many,) = figures.clip_norms(history, "dpsgd_f").data
    assert (many.type, list(many.y), list(many.x)) == ("heatmap", list("0123456789"), list(history["epoch"]))
    assert list(many.z[8]) == list(history["clip_norm/8"])
    one = figures.clip_norms(pd.DataFrame({"epoch": [1, 2], "clip_norm": [1.0, 0.5]}), "sad_dpsgd")
    assert [t.name for t in one.data] == ["all records"]
    assert not figures.clip_norms(sample.histories["sgd"], "sgd").data


@pytest.mark.parametrize(("epochs", "step"), [(2, 1), (60, None)])
def test_few_epochs_have_a_tick_each_and_none_between(epochs, step):
    history = pd.DataFrame({"epoch": range(1, epochs + 1), "clip_norm": 1.0, "epsilon": 1.5, "test/accuracy": 0.5})
    for chart in (figures.learning_curve({"dpsgd": history}), figures.schedules({"dpsgd": history})):
        assert chart.layout.xaxis.dtick == step
    assert figures.learning_curve({"dpsgd": history}, over="epsilon").layout.xaxis.dtick is None


def test_clip_norms_of_long_runs_are_running_means():
    history = pd.DataFrame({"epoch": range(1, 31), "clip_norm/a": [1.0, 3.0] * 15})
    chart = figures.clip_norms(history, "dpsgd_f")
    assert chart.layout.yaxis.title.text == "clip norm, mean of 2 epochs"
    assert set(chart.data[0].y[1:]) == {2.0}
    short = figures.clip_norms(history.head(29), "dpsgd_f")
    assert list(short.data[0].y[:2]) == [1.0, 3.0]


def test_schedules_stack_noise_and_clip_norm_over_one_axis():
    epochs = [1, 2, 3]
    chart = figures.schedules(
        {
            "sad_dpsgd": pd.DataFrame({"epoch": epochs, "noise_multiplier": [1, 2, 3], "clip_norm": [3, 2, 1]}),
            "auto_s": pd.DataFrame({"epoch": epochs, "noise_multiplier": [2, 2, 2]}),
        }
    )
    assert [(t.name, t.yaxis, t.showlegend) for t in chart.data] == [
        ("sad_dpsgd", "y", True),
        ("auto_s", "y", True),
        ("sad_dpsgd", "y2", False),
    ]
    assert chart.data[0].line.color == chart.data[2].line.color


def test_learning_curves_over_epochs_and_over_epsilon(sample):
    over_epochs = figures.learning_curve(sample.histories)
    assert [t.name for t in over_epochs.data] == ["sgd", "dpsgd", "dpsgd_f"]
    over_epsilon = figures.learning_curve(sample.histories, "loss", over="epsilon")
    assert [t.name for t in over_epsilon.data] == ["dpsgd", "dpsgd_f"]
    assert list(over_epsilon.data[0].x) == list(sample.histories["dpsgd"]["epsilon"])
    assert over_epsilon.data[0].line.color == over_epochs.data[1].line.color


def test_group_curves_find_product_groupings_under_their_slugs():
    history = pd.DataFrame({"epoch": [1], "test/accuracy/sex x race:F x a": [0.5], "test/accuracy/class:8": [0.1]})
    documents = {"dpsgd": {"groups": {"sex*race": {"F*a": {}, "M*a": {}}, "class": {"8": {}}}}}
    chart = figures.group_curves({"dpsgd": history}, documents, "sex*race", ["F*a", "M*a"])
    assert [(t.name, t.y) for t in chart.data] == [("dpsgd, F*a", (0.5,))]


def test_group_curves_tell_groups_of_one_slug_apart():
    groups = {"sex": (np.array([0, 0, 1]), ("男", "女"))}
    row = live_metrics(np.eye(2)[[0, 0, 1]], np.array([0, 0, 0]), groups)
    histories, documents = {"a": pd.DataFrame([{"epoch": 1, **row}])}, {"a": {"groups": {"sex": {"男": {}, "女": {}}}}}
    chart = figures.group_curves(histories, documents, "sex", ["女"])
    assert [(t.name, t.y) for t in chart.data] == [("a, 女", (0.0,))]


def test_epsilon_by_accountant_with_the_published_figure_as_a_level(sample):
    chart = figures.epsilon_over_epochs(sample.histories["dpsgd"], sample.privacy["dpsgd"])
    assert [t.name for t in chart.data] == ["guaranteed ε", "RDP", "PLD", "as published, whole run"]
    assert set(chart.data[3].y) == {3.9}


def test_epsilon_of_many_algorithms_shares_one_figure(sample):
    chart = figures.epsilon_by_algorithm(sample.histories)
    assert [t.name for t in chart.data] == ["dpsgd", "dpsgd_f"]
    assert list(chart.data[1].y) == list(sample.histories["dpsgd_f"]["epsilon"])


def test_privacy_utility_averages_seeds_and_draws_the_baseline_as_a_level():
    chart = figures.privacy_utility(runs())
    assert [t.name for t in chart.data] == ["dpsgd", "dpsgd_f", "sgd"]
    assert list(trace(chart, "dpsgd").x) == [1, 3]
    assert chart.layout.shapes[0].y0 == pytest.approx(0.9)


def test_runs_that_meet_one_epsilon_but_for_a_digit_stand_beside_each_other():
    one = runs()[runs()["epsilon"] != 1]
    one.loc[one["algorithm"] == "dpsgd_f", "epsilon"] -= 1e-6  # each algorithm's noise is solved for by itself
    assert list(figures.privacy_utility(one).layout.xaxis.range) == pytest.approx([2.7, 3.3])
    assert figures.privacy_utility(runs()).layout.xaxis.range is None


def test_names_of_many_groups_stand_beside_the_plot_and_not_on_its_title():
    few = runs().dropna(subset=["group"])
    many = pd.concat([few.assign(group=[f"{name}{group}" for group in few["group"]]) for name in "abc"])
    assert figures.cost_against(many, "epochs").layout.legend.orientation == "v"
    assert figures.cost_against(few, "epochs").layout.legend.orientation is None


def test_costs_against_a_setting_carry_intervals_over_seeds():
    chart = figures.cost_against(runs().dropna(subset=["group"]), "epochs")
    assert [t.name for t in chart.data] == ["dpsgd, 2", "dpsgd, 8", "dpsgd_f, 2", "dpsgd_f, 8"]
    first = chart.data[0]
    assert list(first.x) == [10, 30]
    assert first.y[0] == pytest.approx(-0.29)
    # seeds add 0, .01, .02: s = .01, half width t(2)·.01/√3
    assert first.error_y.array[0] == pytest.approx(4.302653 * 0.01 / 3**0.5, rel=1e-5)


def test_metric_against_names_the_setting_in_words():
    frame = runs().rename(columns={"epochs": "training.batch_size"})
    chart = figures.metric_against(frame, "training.batch_size")
    assert chart.layout.xaxis.title.text == "batch size"
    assert list(chart.data[0].y) == pytest.approx([0.8, 0.8])


def test_diagnostics_take_the_last_epochs_and_say_they_are_not_private(sample):
    chart = figures.diagnostic_curve(sample.histories, "cosine", last=10)
    assert [t.name for t in chart.data] == ["dpsgd", "dpsgd_f"]
    assert list(chart.data[0].x) == list(range(11, 21))
    assert "not private" in chart.layout.title.text
    assert len(figures.group_diagnostic(sample.histories["dpsgd"], "dpsgd").data) == 10


def test_diagnostics_that_an_algorithm_adds_are_drawn_too():
    history = pd.DataFrame({"epoch": [1], "nonprivate/outgrown_proposals": [0.2], "nonprivate/gradient_norm/8": [3.0]})
    assert figures.diagnostics_in({"dpis": history}) == ["outgrown_proposals"]
    assert figures.diagnostic_curve({"dpis": history}, "outgrown_proposals").data[0].y == (0.2,)


def test_distribution_adds_up_bins_of_the_last_epochs():
    prefix = "nonprivate/gradient_norm_histogram/"
    history = pd.DataFrame(
        {"epoch": [1, 2, 3], f"{prefix}0": [9, 1, 2], f"{prefix}0.5": [9, 3, 2], f"{prefix}10": [9, 0, 0]}
    )
    chart = figures.diagnostic_distribution({"psasc": history, "sgd": history[["epoch"]]}, last=2)
    assert list(chart.data[0].x) == ["0", "0.5"]  # empty bins at the ends are left out
    assert list(chart.data[0].y) == [3 / 8, 5 / 8]
    assert len(chart.data) == 1


def test_schedule_report_draws_what_the_report_has():
    report = pd.DataFrame(
        {"noise_decay": [0.9, 0.6], "mean": [1.2, 1.5], "variance": [0.1, 0.2], "first_noise_multiplier": [1, 0.7]}
    )
    chart = figures.schedule_figure(report, "noise_decay")
    assert len(chart.data) == 3
    assert list(chart.data[0].x) == [0.6, 0.9]
    assert list(chart.data[0].y) == [1.5, 1.2]


def test_trajectories_follow_the_steps():
    paths = pd.DataFrame(
        {"algorithm": ["a"] * 3, "step": [2, 0, 1], "first": [0.0, 2.0, 1.0], "second": [0.0, 4.0, 2.0]}
    )
    chart = figures.trajectories(paths, (0.0, 0.0))
    assert list(chart.data[0].x) == [2.0, 1.0, 0.0]
    assert chart.data[1].name == "optimum"


def test_looks_differ_in_more_than_colour():
    table = looks([f"a{i}" for i in range(40)] + ["sgd"])
    assert len({(look.colour, look.dash, look.symbol) for look in table.values()}) == 41
    first = list(table.values())[1:7]
    for part in ("colour", "dash", "symbol", "pattern"):
        assert len({getattr(look, part) for look in first}) == 6


def test_names_from_data_are_inert_and_short(hostile):
    assert label("<b>x</b> & y") == "&lt;b&gt;x&lt;/b&gt; &amp; y"
    assert len(label("x" * 200)) == 48
    assert bars(looks([])["sgd"], [HOSTILE], [1]).x[0].startswith("&lt;script&gt;")
    for chart in (
        figures.metric_per_group(hostile.documents, "sex"),
        figures.cost_per_group(hostile.documents, "sex"),
        figures.group_counts(hostile.group_table, "sex"),
        figures.clip_norms(pd.DataFrame({"epoch": [1], f"clip_norm/{HOSTILE}": [1.0]}), HOSTILE),
        figures.learning_curve({HOSTILE: hostile.histories["dpsgd"]}),
    ):
        assert "<script" not in chart.to_json()
        assert "<a" not in chart.to_json()


def test_names_that_are_cut_can_still_be_told_apart(sample):
    settings = [f"dpsgd_f evaluate_on=test batch_size=256 epochs={k} learning_rate=0.5 optimizer=sgd" for k in (2, 5)]
    documents = {name: copy.deepcopy(sample.documents["dpsgd"]) for name in settings}
    groups = [f"municipality of the area number {k}" for k in range(3)]
    for document in documents.values():
        document["groups"]["sex"] = dict(zip(groups, document["groups"]["sex"].values(), strict=True))
    chart = figures.metric_per_group(documents, "sex")
    assert len({bar.name for bar in chart.data}) == len(chart.data) == 3
    assert len(set(chart.layout.xaxis.ticktext)) == len(chart.layout.xaxis.tickvals) == 6  # the baseline has its own


def test_every_figure_is_strict_json(sample):
    history = sample.histories["dpsgd"].assign(**{"test/accuracy": np.nan})
    history.loc[3, "test/accuracy"] = 0.5
    chart = figures.learning_curve({"dpsgd": history})
    assert json.loads(json.dumps(json.loads(chart.to_json()), allow_nan=False))["data"][0]["y"].count(None) == 0
    for drawn in (figures.metric_per_group(sample.documents, "class"), figures.schedules(sample.histories)):
        assert json.dumps(json.loads(drawn.to_json()), allow_nan=False)


def test_a_group_that_is_called_by_a_number_keeps_its_name_wherever_it_stands() -> None:
    """Plotly takes a whole number among the ticks for the group of that name."""
    chart = figures.group_counts(pd.DataFrame({"grouping": "sex", "group": ["1", "2"], "train": [5, 6]}), "sex")
    assert list(chart.layout.xaxis.ticktext) == ["1", "2"]
    assert not {str(tick) for tick in chart.layout.xaxis.tickvals} & {"0", "1", "2"}
    assert [round(tick) for tick in chart.layout.xaxis.tickvals] == [0, 1]
