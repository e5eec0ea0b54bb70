"""docs/results.md is written from records of runs; here from made-up ones, so that each figure can be worked out."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from reproduce import again, gallery, page

from equidp.evaluation.metrics import METRICS
from equidp.sweep.grid import choose_grid

ROOT = Path(__file__).resolve().parents[1]
SWEEPS = yaml.safe_load((ROOT / "conf" / "base" / "sweeps.yml").read_text(encoding="utf-8"))


def row(algorithm: str, overrides: dict[str, Any], *metrics: dict[str, float]) -> Any:
    cells = [
        SimpleNamespace(algorithm=algorithm, dataset="adult", overrides={**overrides, "seed": i}, seed=i)
        for i in range(max(1, len(metrics)))
    ]
    return page.Row(cells, {i: record(f"cell-{i}", algorithm, i, m) for i, m in enumerate(metrics)})


def record(key: str, algorithm: str, seed: int, metrics: dict[str, float]) -> Any:
    return page.Record(cell=key, algorithm=algorithm, dataset="adult", seed=seed, metrics=metrics)


def table(**settings: Any) -> Any:
    return page.Table(sweep="s", title="T", dataset="adult", columns={"overall": "accuracy"}, **settings)


def test_every_table_shows_a_sweep_and_one_of_its_datasets() -> None:
    shown = page.Page.model_validate(yaml.safe_load(page.TABLES.read_text(encoding="utf-8")))
    for one in shown.tables:
        points = list(choose_grid(SWEEPS, one.sweep, {}).points())
        mine = [
            o for _, o in points if o["dataset"] == one.dataset and all(o.get(k) == v for k, v in one.where.items())
        ]
        assert set(one.also) <= {overrides["dataset"] for _, overrides in points}
        assert mine, one.title
        assert one.against in {"", *(algorithm for algorithm, _ in points)}
        algorithms = {algorithm for algorithm, _ in points}
        assert {name.split(",")[0] for name in one.printed} <= {page.BASELINE, *algorithms}
        assert set(one.algorithms) <= algorithms
        assert all(len(figures) <= len(one.columns) for figures in one.printed.values())
        assert one.setting or shown.settings[one.sweep]


def test_the_pages_words_are_those_of_its_file() -> None:
    """Words that someone wrote into the page alone would go when it is next written."""
    shown = page.Page.model_validate(yaml.safe_load(page.TABLES.read_text(encoding="utf-8")))
    written = page.PAGE.read_text(encoding="utf-8")
    words = [shown.head, shown.foot, *(part for one in shown.tables for part in (one.text, one.differ))]
    assert [part for part in words if part.strip() not in written] == []


def test_a_figure_is_the_mean_its_interval_and_the_papers() -> None:
    # three seeds: mean 0.82, sd 0.01, half of the interval 4.303·0.01/√3 = 0.025
    assert page.figure([0.81, 0.82, 0.83], 0.8, "test") == "0.820 ± 0.025 (0.800)"
    assert page.figure([0.05], -0.06, "cost_of_privacy") == "+0.050 (−0.060)"
    assert page.figure([], 0.5, "test") == "–"


def test_a_table_has_the_baseline_first_and_the_highest_epsilon() -> None:
    metrics = [
        {"baseline/accuracy": 0.9, "test/accuracy": 0.7, "epsilon": 2.0, "epsilon_published": 3.0},
        {"baseline/accuracy": 0.9, "test/accuracy": 0.7, "epsilon": 2.5, "epsilon_published": 3.0},
    ]
    text = page.section(table(printed={"dpsgd": [0.6]}), [row("dpsgd", {"dataset": "adult"}, *metrics)], {})
    lines = text.splitlines()
    assert "| `sgd` | 2 | – | – | 0.900 |" in lines
    assert "| `dpsgd` | 2 | 2.50 | 3.00 | 0.700 (0.600) |" in lines
    assert "kedro run --pipeline=dpsgd --params=dataset=adult,seed=…   # 0, 1" in lines


def test_a_printed_figure_may_be_of_one_row_alone() -> None:
    rows = [row("dpsgd", {"dpsgd.options.clip_norm": c}, {"test/accuracy": 0.7, "epsilon": 1.0}) for c in (1, 2)]
    lines = page.section(table(printed={"dpsgd": [0.6], "dpsgd, clip_norm 2": [0.8]}), rows, {}).splitlines()
    assert [line.split(" | ")[-1] for line in lines if "clip_norm" in line][:2] == [
        "0.700 (0.600) |",
        "0.700 (0.800) |",
    ]


def test_differences_are_taken_seed_by_seed() -> None:
    def runs(algorithm: str, *accuracies: float) -> Any:
        given = [{"baseline/accuracy": 0.9, "test/accuracy": one, "epsilon": 1.0} for one in accuracies]
        return row(algorithm, {"dataset": "adult"}, *given)

    # differences 0.01, 0.02, 0.03: mean 0.02, sd 0.01, half of the interval 4.303·0.01/√3 = 0.025
    rows = [runs("dpsgd", 0.60, 0.70, 0.80), runs("auto_s", 0.61, 0.72, 0.83)]
    lines = page.section(table(against="dpsgd"), rows, {}).splitlines()
    assert lines[4].endswith("| overall | overall, against `dpsgd` |")
    assert lines[6].endswith("| 0.900 | – |")
    assert lines[7].endswith("| 0.700 ± 0.248 | – |")
    assert lines[8].endswith("| 0.720 ± 0.273 | +0.020 ± 0.025 |")
    # nothing to compare with
    assert page.section(table(against="dpsgd"), rows[1:], {}).splitlines()[7].endswith("| – |")


def test_a_rerun_is_compared_to_the_last_digit() -> None:
    first = {"test/accuracy": 0.5, "training_seconds": 3.0, "gap/sex": math.nan}
    assert again.compared(first, {**first, "training_seconds": 9.0}) == []
    assert again.compared(first, {**first, "test/accuracy": 0.5 + 1e-15}) == [
        "test/accuracy: 0.5 and 0.500000000000001"
    ]
    assert again.compared({**first, "test/accuracy@10": 0.4}, first) == []  # a record's; a run has its last figures
    assert len(again.compared(first, {"gap/sex": math.nan})) == 1
    assert len(again.compared({"test/accuracy": 0.5}, {**first, "epsilon": 1.0})) == 1


def test_rows_of_one_algorithm_are_told_apart_by_what_differs() -> None:
    rows = [row("dpsgd", {"dataset": "adult", "dpsgd.options.clip_norm": c}, {}) for c in (1.0, 2.0)]
    assert page.labels([*rows, row("auto_s", {"dataset": "adult"}, {})]) == [
        "`dpsgd`, clip_norm 1",
        "`dpsgd`, clip_norm 2",
        "`auto_s`",
    ]


def test_a_row_of_another_dataset_may_stand_in_the_table_and_seeds_of_a_gpu_are_named() -> None:
    cells = [
        SimpleNamespace(
            algorithm="dpsgd",
            dataset=name,
            overrides={"seed": i},
            seed=i,
            key=f"{name}-{i}",
            settings={"dataset": name},
        )
        for name in ("adult", "adult_relu", "dutch")
        for i in (0, 1)
    ]
    known = {cell.key: record(cell.key, "dpsgd", cell.seed, {"test/accuracy": 0.8}) for cell in cells}
    known["adult_relu-1"] = known["adult_relu-1"].model_copy(update={"device": "cuda"})
    both = page.rows_of(table(also=["adult_relu"]), cells[:4], known)
    assert [cell.dataset for row in both for cell in row.cells] == ["adult"] * 2 + ["adult_relu"] * 2
    assert not page.rows_of(table(), cells[4:], known)
    with pytest.raises(ValueError, match="two datasets are no pairs"):
        table(also=["adult_relu"], against="dpsgd")
    (_, command) = page.entry("`dpsgd`", both[-1], table(), "test", None, {})
    assert command.endswith("seed=…   # 0, 1 on a GPU")


def test_a_table_without_runs_says_so() -> None:
    assert "Not run yet." in page.section(table(), [], {})
    assert "Not run yet." in page.section(table(), [row("dpsgd", {"dataset": "adult"})], {})


def test_a_row_that_the_page_knows_better_than_the_records_stays() -> None:
    def rows(seeds: int) -> list[Any]:
        given = {"baseline/accuracy": 0.9, "test/accuracy": 0.5 + seeds / 10, "epsilon": 1.0}
        return [row("dpsgd", {"dataset": "adult"}, *[given] * seeds), row("auto_s", {"dataset": "adult"})]

    two = f"# Page\n\n{page.section(table(), rows(2), {})}\n\n## To the letter\n\nNo table.\n"
    standing = page.published(two)
    assert set(standing["T"]) == {"`sgd`", "`dpsgd`"}
    assert page.section(table(), rows(0), standing["T"]) == page.section(table(), rows(2), {})
    assert page.section(table(), rows(1), standing["T"]) == page.section(table(), rows(2), {})
    assert "| `dpsgd` | 3 | 1.00 | – | 0.800 |" in page.section(table(), rows(3), standing["T"]).splitlines()

    otherwise = [row("dpsgd", {"dataset": "adult", "training.optimizer": "momentum"}, {"epsilon": 1.0})]
    assert "| `dpsgd` | 1 |" in page.section(table(), otherwise, standing["T"])  # of one name, of other settings


def test_a_row_whose_command_is_refused_by_now_stands_under_one_that_runs() -> None:
    def shown(**settings: Any) -> str:
        return page.section(table(**settings), None, standing)

    rows = [row(name, {"dataset": "adult"}, {"test/accuracy": 0.8, "epsilon": 1.0}) for name in ("dpsgd", "auto_s")]
    standing = page.published(f"# Page\n\n{page.section(table(), rows, {})}\n")["T"]
    assert shown() == page.section(table(), rows, {})  # rows of a sweep that is not asked for stay
    lines = shown(kept={"`dpsgd`": "kedro run --pipeline=custom   # 0"}, setting="A network.").splitlines()
    assert "**Setting.** A network. Seeds: 1." in lines
    assert [line for line in lines if line.startswith("kedro run")][-1] == "kedro run --pipeline=custom   # 0"
    assert not [line for line in lines if line.startswith("kedro run --pipeline=dpsgd ")]
    assert sum(line.startswith("| `dpsgd` ") for line in lines) == 1


def test_records_hold_what_the_tables_show_and_every_table_stands_on_the_page() -> None:
    shown = page.Page.model_validate(yaml.safe_load(page.TABLES.read_text(encoding="utf-8")))
    known, names = page.read_records(), page.shown_metrics(shown.tables)
    assert known
    assert all(key == record.cell and set(record.metrics) <= names for key, record in known.items())
    assert set(page.published(page.PAGE.read_text(encoding="utf-8"))) >= {table.title for table in shown.tables}


def test_records_are_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "RECORDS", tmp_path / "records.jsonl")
    assert page.read_records() == {}
    written = {key: record(key, "dpsgd", 1, {"epsilon": 0.1 + 0.2}) for key in ("cell-b", "cell-a")}
    page.write_records(written)
    assert page.read_records() == written
    assert [line[10:16] for line in page.RECORDS.read_text().splitlines()] == ["cell-a", "cell-b"]


def test_what_is_committed_stays_unless_it_was_rounded() -> None:
    def records(value: float, *keys: str, rounded: bool = False) -> dict[str, Any]:
        made = {key: record(key, "dpsgd", 0, {"epsilon": value}) for key in keys}
        return {key: one.model_copy(update={"rounded": rounded}) for key, one in made.items()}

    committed = records(1.0, "cell-a") | records(2.0, "cell-b", rounded=True) | records(3.0, "cell-c", rounded=True)
    found = page.together(committed, records(9.0, "cell-a", "cell-b", "cell-d"))
    values = {key: one.metrics["epsilon"] for key, one in found.items()}
    assert values == {"cell-a": 1.0, "cell-b": 9.0, "cell-c": 3.0, "cell-d": 9.0}


def test_figures_of_two_devices_are_not_mixed_in_one_record() -> None:
    old = record("cell-0", "dpsgd", 0, {"test/accuracy": 0.8})
    new = record("cell-0", "dpsgd", 0, {"test/accuracy": 0.7, "test/gap": 0.1}).model_copy(update={"device": "cuda"})
    assert page.together({"cell-0": old}, {"cell-0": new}) == {"cell-0": old}


def test_what_a_new_table_shows_is_added_to_a_committed_record() -> None:
    committed = {"cell-a": record("cell-a", "dpsgd", 0, {"epsilon": 1.0})}
    again_run = {"cell-a": record("cell-a", "dpsgd", 0, {"epsilon": 9.0, "test/loss": 0.5})}
    assert page.together(committed, again_run)["cell-a"].metrics == {"epsilon": 1.0, "test/loss": 0.5}


def test_rows_after_some_epochs_are_what_mlflow_had_then() -> None:
    shown = table(epochs=[10, 20])
    assert {"test/accuracy@10", "epsilon_rdp@20"} <= page.shown_metrics([shown])
    metrics = {"baseline/accuracy": 0.9, "test/accuracy": 0.8, "epsilon": 3.0}
    metrics |= {"test/accuracy@10": 0.6, "epsilon_rdp@10": 2.0, "test/accuracy@20": 0.7, "epsilon_rdp@20": 2.5}
    runs = row("dpsgd", {"dataset": "adult"}, metrics, {"baseline/accuracy": 0.9, "test/accuracy": 0.8, "epsilon": 3.0})
    lines = page.section(shown, [runs], {}).splitlines()
    assert "| `sgd` | 2 | – | – | 0.900 |" in lines
    assert "| `dpsgd`, 10 epochs | 1 | 2.00 | – | 0.600 |" in lines  # the second seed was not looked at then
    assert "| `dpsgd`, 20 epochs | 1 | 2.50 | – | 0.700 |" in lines
    assert "kedro run --pipeline=dpsgd --params=dataset=adult,seed=…   # 0, as after epoch 20" in lines


def test_a_record_holds_what_is_shown_and_nothing_that_is_no_number() -> None:
    cell = SimpleNamespace(key="cell-a", algorithm="dpsgd", dataset="adult", seed=3)
    metrics = {"test/accuracy": 0.5, "gap/sex": math.nan, "training_seconds": 9.0}
    run = SimpleNamespace(data=SimpleNamespace(tags={"git_commit": "abc"}))
    curve = {10: 0.1, 20: 0.2, 30: 0.3}
    wanted = {"test/accuracy", "gap/sex", "epsilon", "test/accuracy@20"}
    made = page.record_of(cell, run, wanted, metrics, {"test/accuracy": curve}.__getitem__)
    assert made.metrics == {"test/accuracy": 0.5, "test/accuracy@20": 0.2}
    assert (made.cell, made.algorithm, made.dataset, made.seed, made.commit) == ("cell-a", "dpsgd", "adult", 3, "abc")


def test_the_gallery_shows_a_drawn_figure_or_says_how_to_draw_it() -> None:
    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    shown = re.findall(r"\(images/gallery_(\w+)\.png\)", text)
    left_out = text[text.index("## Not drawn") :]
    assert {name for name in gallery.FIGURES if name not in shown} == set(
        re.findall("|".join(gallery.FIGURES), left_out)
    )
    assert {path.name for path in gallery.IMAGES.glob("gallery_*")} == {f"gallery_{name}.png" for name in shown}


def test_a_figure_reads_means_and_intervals_off_the_page() -> None:
    rows = gallery.table(gallery.LARGER)
    assert {"sgd", "dpsgd", "naive", "dpsgd_f", "dpsgd_f_smooth"} <= set(rows)
    (line,) = (
        line
        for line in page.PAGE.read_text().splitlines()
        if line.startswith("| `naive` | 3 | 5.50") and "+0.114" in line
    )
    assert "+0.114 ± 0.054 (+0.151)" in line
    assert rows["naive"]["class 8"] == (0.114, 0.054)


def test_a_file_in_which_a_cost_has_the_other_sign_is_not_misread(tmp_path: Path) -> None:
    mine, before = ({"count": 9, **dict.fromkeys(METRICS, 0.5), "accuracy": accuracy} for accuracy in (0.7, 0.9))
    old = {"overall": mine, "groups": {}, "baseline": {"overall": before, "groups": {}}}
    old["cost_of_privacy"] = {"overall": {"accuracy": -0.2}, "groups": {}, "gap": {}}
    (tmp_path / "metrics.json").write_text(json.dumps(old), encoding="utf-8")
    cell = SimpleNamespace(outputs={"metrics": tmp_path / "metrics.json"})
    run = SimpleNamespace(data=SimpleNamespace(metrics={"cost_of_privacy/accuracy": -0.2, "epsilon": 3.0}))
    found = page.figures_of(cell, run)
    assert (found["cost_of_privacy/accuracy"], found["epsilon"]) == (pytest.approx(0.2), 3.0)


def test_every_committed_cost_is_what_was_lost() -> None:
    for one in page.read_records().values():
        for name, cost in one.metrics.items():
            figure = name.removeprefix("cost_of_privacy/")
            if figure != name and {f"baseline/{figure}", f"test/{figure}"} <= one.metrics.keys():
                assert cost == pytest.approx(one.metrics[f"baseline/{figure}"] - one.metrics[f"test/{figure}"]), one
