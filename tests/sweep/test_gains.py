"""Gains over a reference, paired by seed: which runs are compared, the figures by hand, and what the page says."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from html import unescape
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console
from scipy import stats
from tests.sweep.test_summary import STATEMENT

from equidp.errors import EquidpError
from equidp.reporting.figures import gains as forest
from equidp.reporting.gains import MOST_DRAWN, gains_caption, gains_notes
from equidp.sweep.comparison import counterparts, references
from equidp.sweep.gains import gain
from equidp.sweep.grid import choose_grid
from equidp.sweep.printed import print_table, shown_figure
from equidp.sweep.project import Cell, digest, row_key
from equidp.sweep.summary import rows_of, table_of, write_summary
from equidp.tasks import TASKS


def cell(algorithm: str, seed: int = 0, dataset: str = "digits", **changes: Mapping) -> Cell:
    """A cell without files; `changes` are of its blocks of settings."""
    private = algorithm != "sgd"
    settings = {
        "algorithm": algorithm,
        "dataset": dataset,
        "seed": seed,
        "privacy": {"epsilon": 1.0, "unit": "record"} if private else {"unit": "record"},
        "training": {"learning_rate": 1.0},
        "sgd": {"options": {}},
        algorithm: {"options": {}},
        "audited": {"algorithm": "dpsgd_f", "options": {}},
    }
    settings |= changes
    overrides = {"dataset": dataset, "seed": seed}
    for block, values in changes.items():
        overrides |= {f"{block}.{name}": value for name, value in values.items()}
    return Cell(algorithm, overrides, settings, f"{algorithm}-{digest(settings)}", "b", "r", {}, Path(), Path())


def finished(one: Cell, folder: Path, a: float | None, b: float | None, metric: str = "accuracy", **facts) -> Cell:
    """The same with its files: figures of two groups, and those of all as their mean."""
    place = folder / one.key
    place.mkdir(parents=True)
    whole = None if a is None or b is None else (a + b) / 2
    of = {name: {"count": 50, metric: value} for name, value in (("a", a), ("b", b))}
    document = {"overall": {"count": 100, metric: whole, "loss": 0.5}, "groups": {"class": of}}
    document |= {"task": "regression"} if metric == "mae" else {}
    privacy = {**STATEMENT, "algorithm": one.algorithm, "epsilon": 1.0, "seed": one.seed, **facts}
    outputs = {"metrics": place / "metrics.json", "privacy": place / "privacy.json"}
    outputs["metrics"].write_text(json.dumps(document))
    outputs["privacy"].write_text(json.dumps(privacy))
    return replace(one, outputs=outputs)


FIGURES = {
    "dpsgd": [(0.80, 0.40), (0.84, 0.50), (0.70, 0.30)],
    "dpsgd_f": [(0.82, 0.48), (0.84, 0.60), (0.74, 0.33)],
}
"""Of both groups, by seed."""


@pytest.fixture
def cells(tmp_path: Path) -> list[Cell]:
    return [finished(cell(name, seed), tmp_path, *pair) for name, of in FIGURES.items() for seed, pair in enumerate(of)]


def table_and_page(cells: list[Cell], planned: list[Cell], folder: Path) -> tuple[pd.DataFrame, str]:
    rows = rows_of(cells)
    table = table_of(rows, counterparts(planned))
    return table.set_index("run"), write_summary(rows, table, folder / "out", "demo")[1].read_text()


def in_words(page: str) -> str:
    return " ".join(unescape(re.sub(r"<script.*?</script>|<[^>]*>", " ", page, flags=re.S)).split())


def test_gains_are_those_of_the_differences_within_each_seed(cells, tmp_path):
    table, page = table_and_page(cells, cells, tmp_path)

    run, base = (pd.DataFrame(FIGURES[name]) for name in ("dpsgd_f", "dpsgd"))
    for name, of in (("gain", run.mean(axis=1) - base.mean(axis=1)), ("worst_gain", run[1] - base[1])):
        half = of.std(ddof=1) / math.sqrt(3) * stats.t.ppf(0.975, 2)
        assert table.loc["dpsgd_f", [name, f"{name}±"]].tolist() == pytest.approx([of.mean(), half])
        assert half < table.loc["dpsgd_f", "accuracy±"]
        assert f"{of.mean():+.3f} ± {half:.3f}" in page
    assert table.loc["dpsgd_f", ["reference", "gain_seeds", "worst_gain_seeds"]].tolist() == ["dpsgd", 3, 3]
    assert table.loc["dpsgd", ["reference", "gain", "gain±"]].isna().all()
    assert "larger accuracy is better" in in_words(page)
    assert "2 comparisons are made here at once. Each interval holds at 95 % by itself" in in_words(page)
    assert "This is no privacy statement" in in_words(page)
    assert "Gain in accuracy over the reference" in page


def test_only_common_seeds_with_both_figures_count_and_one_has_no_interval(cells, tmp_path):
    lost = finished(cell("dpsgd_f", 5), tmp_path, None, None)  # diverged
    beside = finished(cell("dpsgd", 5), tmp_path, 0.9, 0.9)
    table, page = table_and_page([*cells[:3], beside, cells[5], lost], [*cells, beside, lost], tmp_path)

    line = table.loc["dpsgd_f"]
    assert (line["seeds"], line["gain_seeds"], line["worst_gain_seeds"]) == (2, 1, 1)
    assert line["gain"] == pytest.approx((0.74 + 0.33 - 0.70 - 0.30) / 2)
    assert pd.isna(line["gain±"])
    assert "comparisons are made" not in in_words(page)
    assert "no interval is known" in in_words(page)
    assert "do not count, which favours that model: dpsgd_f in 1 of its seeds." in in_words(page)


def test_no_common_seed_is_no_gain(cells, tmp_path):
    table, page = table_and_page([cells[0], cells[4]], cells, tmp_path)

    assert table.loc["dpsgd_f", ["gain", "gain±"]].isna().all()
    assert table.loc["dpsgd_f", ["reference", "gain_seeds"]].tolist() == ["dpsgd", 0]
    assert "Gain in accuracy over the reference" not in page  # nothing to draw


def test_a_smaller_mae_is_a_gain(tmp_path):
    cells = [
        finished(cell(name, seed, "diabetes"), tmp_path, a + seed, b + 2 * seed, "mae")
        for name, a, b in (("dpsgd", 50.0, 60.0), ("auto_s", 40.0, 65.0))
        for seed in (0, 1)
    ]
    table, page = table_and_page(cells, cells, tmp_path)

    assert table.loc["auto_s", ["gain", "worst_gain"]].tolist() == pytest.approx([2.5, -5.0])
    assert set(table["metric"]) == {"mae"}
    assert "smaller MAE is better, and a gain above 0 is for the better" in in_words(page)
    assert ">+2.50" in page
    assert "cut at" not in gains_caption(table, TASKS["regression"])


@pytest.mark.parametrize("width", [80, 100])
def test_gains_stand_in_the_terminal_too(cells, tmp_path, width):
    other = finished(cell("dpsgd", 0, "diabetes"), tmp_path, 40.0, 50.0, "mae")
    table = table_of(rows_of([*cells, other]), counterparts([*cells, other]))
    shown = io.StringIO()
    print_table(table, Console(file=shown, width=width))
    text = shown.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "digits: gain in accuracy, paired by seed" in text
    assert "diabetes: gain" not in text  # one algorithm: nothing to compare
    line = table.set_index("run").loc["dpsgd_f"]
    assert re.search(rf"dpsgd_f +{line['seeds']} +dpsgd +{re.escape(shown_figure(line, 'gain'))} ", text)
    assert shown_figure(line, "gain")[0] in "+-"
    assert "no ε covers a choice by them" in " ".join(text.split())


def test_without_gains_nothing_is_said_of_them(cells):
    alone = [one for one in cells if one.algorithm == "dpsgd"]
    shown = io.StringIO()
    print_table(table_of(rows_of(alone), counterparts(alone)), Console(file=shown, width=100))
    assert "gain" not in shown.getvalue().lower()


def test_each_line_of_a_table_of_two_tasks_says_what_its_figures_are_in(cells, tmp_path):
    other = finished(cell("dpsgd", 0, "diabetes"), tmp_path, 40.0, 50.0, "mae")
    rows = rows_of([*cells, other])
    table = table_of(rows, counterparts([*cells, other]))
    assert dict(zip(table["dataset"], table["metric"], strict=True)) == {"digits": "accuracy", "diabetes": "mae"}
    written = write_summary(rows, table, tmp_path / "out", "demo")
    assert "Gains over a reference" in written[1].read_text()
    assert "Gains over a reference" not in written[2].read_text()  # one algorithm: nothing to compare
    shown = io.StringIO()
    print_table(table, Console(file=shown, width=100))
    assert "diabetes: test MAE" in shown.getvalue()


def test_seeds_that_agree_have_no_interval():
    found = gain(TASKS["classification"], {0: 0.6, 1: 0.7}, {0: 0.5, 1: 0.6})
    assert found is not None
    assert (round(found.mean, 9), found.low, found.seeds) == (0.1, None, 2)
    assert gain(TASKS["classification"], {0: 0.6}, {1: 0.6}) is None


def test_the_reference_is_dpsgd_or_the_first_private_algorithm_or_the_named_one():
    several = [cell("sgd"), cell("naive"), cell("dpsgd"), cell("sgd", dataset="adult"), cell("naive", dataset="adult")]
    assert references(several) == {"digits": "dpsgd", "adult": "naive"}
    assert references(several, "naive") == {"digits": "naive", "adult": "naive"}
    assert references(several, "dpsgd") == {"digits": "dpsgd"}
    assert references([cell("sgd")]) == {}
    with pytest.raises(EquidpError, match=r"Unknown reference 'naiv'\. Did you mean 'naive'"):
        references(several, "naiv")
    for there in ("dpsgd_f", "sgd"):
        with pytest.raises(EquidpError, match=rf"reference={there}: no private run .* take one of naive, dpsgd\."):
            references(several, there)
    with pytest.raises(EquidpError, match="leave it out"):
        references([cell("sgd")], "sgd")


def test_runs_are_compared_at_equal_settings_whatever_the_options_of_their_algorithms():
    def at(epsilon: float, algorithm: str, **more: Mapping) -> Cell:
        return cell(algorithm, privacy={"epsilon": epsilon}, **more)

    plain = [at(1, "dpsgd"), at(3, "dpsgd")]
    own = {"options": {"base_clip_norm": 2}}
    # an option of dpsgd_f shows in `audited`, too
    others = [at(1, "naive"), at(3, "dpsgd_f", dpsgd_f=own, audited={"algorithm": "dpsgd_f", **own}), at(8, "naive")]
    found = counterparts([*plain, *others, cell("sgd")])
    assert found == {
        row_key(others[0]): [row_key(plain[0])],
        row_key(others[1]): [row_key(plain[1])],
        row_key(others[2]): [],  # no dpsgd at ε 8
    }


def test_a_single_run_of_the_reference_is_compared_with_runs_of_other_training_settings():
    """Each algorithm has its own best rate in a fair comparison; where rates are an axis, equal ones are compared."""

    def rated(rate: float, algorithm: str) -> Cell:
        return cell(algorithm, training={"learning_rate": rate})

    base, run = rated(8, "dpsgd"), rated(2, "naive")
    assert counterparts([base, run]) == {row_key(run): [row_key(base)]}
    axis = [base, rated(2, "dpsgd"), run, rated(4, "naive")]
    assert counterparts(axis) == {row_key(run): [row_key(axis[1])], row_key(axis[3]): []}
    elsewhere = cell("naive", data={"keep": {"8": 40}})
    assert counterparts([base, elsewhere]) == {row_key(elsewhere): []}


def test_a_failed_run_is_not_replaced_by_another_and_the_page_says_so(cells, tmp_path):
    """Where the reference's run at equal settings failed, the one that is left is no counterpart."""
    fast = [finished(replace_rate(cell("dpsgd", seed), 9.0), tmp_path, 0.9, 0.9) for seed in (0, 1)]
    table, page = table_and_page([*cells[3:], *fast], [*cells, *fast], tmp_path)

    assert table["reference"].isna().all()
    assert "Not compared, as the reference's run at their settings is not finished: dpsgd_f." in in_words(page)


def replace_rate(one: Cell, rate: float) -> Cell:
    changed = cell(one.algorithm, one.seed, training={"learning_rate": rate})
    return replace(changed, overrides=one.overrides | {"training.learning_rate": rate})


def test_a_reference_of_several_options_is_compared_with_nothing_and_the_page_says_so(cells, tmp_path):
    wide = cell("dpsgd", dpsgd={"options": {"clip_norm": 9.0}})
    wide = finished(replace(wide, overrides={"dpsgd.options.clip_norm": 9.0}), tmp_path, 0.9, 0.9)
    table, page = table_and_page([*cells, wide], [*cells, wide], tmp_path)

    assert table["reference"].isna().all()
    assert "Not compared, as the reference has several runs at their settings" in in_words(page)
    assert 'id="gains"' in page


def test_runs_of_unequal_guarantees_are_told_apart(tmp_path):
    """Equal noise is not equal ε: a preset may give the noise multiplier alone."""
    cells = [finished(cell("dpsgd"), tmp_path, 0.8, 0.6), finished(cell("naive"), tmp_path, 0.9, 0.7, epsilon=1.2)]
    _, page = table_and_page(cells, cells, tmp_path)
    assert "The privacy statements differ of naive and dpsgd in ε: these gains are not at equal privacy." in in_words(
        page
    )


def test_the_forest_plot_has_a_zero_line_a_row_for_each_run_and_cut_intervals(cells, tmp_path):
    table, _ = table_and_page(cells, cells, tmp_path)
    lines = table.reset_index().dropna(subset=["reference"])
    wide = lines.assign(**{"run": "<b>naive</b>", "gain±": 3.0, "worst_gain±": None})
    chart = forest(pd.concat([lines, wide]), TASKS["classification"])

    overall, _, worst, _ = chart.data
    assert (overall.name, worst.name) == ("overall", "worst group")
    assert list(chart.layout.yaxis.ticktext) == ["dpsgd_f", "&lt;b&gt;naive&lt;/b&gt;"]
    assert chart.layout.xaxis.zeroline
    assert chart.layout.xaxis.rangemode == "tozero"
    assert overall.x[1] + overall.error_x.array[1] == pytest.approx(1)  # no difference of accuracies is larger
    assert overall.x[1] - overall.error_x.arrayminus[1] == pytest.approx(-1)
    assert overall.x[0] + overall.error_x.array[0] == pytest.approx(lines["gain"].iloc[0] + lines["gain±"].iloc[0])
    assert list(worst.marker.symbol) == ["square", "square-open"]
    assert worst.error_x.array[1] is None  # a line of no length would be a tick
    assert "over dpsgd, worst group" in worst.hovertext[0]
    assert "no interval, 3 seeds" in worst.hovertext[1]


def test_many_runs_are_tabulated_and_not_drawn(cells, tmp_path):
    table, _ = table_and_page(cells, cells, tmp_path)
    many = pd.concat([table.reset_index().tail(1)] * (MOST_DRAWN + 1))
    assert f"More than {MOST_DRAWN} runs are not drawn." in list(gains_notes(many, TASKS["classification"]))


def test_a_sweep_names_its_reference_above_its_parts():
    parts = {"reference": "naive", "grids": [{"algorithms": ["naive"]}, {"algorithms": ["dpsgd"]}]}
    assert choose_grid({"mine": parts}, "mine", {}).reference == "naive"
    assert choose_grid({"mine": parts}, "mine", {"reference": "dpsgd"}).reference == "dpsgd"
    chosen = choose_grid({"mine": parts}, "mine", {"algorithms": "naive", "reference": "naive"})
    assert (chosen.reference, [name for name, _ in chosen.points()]) == ("naive", ["naive"])
    within = {"grids": [{"algorithms": ["naive"], "reference": "naive"}]}
    with pytest.raises(EquidpError, match="reference='naive' stands in a part: give it above the parts"):
        list(choose_grid({"mine": within}, "mine", {}).points())
