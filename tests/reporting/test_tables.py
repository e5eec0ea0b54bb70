"""Tables: what stands where, and how much of it the terminal shows."""

from __future__ import annotations

import copy
import io
import warnings

import pandas as pd
import pytest
from rich.console import Console

from equidp.evaluation.metrics import worst_group
from equidp.reporting.tables import (
    FEW_MEANS,
    disparity_table,
    group_figures,
    groups_table,
    metrics_table,
    other_baseline,
    print_table,
    results_table,
    shortened,
    with_baseline,
    with_marks,
)
from equidp.sweep.summary import averaged


def printed(frame: pd.DataFrame, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    print_table(frame, console)
    return console.file.getvalue().splitlines()


def test_one_row_per_algorithm_with_its_epsilon_groups_and_gap(sample):
    frame = results_table(sample.documents, sample.privacy, grouping="sex")
    assert list(frame.index) == ["sgd", "dpsgd", "dpsgd_f"]
    document = sample.documents["dpsgd"]
    row = frame.loc["dpsgd"]
    assert row["epsilon"] == sample.privacy["dpsgd"]["epsilon"]
    assert row["accuracy"] == document["overall"]["accuracy"]
    assert row["sex:Male"] == document["groups"]["sex"]["Male"]["accuracy"]
    assert row["cost"] == document["cost_of_privacy"]["overall"]["accuracy"]
    assert row["gap"] == document["cost_of_privacy"]["gap"]["sex"]["accuracy"]
    assert row["worst_group"] == document["worst"]["sex"]["group"]
    assert pd.isna(frame.loc["sgd", "epsilon"])
    assert pd.isna(frame.loc["sgd", "cost"])


def test_a_single_run_brings_its_baseline_along(sample):
    alone = sample.only("dpsgd_f")
    assert list(with_baseline(alone.documents)) == ["sgd", "dpsgd_f"]
    frame = results_table(alone.documents, alone.privacy)
    assert frame.loc["sgd", "accuracy"] == sample.documents["sgd"]["overall"]["accuracy"]


def test_of_several_baselines_none_is_shown_for_all(sample):
    documents = {k: copy.deepcopy(sample.documents[k]) for k in ("dpsgd", "dpsgd_f")}
    assert next(iter(with_baseline(documents))) == "sgd"
    documents["dpsgd"]["baseline"]["overall"]["accuracy"] = 0.25
    assert list(with_baseline(documents)) == ["dpsgd", "dpsgd_f"]
    assert other_baseline(documents) == []
    assert other_baseline({"sgd": sample.documents["sgd"], **documents}) == ["dpsgd"]


def test_over_seeds_the_worst_group_is_the_mean_of_each_seeds_worst(sample):
    seeds = {seed: copy.deepcopy(sample.documents["dpsgd"]) for seed in range(2)}
    for seed, values in enumerate(((0.2, 0.9), (0.9, 0.2))):
        groups = seeds[seed]["groups"]["sex"]
        groups["Female"]["accuracy"], groups["Male"]["accuracy"] = values
        seeds[seed]["worst"]["sex"] = worst_group(groups)
    frame = results_table({"dpsgd": averaged("dpsgd", seeds)}, sample.privacy, grouping="sex")
    assert frame.loc["dpsgd", "worst_accuracy"] == pytest.approx(0.2)
    assert frame["seeds"].to_dict() == {"sgd": 2, "dpsgd": 2}
    assert frame.loc["dpsgd", "sex:Female"] == pytest.approx(0.55)


def test_of_many_groups_those_that_lost_most_are_shown(sample):
    frame = results_table(sample.documents, sample.privacy, max_groups=3)
    shown = [c.split(":")[1] for c in frame.columns if c.startswith("class:")]
    costs = {
        group: max(
            sample.documents[a]["cost_of_privacy"]["groups"]["class"][group]["accuracy"] for a in ("dpsgd", "dpsgd_f")
        )
        for group in sample.documents["sgd"]["groups"]["class"]
    }
    assert sorted(shown) == sorted(sorted(costs, key=costs.get)[-3:])
    assert shown == sorted(shown)  # in the groups' own order


@pytest.mark.parametrize("width", [200, 100, 80, 50])
def test_the_printed_table_fits_and_cuts_no_number(sample, width):
    lines = printed(results_table(sample.documents, sample.privacy), width)
    assert max(map(len, lines)) <= min(width, 100)
    text = "\n".join(lines)
    assert "…" not in text
    assert f"{sample.documents['dpsgd_f']['overall']['accuracy']:.3f}" in text
    assert "2.987" in text


def test_where_the_terminal_is_narrow_the_groups_that_lost_most_stay(sample):
    documents = copy.deepcopy(sample.only("dpsgd").documents)
    costs = documents["dpsgd"]["cost_of_privacy"]["groups"]["class"]
    last = list(costs)[-1]
    costs[last]["accuracy"] = 0.9
    frame = results_table(documents, sample.privacy, grouping="class")
    shown = {width: " ".join(" ".join(printed(frame, width)).split()) for width in (100, 70)}
    headings = {width: next(line for line in printed(frame, width) if " ε " in line).split() for width in (100, 70)}
    assert last in headings[70]
    assert len(headings[70]) < len(headings[100])
    few = {width: sum(group in headings[width] for group in costs) for width in headings}
    assert few[70] == 1
    assert f"Of {len(costs)} groups the one that paid most is shown." in shown[70]
    assert f"Of {len(costs)} groups the {few[100]} that paid most are shown." in shown[100]
    everything = printed(results_table(documents, sample.privacy, grouping="sex"), 100)
    assert "that paid most" not in " ".join(everything)


def test_notes_speak_of_columns_that_are_there_and_nobody_pays_without_privacy(sample):
    told = " ".join(" ".join(printed(results_table({"sgd": sample.documents["sgd"]}, {}), 100)).split())
    assert "groups the 4 of the lowest accuracy are shown." in told
    assert "cost" not in told.lower()
    assert "Gap" not in told


def test_small_groups_are_not_said_to_be_left_out_where_there_are_no_others(sample):
    """`telling` takes all groups then: a worst group of one record stood above a line that denied it."""
    documents = copy.deepcopy(sample.only("dpsgd").documents)
    for figures in documents["dpsgd"]["groups"]["sex"].values():
        figures["count"] = 1
    assert worst_group(documents["dpsgd"]["groups"]["sex"])["group"] is not None
    told = " ".join(" ".join(printed(results_table(documents, sample.privacy, grouping="sex"), 100)).split())
    assert "over groups of ten test records or more, where there are two." in told
    assert FEW_MEANS.endswith("where two groups have enough.")


def test_small_groups_are_marked_in_the_overview_however_long_their_names(sample):
    document = copy.deepcopy(sample.only("dpsgd").documents["dpsgd"])
    for figures in (document, document["baseline"]):
        figures["groups"]["sex"] = {
            "A name that is cut": {"count": 9, "accuracy": 0.25},
            "Male": {"count": 10, "accuracy": 0.5},
        }
    frame = results_table({"dpsgd": document | {"worst": {}}}, sample.privacy, grouping="sex")
    assert "sex:A name that is cut" in frame  # data keep the name as it is
    shown = with_marks(frame)
    assert [c for c in shown if c.startswith("sex:")] == ["sex:A name that is cut †", "sex:Male"]
    told = " ".join(" ".join(printed(frame, 100)).split())
    assert "A name t…s cut †" in told
    assert "†: fewer than ten test records." in told
    assert "†" not in " ".join(printed(results_table(sample.documents, sample.privacy), 100))


def test_the_mark_is_explained_only_where_it_stands(sample):
    """A group without a record has no figure, so its column is left out, and the mark with it."""
    document = copy.deepcopy(sample.only("dpsgd").documents["dpsgd"])
    for figures in (document, document["baseline"]):
        figures["groups"]["sex"] = {
            "unknown": {"count": 0, "accuracy": None},
            "Female": {"count": 10, "accuracy": 0.25},
            "Male": {"count": 10, "accuracy": 0.5},
        }
    document["cost_of_privacy"]["groups"]["sex"] = {"Female": {"accuracy": 0.0}, "Male": {"accuracy": 0.0}}
    told = " ".join(printed(results_table({"dpsgd": document | {"worst": {}}}, sample.privacy, grouping="sex"), 100))
    assert "unknown" not in told
    assert "†" not in told


def test_notes_name_the_part_that_the_figures_are_of(sample):
    documents = {"dpsgd": copy.deepcopy(sample.only("dpsgd").documents["dpsgd"]) | {"evaluated_on": "validation"}}
    for figures in (documents["dpsgd"], documents["dpsgd"]["baseline"]):
        figures["groups"]["sex"]["Male"]["count"] = 9
    told = " ".join(" ".join(printed(results_table(documents, sample.privacy, grouping="sex"), 100)).split())
    assert "on the validation records" in told
    assert "over groups of ten validation records or more" in told
    assert "†: fewer than ten validation records." in told
    assert "test records" not in told


def test_names_that_are_cut_can_still_be_told_apart(sample):
    """Of an intersection the second half tells the groups apart: cut at their end, women and men had one name."""
    document = copy.deepcopy(sample.only("dpsgd").documents["dpsgd"])
    names = ("Asian-Pac-Islander*Female", "Asian-Pac-Islander*Male")
    for figures in (document, document["baseline"]):
        figures["groups"]["sex"] = {name: {"count": 20, "accuracy": 0.5} for name in names}
    headings = " ".join(printed(results_table({"dpsgd": document | {"worst": {}}}, {}, grouping="sex"), 100))
    assert "*Female" in headings
    assert "er*Male" in headings
    alike = ["a" * 30 + f"{k}" + "b" * 30 for k in range(3)]  # differ where they are cut
    assert len(set(shortened([*alike, "short"], 16).values())) == 4


def test_a_worst_group_is_marked_where_there_are_small_ones_only(sample):
    documents = copy.deepcopy(sample.only("dpsgd").documents)
    del documents["dpsgd"]["worst"]
    for of in (documents["dpsgd"], documents["dpsgd"]["baseline"]):
        for figures in of["groups"]["sex"].values():
            figures["count"] = 1
    assert with_marks(results_table(documents, sample.privacy, grouping="sex"))["worst_group"]["dpsgd"].endswith(" †")


def test_names_are_printed_as_they_are_not_as_markup(hostile):
    hostile.documents["dpsgd"]["groups"]["sex"]["[red]x"] = hostile.documents["dpsgd"]["groups"]["sex"]["Female"]
    frame = results_table(hostile.documents, hostile.privacy, grouping="sex").drop(
        columns=["gap", "spread"]
    )  # for its width
    text = "\n".join(printed(frame, 100))
    del hostile.documents["dpsgd"]["groups"]["sex"]["[red]x"]
    assert "[red]x" in text
    assert "<script>…" in text


def test_groups_table_lists_the_group_without_a_test_record(sample):
    frame = groups_table(sample.documents, "sex", sample.group_table)
    assert frame.loc["Not stated †", "tested"] == 0
    assert frame.loc["Not stated †", "train"] == 700
    assert pd.isna(frame.loc["Not stated †", "accuracy dpsgd"])
    expected = sample.documents["dpsgd"]["cost_of_privacy"]["groups"]["sex"]["Male"]
    assert frame.loc["Male", "cost in accuracy dpsgd"] == expected["accuracy"]
    assert frame.loc["Male", "excess loss dpsgd"] == expected["excess_loss"]
    assert "AUROC sgd" in frame
    assert "AUROC sgd" not in groups_table(sample.documents, "class", pd.DataFrame())


def test_a_groups_table_of_many_settings_is_built_without_pandas_warning_of_its_columns(sample):
    documents = {f"dpsgd ε={k}": sample.documents["dpsgd"] for k in range(60)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.PerformanceWarning)
        frame = groups_table(documents, "sex", sample.group_table).reset_index()
    assert list(frame.columns[:4]) == ["group", "train", "tested", "accuracy sgd"]


def test_one_private_models_costs_have_their_intervals_beside_them(sample):
    document = copy.deepcopy(sample.documents["dpsgd"])
    document["cost_of_privacy"]["intervals"] = {"groups": {"sex": {"Female": [-0.004, 0.52], "Not stated": None}}}
    frame = groups_table({"dpsgd": document}, "sex", sample.group_table)
    columns = list(frame.columns)
    assert columns[columns.index("cost in accuracy dpsgd") + 1] == "95 % of cost"
    assert frame.loc["Female", "95 % of cost"] == "-0.004\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}+0.520"
    assert pd.isna(frame.loc["Not stated †", "95 % of cost"])
    assert "95 % of cost" not in groups_table(sample.documents, "sex", sample.group_table)


def test_overall_metrics_and_disparities(sample):
    metrics = metrics_table(sample.documents)
    assert metrics.loc["dpsgd", "MCC"] == sample.documents["dpsgd"]["overall"]["mcc"]
    table = disparity_table(sample.documents).set_index(["grouping", "algorithm"])
    measured = sample.documents["dpsgd_f"]["disparity"]["sex"]
    assert table.loc[("sex", "dpsgd_f"), "equalized odds difference"] == measured["equalized_odds_difference"]
    assert pd.isna(table.loc[("class", "dpsgd_f"), "demographic parity ratio"])


def test_group_figures_are_the_documents_in_long_form(sample):
    frame = group_figures(sample.documents, ["accuracy", "loss"])
    assert len(frame) == 3 * 13
    row = frame[(frame["algorithm"] == "dpsgd") & (frame["group"] == "8")].iloc[0]
    assert (
        row["cost/excess_loss"] == sample.documents["dpsgd"]["cost_of_privacy"]["groups"]["class"]["8"]["excess_loss"]
    )


def test_documents_without_groups_still_make_a_table(sample):
    bare = {"sgd": {"overall": sample.documents["sgd"]["overall"], "groups": {}}}
    frame = results_table(bare, {})
    assert printed(frame, 100)
    assert frame.loc["sgd", "accuracy"] == sample.documents["sgd"]["overall"]["accuracy"]
    assert disparity_table(bare).empty


def test_epsilons_of_two_deltas_stand_beside_their_delta(sample):
    several = {name: facts | {"delta": 1e-6} if name == "dpsgd_f" else facts for name, facts in sample.privacy.items()}
    assert "delta" not in results_table(sample.documents, sample.privacy)
    shown = results_table(sample.documents, several)["delta"]
    assert shown["dpsgd_f"] == 1e-6
    assert shown["dpsgd"] == 1e-5


def test_a_group_of_few_records_takes_no_place_in_the_overview(sample):
    documents = copy.deepcopy(sample.only("dpsgd").documents)
    few = list(documents["dpsgd"]["groups"]["class"])[3]
    for of in (documents["dpsgd"], documents["dpsgd"]["baseline"]):
        of["groups"]["class"][few]["count"] = 4
    documents["dpsgd"]["cost_of_privacy"]["groups"]["class"][few]["accuracy"] = 0.9
    assert f"class:{few}" not in results_table(documents, sample.privacy, grouping="class", max_groups=3)


def test_means_of_counts_say_so(sample):
    documents = copy.deepcopy(sample.only("dpsgd").documents)
    assert "tested" in groups_table(documents, "sex", sample.group_table)
    for of in (documents["dpsgd"], documents["dpsgd"]["baseline"]):
        of["groups"]["sex"]["Female"]["count"] = 180.5
    assert groups_table(documents, "sex", sample.group_table)["tested (mean)"]["Female"] == 180
