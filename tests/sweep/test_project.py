"""Cells of the real project: one key per combination of settings that matter, and nothing mistyped gets through."""

from __future__ import annotations

import pytest

from equidp.errors import EquidpError
from equidp.sweep.grid import choose_grid, grid_from
from equidp.sweep.project import Project, differing

SHORT = {"dataset": "digits", "training.epochs": 1, "seed": 0}


def test_the_demo_has_24_cells_of_different_names(here: Project):
    cells = here.cells(choose_grid(here.grids(), "demo", {}))

    assert len(cells) == 24
    assert len({cell.key for cell in cells}) == 24
    assert len({cell.folder for cell in cells}) == 24
    # one baseline per seed, one set of records
    assert len({cell.baseline for cell in cells}) == 4
    assert len({cell.records for cell in cells}) == 1


def test_the_folder_is_where_the_catalog_puts_a_run_of_that_label(here: Project):
    cell = here.cell("dpsgd", SHORT)

    folder = here.path / "data" / "08_reporting" / "digits" / "dpsgd" / "seed=0" / cell.key
    assert cell.folder == folder
    assert cell.outputs["report"] == folder / "report.html"
    assert cell.command == (
        f"kedro run --pipeline=dpsgd --params=dataset=digits,training.epochs=1,seed=0,run_label={cell.key}"
    )


def test_the_key_follows_every_setting_that_matters_and_no_other(here: Project):
    key = here.cell("dpsgd", SHORT).key

    same = [
        {**SHORT, "naive.options.base_clip_norm": 3},
        {**SHORT, "resume": True},
        {**SHORT, "dpsgd.options.clip_norm": 0.5},
    ]
    assert {here.cell("dpsgd", overrides).key for overrides in same} == {key}
    others = [
        {**SHORT, "dpsgd.options.clip_norm": 0.7},
        {**SHORT, "seed": 1},
        {**SHORT, "privacy.epsilon": 1},
        {**SHORT, "data.keep.3": 50},
    ]
    keys = {here.cell("dpsgd", overrides).key for overrides in others} | {here.cell("naive", SHORT).key}
    assert len(keys - {key}) == 5


def test_cells_that_differ_in_another_algorithms_option_are_one(here: Project):
    grid = grid_from(
        {"algorithms": "dpsgd,naive", "datasets": "digits", "params": {"dpsgd.options.clip_norm": [0.5, 1, 2]}}
    )

    cells = here.cells(grid)

    assert [cell.algorithm for cell in cells].count("dpsgd") == 3
    assert [cell.algorithm for cell in cells].count("naive") == 1


def test_a_non_private_run_is_the_same_for_every_epsilon(here: Project):
    cells = here.cells(grid_from({"algorithms": "sgd,dpsgd", "datasets": "digits", "epsilons": "1,3"}))

    assert sorted(cell.algorithm for cell in cells) == ["dpsgd", "dpsgd", "sgd"]


@pytest.mark.parametrize(
    ("algorithm", "overrides", "words"),
    [
        ("dpsgdf", {}, "Unknown algorithm 'dpsgdf'. Did you mean 'dpsgd_f'"),
        ("dpsgd", {"dataset": "digit"}, "Unknown dataset 'digit'. Did you mean 'digits'"),
        ("dpsgd", {"training.epoch": 3}, "Did you mean 'training.epochs'"),
        ("dpsgd", {"dpsgd.options.clip": 3}, "clip_norm"),
        ("dpsgd", {"privacy.epsilon": -1}, "privacy.epsilon"),
    ],
)
def test_wrong_names_are_refused_before_anything_runs(here: Project, algorithm, overrides, words):
    with pytest.raises(EquidpError) as error:
        here.cell(algorithm, {**SHORT, **overrides})

    assert words in error.value.message


def test_only_what_differs_is_told(here: Project):
    cells = [here.cell("dpsgd", {**SHORT, "privacy.epsilon": e, "seed": s}) for e in (1, 3) for s in (0, 1)]

    assert [differing(cells)[cell.key] for cell in cells] == [{"privacy.epsilon": e} for e in (1, 1, 3, 3)]
