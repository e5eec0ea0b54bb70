"""The table over seeds and the pages, from results written by hand."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from equidp.errors import EquidpError
from equidp.sweep.doubts import doubts
from equidp.sweep.printed import print_table
from equidp.sweep.project import Cell, by_seed
from equidp.sweep.summary import averaged, means, means_of, row_labels, rows_of, table_of, trained_badly, write_summary
from equidp.tasks.base import OUTDONE

BASELINE = {"a": 0.9, "b": 0.8}


STATEMENT = {
    "algorithm": "dpsgd",
    "private": True,
    "delta": 1e-5,
    "records": 1000,
    "steps": 10,
    "adjacency": "add or remove one record",
    "sampling": "Poisson",
    "unit": "record",
    "ledger": [{"event": "poisson_gaussian", "sampling_rate": 0.1, "noise_multiplier": 1.0, "count": 10}],
}
"""What the page reads of privacy.json."""


def document(a: float, b: float) -> dict:
    """metrics.json of a run with these two groups' accuracies, and a baseline at 0.9 and 0.8."""

    def figures(x: float, y: float) -> dict:
        return {
            "overall": {"count": 100, "accuracy": (x + y) / 2, "loss": 0.5},
            "groups": {"class": {"a": {"count": 50, "accuracy": x}, "b": {"count": 50, "accuracy": y}}},
        }

    cost = {"a": BASELINE["a"] - a, "b": BASELINE["b"] - b}
    return {
        **figures(a, b),
        "baseline": figures(BASELINE["a"], BASELINE["b"]),
        "cost_of_privacy": {
            "overall": {"accuracy": sum(cost.values()) / 2},
            "groups": {"class": {name: {"accuracy": value} for name, value in cost.items()}},
            "gap": {"class": {"accuracy": max(cost.values()) - min(cost.values())}},
        },
    }


def finished_cell(folder: Path, seed: int, epsilon: float, a: float, b: float) -> Cell:
    """A cell with its files."""
    place = folder / f"{seed}-{epsilon!r}"
    place.mkdir()
    outputs = {"metrics": place / "metrics.json", "privacy": place / "privacy.json"}
    outputs["metrics"].write_text(json.dumps(document(a, b)))
    outputs["privacy"].write_text(json.dumps({**STATEMENT, "epsilon": epsilon, "seed": seed}))
    settings = {"dataset": "digits", "seed": seed, "privacy": {"epsilon": epsilon}}
    overrides = {"dataset": "digits", "seed": seed, "privacy.epsilon": epsilon}
    return Cell("dpsgd", overrides, settings, place.name, "b", "r", outputs, place, place)


@pytest.fixture
def cells(tmp_path: Path) -> list[Cell]:
    """Two seeds at ε 1, one at ε 3."""
    return [
        finished_cell(tmp_path, 0, 1.0, 0.8, 0.4),
        finished_cell(tmp_path, 1, 1.0, 0.8, 0.6),
        finished_cell(tmp_path, 0, 3.0, 0.9, 0.7),
    ]


def test_one_row_per_setting_with_intervals_over_its_seeds(cells):
    table = table_of(rows_of(cells)).set_index("run")

    assert list(table.index) == ["dpsgd ε=1", "dpsgd ε=3"]
    low = table.loc["dpsgd ε=1"]
    assert low["seeds"] == 2
    assert low["accuracy"] == pytest.approx(0.65)  # (0.6 + 0.7)/2
    # Student's t with one degree of freedom: 12.706 · s/√2, s = 0.1/√2
    assert low["accuracy±"] == pytest.approx(12.7062 * 0.05, rel=1e-4)
    assert low["cost"] == pytest.approx(0.20)  # (0.25 + 0.15)/2
    assert low["worst"] == pytest.approx(0.5)
    assert low["gap"] == pytest.approx(0.2)  # (0.3 + 0.1)/2
    assert table.loc["dpsgd ε=3", "accuracy±"] is None or table["accuracy±"].isna()["dpsgd ε=3"]


def test_of_what_an_audit_would_be_of_a_row_tells_nothing(cells):
    of_an_audit = {"algorithm": "dpsgd_f", "options": {"base_clip_norm": 0.5}}
    given = [replace(cell, settings={**cell.settings, "audited": of_an_audit}) for cell in cells]
    assert [row.settings for row in rows_of(given)] == [row.settings for row in rows_of(cells)]


def test_a_baseline_that_diverged_counts_neither_in_its_mean_nor_in_a_cost(cells, tmp_path):
    lost = json.loads(cells[0].outputs["metrics"].read_text())
    lost["baseline"]["overall"] |= {"accuracy": 0.0, "loss": None}
    lost["cost_of_privacy"] = {
        "overall": {"accuracy": None},
        "groups": {"class": {"a": {"accuracy": None}, "b": {"accuracy": None}}},
        "gap": {"class": {"accuracy": None}},
    }
    cells[0].outputs["metrics"].write_text(json.dumps(lost))
    rows = rows_of(cells[:2])

    table, shown = table_of(rows), io.StringIO()
    print_table(table, Console(file=shown, width=100))
    page = write_summary(rows, table, tmp_path, "demo")[1].read_text()

    line = table.iloc[0]
    assert (line["seeds"], line["accuracy_seeds"], line["cost_seeds"], line["gap_seeds"]) == (2, 2, 1, 1)
    assert "+0.150 (1)" in shown.getvalue()  # seed 1's
    assert "0.650±0.635 " in shown.getvalue()
    assert "In 1 of the seeds of dpsgd the non-private baseline diverged" in page
    baseline = next(line for line in re.findall(r"<tr>(.*?)</tr>", page, flags=re.S) if ">sgd<" in line)
    assert re.findall(r">([^<>]*)</t[dh]>", baseline)[:4] == ["sgd", "1", "–", "0.850"]  # no ε as published anywhere


def test_a_page_says_in_how_many_seeds_a_model_diverged_or_its_baseline_guessed(tmp_path):
    """A mean hides both: one over the seeds that went well was shown as one over all of them."""
    cells = [finished_cell(tmp_path, seed, 1.0, 0.8, 0.6) for seed in range(3)]
    lost, guessed = (json.loads(cell.outputs["metrics"].read_text()) for cell in cells[:2])
    lost["overall"] |= {"accuracy": 0.0, "loss": None}
    guessed["baseline"]["overall"]["mcc"] = -0.9
    guessed["cost_of_privacy"]["overall"] = {"accuracy": None}
    for cell, one in zip(cells, (lost, guessed), strict=False):
        cell.outputs["metrics"].write_text(json.dumps(one))
    rows = rows_of(cells)

    page = write_summary(rows, table_of(rows), tmp_path, "demo")[1].read_text()

    assert "In 1 of the 3 seeds of dpsgd the model diverged: there every prediction counts as wrong." in page
    assert "In 1 of the 3 seeds of dpsgd the non-private baseline has learnt nothing: cost of privacy" in page
    assert "no cost is stated" not in page  # that of two seeds is


def test_a_baseline_that_is_outdone_in_the_mean_is_told_beside_the_table(cells, tmp_path):
    """The page said so, and the table in the terminal showed a negative cost without a word."""
    assert trained_badly(rows_of(cells)) == {}
    better = [finished_cell(tmp_path, seed, 8.0, 0.95 + seed / 1000, 0.9) for seed in range(3)]
    said = trained_badly(rows_of([*cells, *better], [*cells, *better]))
    assert said == {"digits": [f"dpsgd ε=8 {OUTDONE}."]}


def test_a_page_of_an_unfinished_sweep_says_what_it_lacks(cells, tmp_path):
    """Seeds that fail may be those that go badly, and a setting of which all fail left no trace on the page."""
    complete = cells[:1]
    rows = rows_of(complete, cells)
    table = table_of(rows, {}, doubts(cells, complete))
    page = write_summary(rows, table, tmp_path / "out", "demo")[1].read_text()
    assert "these rows failed or were not run: dpsgd ε=1 (1 of 2 seeds), dpsgd ε=3 (0 of 1 seeds)." in page
    assert list(table["run"]) == ["dpsgd ε=1"]  # as in MLflow, and told from the row that failed
    rows = rows_of(cells, cells)
    table = table_of(rows, {}, doubts(cells, cells))
    assert "is not finished" not in write_summary(rows, table, tmp_path / "out", "demo")[1].read_text()


def test_a_page_of_cells_on_different_raw_files_says_so(cells, tmp_path):
    """After the table had changed, seeds that were added stood in one mean with those of the old one."""
    of = {}
    for cell, digest in zip(cells, ("old", "new", "old"), strict=True):
        (place := cell.folder / "provenance.json").write_text(json.dumps({"raw_fingerprint": digest}))
        of[digest] = [*of.get(digest, []), replace(cell, provenance=place)]
    mixed = [*of["old"], *of["new"]]
    rows = rows_of(mixed)
    page = write_summary(rows, table_of(rows, {}, doubts(mixed, mixed)), tmp_path / "out", "demo")[1].read_text()
    assert "mix runs on different raw files" in page
    assert "those of dpsgd ε=1 (seed 1) are not those of dpsgd ε=1 (seed 0). Delete" in page
    assert doubts(of["old"], of["old"]) == {}
    assert doubts(cells, cells) == {}  # unknown


def test_the_baselines_own_row_leaves_out_the_seeds_in_which_it_diverged():
    good, lost = document(0.8, 0.6), document(0.1, 0.1)
    lost["overall"]["loss"] = None
    runs = {seed: {k: one[k] for k in ("overall", "groups")} for seed, one in enumerate((good, lost))}

    assert averaged("sgd", runs)["overall"]["accuracy"] == pytest.approx(0.7)
    assert averaged("sgd", runs)["diverged"] == 1
    assert averaged("sgd", {1: runs[1]})["overall"]["accuracy"] == pytest.approx(0.1)  # as a single run shows it


def test_a_page_of_means_has_intervals_over_seeds(cells):
    documents = {seed: json.loads(cell.outputs["metrics"].read_text()) for seed, cell in enumerate(cells[:2])}
    page = averaged(cells[0].algorithm, documents)
    for part, mean in ((page, 0.5), (page["cost_of_privacy"], 0.3)):
        low, high = part["intervals"]["groups"]["class"]["b"]
        assert part["groups"]["class"]["b"]["accuracy"] == pytest.approx(mean)
        assert low < mean < high
        assert part["intervals"]["groups"]["class"]["a"] is None  # two seeds that agree
    assert set(page["baseline"]["intervals"]["groups"]["class"].values()) == {None}
    one = averaged(cells[0].algorithm, {0: documents[0]})
    assert one["intervals"]["overall"] is None


def test_a_page_shows_no_accuracy_above_1_and_no_thirds_of_records(cells, tmp_path):
    """Of two seeds an interval was 0.015 to 1.285, and bars were of 51.333333333333336 test records."""
    for cell, count in zip(cells[:2], (50, 53), strict=True):
        one = json.loads(cell.outputs["metrics"].read_text())
        one["groups"]["class"]["a"]["count"] = count
        cell.outputs["metrics"].write_text(json.dumps(one))
    rows = rows_of(cells[:2])
    page = write_summary(rows, table_of(rows), tmp_path, "demo")[1].read_text()
    assert "0.015 to 1.000 at 95 %" in page
    assert "-0.435 to +0.835 at 95 %" in page  # a cost, as far as one can be
    assert '"52 test records"' in page
    assert ".5 test records" not in page


def test_intervals_beside_a_row_of_one_seed_say_of_which_kind_they_are(cells, tmp_path):
    pages = []
    for chosen in (cells[:2], cells):
        rows = rows_of(chosen)
        pages.append(write_summary(rows, table_of(rows), tmp_path, "demo")[1].read_text())
    assert ["of a single seed they are over test records" in page for page in pages] == [False, True]


def test_a_single_seed_keeps_its_intervals_over_test_records():
    """The figures of runs of one seed were said to have lines over test records, and had none."""
    run = document(0.8, 0.6)
    for k, part in enumerate((run, run["baseline"], run["cost_of_privacy"])):
        part["intervals"] = {"overall": [0.1 * k, 0.9], "groups": {"class": {"a": [0.1 * k, 0.9], "b": None}}}
    one = averaged("dpsgd", {0: run})
    for part, own in ((one, run), (one["baseline"], run["baseline"]), (one["cost_of_privacy"], run["cost_of_privacy"])):
        assert part["intervals"] == own["intervals"]
    two = averaged("dpsgd", {0: run, 1: document(0.8, 0.4)})
    half = 12.7062 * 0.1  # over seeds: t with one degree of freedom, s/√2 = 0.1
    assert two["intervals"]["groups"]["class"]["b"] == pytest.approx([0.5 - half, 0.5 + half], rel=1e-4)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_table_is_whole_in_80_columns_and_never_wider_than_100(cells, width):
    console = Console(file=io.StringIO(), width=width)
    table = table_of(rows_of(cells))
    table.loc[0, "run"] = "psasc_momentum"

    print_table(table, console)

    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= min(width, 100)
    # a sweep's cells are seeded: two ε of one seed differ by a known multiple of the same noise
    assert "those of one seed share batches and noise, and do not even compose" in " ".join(text.split())
    assert "over groups of ten evaluated records or more, where there are two" in " ".join(text.split())
    assert "leaves out how much other people would change a figure" in " ".join(text.split())
    for whole in ("psasc_momentum", "digits: test accuracy", "worst group", "0.650±0.635", "+0.200±0.635"):
        assert whole in text


def test_a_table_of_single_seeds_promises_no_intervals(cells):
    shown = io.StringIO()
    print_table(table_of(rows_of(cells[:1])), Console(file=shown, width=100))
    assert "digits: test accuracy, of a single seed" in shown.getvalue()
    assert "other people" not in shown.getvalue()


def test_figures_of_a_validation_part_are_not_called_test(cells):
    for cell in cells:
        path = cell.outputs["metrics"]
        path.write_text(json.dumps(json.loads(path.read_text()) | {"evaluated_on": "validation"}))
    shown = io.StringIO()
    print_table(table_of(rows_of(cells)), Console(file=shown, width=100))
    assert "validation accuracy, mean" in shown.getvalue()
    assert "test accuracy" not in shown.getvalue()
    assert "research mode" in shown.getvalue()
    rows = rows_of(cells)
    table = table_of(rows)
    assert set(table["part"]) == {"validation"}  # who reads the file alone took it for the test part
    lines, runs = table.to_dict("records"), {cell.key: cell.key for cell in cells}
    several, single = (means_of(of, row, line, runs) for of, row, line in zip(by_seed(cells), rows, lines, strict=True))
    assert several.note.startswith("ε = 1.0000, research mode; validation accuracy 0.650±0.635, worst group")
    assert single.note.endswith("(of a single seed)")


def test_a_table_and_a_page_per_dataset_are_written(cells, tmp_path):
    rows = rows_of(cells)

    written = write_summary(rows, table_of(rows), tmp_path / "out", "demo")

    assert [path.name for path in written] == ["table.csv", "digits.html"]
    page = written[1].read_text()
    assert "dpsgd ε=1" in page
    assert "means over 1 or 2 seeds" in page
    assert "mean of each seed's worst" in page
    head, *lines = re.findall(r"<tr>(.*?)</tr>", page, flags=re.S)
    assert re.findall(r">([^<>\s][^<>]*)</", head)[:2] == ["algorithm", "seeds"]
    counts = [re.findall(r">([^<>]*)</t[dh]>", line)[:2] for line in lines[:3]]
    assert counts == [["sgd", "2"], ["dpsgd ε=1", "2"], ["dpsgd ε=3", "1"]]
    warned = re.findall(r"drawn from the fixed seed ([^.]*)\.", page)
    assert set(warned) == {"0 or 1", "0"}  # of all the seeds of a row, not of one


def test_a_page_shows_no_common_baseline_where_there_is_none(cells, tmp_path):
    other = json.loads(cells[2].outputs["metrics"].read_text())
    other["baseline"]["overall"]["accuracy"] = 0.123
    cells[2].outputs["metrics"].write_text(json.dumps(other))
    rows = rows_of(cells)

    page = write_summary(rows, table_of(rows), tmp_path, "demo")[1].read_text()

    assert "sgd" not in page.split("<table", 1)[1].split("</table>", 1)[0].replace("dpsgd", "")


def test_the_overview_tells_the_same_intervals_as_the_table(cells, tmp_path):
    for cell in cells:
        run = json.loads(cell.outputs["metrics"].read_text())
        run["worst"] = {"class": {"group": "b", "accuracy": run["groups"]["class"]["b"]["accuracy"]}}
        cell.outputs["metrics"].write_text(json.dumps(run))
    rows = rows_of(cells)

    table = table_of(rows)
    page = write_summary(rows, table, tmp_path, "demo")[1].read_text()

    low, high = re.findall(r"<tr>(.*?)</tr>", page, flags=re.S)[2:4]
    for name in ("accuracy", "cost", "worst", "gap"):
        mean, half = table.loc[0, [name, f"{name}±"]]
        text = f"{mean:{'+' if name == 'cost' else ''}.3f} ± {half:.3f}"
        (key,) = re.findall(rf'<td class="number" data-key="([^"]*)">{re.escape(text)}<', low)
        assert float(key) == pytest.approx(mean)
    assert "±" not in high  # one seed
    assert "±</button>" not in page


def test_damaged_results_say_what_to_do(cells):
    cells[0].outputs["metrics"].write_text("{")

    with pytest.raises(EquidpError, match="delete its folder and call the sweep again"):
        rows_of(cells)


def test_a_setting_that_is_not_the_rows_own_is_not_told(cells):
    other = replace(cells[2], overrides={**cells[2].overrides, "naive.options.base_clip_norm": 2})

    labels = [row.label for row in rows_of([*cells[:2], other])]

    assert labels == ["dpsgd ε=1", "dpsgd ε=3"]


def test_settings_that_end_alike_have_their_full_names(cells):
    changes = [{"training.learning_rate": 0.5}, {"sgd.options.learning_rate": 0.5}]
    settings = {"training": {}, "sgd": {}, "privacy": {}}
    different = [
        replace(cells[i], key=str(i), overrides=change, settings={"dataset": "digits", "seed": 0, "i": i, **settings})
        for i, change in enumerate(changes)
    ]

    labels = [row.label for row in rows_of(different)]

    assert labels == ["dpsgd training.learning_rate=0.5", "dpsgd sgd.options.learning_rate=0.5"]


def test_values_equal_to_six_digits_keep_a_row_each(cells, tmp_path):
    rows = rows_of([cells[2], finished_cell(tmp_path, 0, 3.0000001, 0.1, 0.2)])

    page = write_summary(rows, table_of(rows), tmp_path, "demo")[1].read_text()

    assert [row.label for row in rows] == ["dpsgd ε=3", "dpsgd ε=3 #2"]
    assert "dpsgd ε=3 #2" in page


def test_means_have_the_shape_of_one_run():
    interval = {"mean": 50.0, "low": 49.0, "high": 51.0, "seeds": 3}

    assert means({"count": interval, "worst": {"group": ["a", "b"], "x": None}}) == {
        "count": 50,
        "worst": {"group": "a, b", "x": None},
    }


def test_a_row_of_another_model_names_the_model_and_not_a_name() -> None:
    rows = {1: ("dpsgd", {"model.name": "mlp"}), 2: ("dpsgd", {"model.name": "logistic", "privacy.epsilon": 3.0})}
    assert row_labels(rows) == {1: "dpsgd model=mlp", 2: "dpsgd model=logistic ε=3"}
