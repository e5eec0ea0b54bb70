"""benchmarks/worst_group.py: its choice, its corrections and its page, without training but for one row on digits."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import worst_group as table

PLAN = """
head: "How: {rule}"
foot: The end.
rule: by the worst group
bounds: [1.0]
more: 1
epsilons: [3]
seeds: [1, 2, 3]
training: {device: cpu}
data: {membership: strata}
datasets:
  digits:
    data: {source: digits, groups: [class]}
    model: {name: logistic}
    delta: 1.0e-4
    training: {epochs: 1, batch_size: 256}
    steps: [1, 2]
    tuning_seeds: [7]
algorithms:
  dpsgd: {bound: {clip_norm: 1}}
  naive: {bound: {base_clip_norm: 1}}
  dpsgd_minimax: {bound: {clip_norm: 1}, ours: true}
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small plan, and a folder for what is made of it."""
    (tmp_path / "plan.yml").write_text(PLAN, encoding="utf-8")
    for name, value in {"PLAN": "plan.yml", "RECORDS": "records", "PAGE": "worst.md", "CACHE": "cache"}.items():
        monkeypatch.setattr(table, name, tmp_path / value)
    monkeypatch.setattr(table, "figure", lambda tables, path: None)
    return tmp_path


def made_up(worst: dict[str, float]) -> list[table.Cell]:
    """Records of every cell of the plan: the best step is 2, and an algorithm's worst group is near what is given."""
    cells, lines = [], []
    for name, value in worst.items():
        trials = [table.Cell("digits", name, 3.0, step, 1.0, "validation", 7) for step in (1, 2, 4)]
        for cell in [*trials, *table.finals("digits", name, 3.0, (2, 1.0))]:
            figure = value + 0.01 * cell.seed**2 * (name != "dpsgd") - (cell.step != 2) * 0.3
            figures = {"worst": figure, "gap": 1 - figure, "balanced": 0.8, "overall": 0.9, "groups": {}}
            lines.append(json.dumps({"key": cell.key, "epsilon": 3.0, **figures}))
            cells.append(cell)
    table.RECORDS.mkdir()
    (table.RECORDS / "digits_3.jsonl").write_text("\n".join([*lines, '{"key": "cut sho']), encoding="utf-8")
    return cells


def test_holm_multiplies_the_smallest_most_and_never_reverses_an_order() -> None:
    assert table.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == {
        "a": pytest.approx(0.03),
        "c": pytest.approx(0.06),
        "b": pytest.approx(0.06),
    }
    assert table.holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}


def test_p_is_that_of_a_paired_test_and_equal_seeds_prove_nothing() -> None:
    first, second = {1: 0.5, 2: 0.6, 3: 0.8}, {1: 0.4, 2: 0.4, 3: 0.5}
    assert table.p_value(first, second) == pytest.approx(0.0742, abs=1e-4)  # mean 0.2, sd 0.1: t = 3.464 with 2 degrees
    assert table.p_value(first, first) == 1.0


def test_the_edge_rule_goes_on_in_the_best_trials_direction_and_only_there() -> None:
    scores = {(1, 0.5): (0.1, 0.5), (4, 0.5): (0.2, 0.5), (16, 0.5): (0.2, 0.6), (4, 1.0): (0.1, 0.9)}
    assert table.beyond(scores, [1, 4, 16]) == (64, 0.5)
    assert table.beyond({**scores, (64, 0.5): (0.0, 0.0)}, [1, 4, 16]) is None
    assert table.beyond({**scores, (1, 0.5): (0.3, 0.0)}, [1, 4, 16]) == (0.25, 0.5)


def test_weighted_classes_have_the_weight_of_the_rarest_in_all() -> None:
    train = SimpleNamespace(labels=torch.tensor([0, 1, 0, 0, 2, 0, 1]), schema=SimpleNamespace(classes=("a", "b", "c")))
    assert table.class_weights(train) == [0.25, 0.5, 1.0]


def test_a_choice_looks_at_validation_parts_and_is_none_while_a_trial_is_missing(plan: Path) -> None:
    cells = made_up({"dpsgd": 0.4})
    assert table.chosen("digits", "dpsgd", 3.0, table.read_results()) == ((2, 1.0), 3)
    assert {cell.part for cell in cells if cell.seed == 7} == {"validation"}
    assert table.chosen("digits", "naive", 3.0, table.read_results()) is None


def test_the_page_has_every_row_its_differences_and_what_is_missing(plan: Path) -> None:
    made_up({"dpsgd": 0.4, "naive": 0.5})
    table.page(argparse.Namespace())
    assert "How: by the worst group" in table.PAGE.read_text(encoding="utf-8")
    text = (plan / "worst_tables.md").read_text(encoding="utf-8")
    assert "Not here, as not run or as its counts alone cost more than ε: `dpsgd_minimax`." in text
    naive = next(line for line in text.splitlines() if line.startswith("| `naive`"))
    assert "| 2, 1 (3) | 0.547 ± 0.100 | 0.453 | 0.800 | 0.900 | +0.147 ± 0.100 | 0.024 | – | – |" in naive


def test_the_summary_compares_ours_with_every_published_one_over_the_data_sets(plan: Path) -> None:
    made_up({"dpsgd": 0.4, "naive": 0.5, "dpsgd_minimax": 0.7})
    table.page(argparse.Namespace())
    assert "Not run yet" not in (plan / "worst_tables.md").read_text(encoding="utf-8")
    text = table.PAGE.read_text(encoding="utf-8")
    short = text[text.index("## In short") :]
    assert "| **`dpsgd_minimax`** | 0.747 | 0.747 | – | – |" in short
    assert "| `naive` | 0.547 | 0.547 | +0.200 | <0.001 |" in short
    assert "| `dpsgd` | 0.400 | 0.400 | +0.347 ± 0.100 | 0.004 |" in short


def test_a_row_is_trained_again_to_the_last_digit_and_a_changed_digit_is_told(
    plan: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "noise_of", lambda *asked: 8.0)  # solving for it takes longer than all else here
    made_up({"dpsgd": 0.4})
    cell = next(table.finals("digits", "dpsgd", 3.0, (2, 1.0)))
    row = table.trained(cell)
    with (table.RECORDS / "digits_3.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps(row) + "\n")
    asked = argparse.Namespace(row="digits/dpsgd/1", epsilon=3.0)
    with pytest.raises(SystemExit, match=r"^False$"):
        table.again(asked)
    assert "the same to the last digit" in capsys.readouterr().out
    assert 0 < row["spent"] < 3.0
    with (table.RECORDS / "digits_3.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**row, "overall": row["overall"] + 1e-9}) + "\n")
    with pytest.raises(SystemExit, match=r"^True$"):
        table.again(asked)
    assert capsys.readouterr().out.startswith("overall: ")
