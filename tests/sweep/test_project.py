"""Cells of the real project: one key per combination of settings that matter, and nothing mistyped gets through."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.end_to_end.kedro_project import bootstrapped

from equidp.cli import project_at
from equidp.errors import EquidpError
from equidp.options import dotted
from equidp.sweep.grid import choose_grid, grid_from, nested
from equidp.sweep.project import Project, differing

SHORT = {"dataset": "digits", "training.epochs": 1, "seed": 0}


@pytest.mark.slow
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


def test_an_option_that_came_later_names_a_new_cell_only_where_it_is_given(here: Project):
    cell, led = (here.cell("dpsgd_minimax", {**SHORT, **more}) for more in ({}, {"dpsgd_minimax.options.lead": 1.0}))
    assert "lead" not in cell.settings["dpsgd_minimax"]["options"]
    assert led.settings["dpsgd_minimax"]["options"]["lead"] == 1
    assert cell.key != led.key


def test_the_key_follows_every_setting_that_matters_and_no_other(here: Project):
    key = here.cell("dpsgd", SHORT).key

    same = [
        {**SHORT, "naive.options.base_clip_norm": 3},
        {**SHORT, "dpsgd_f.options.base_clip_norm": 3},  # which an audit would look at
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


def test_an_option_of_the_baseline_matters_once_it_is_given(here: Project):
    """Not given it is not in the digest, so cells that were finished before it existed keep their names."""
    plain, own = here.cell("dpsgd", SHORT), here.cell("dpsgd", {**SHORT, "sgd.options.learning_rate": 0.01})
    assert plain.settings["sgd"] == {"options": {}}
    assert own.settings["sgd"] == {"options": {"learning_rate": 0.01}}
    assert plain.key != own.key
    assert plain.baseline != own.baseline


def test_cuda_graphs_matter_once_they_are_asked_for(here: Project):
    cell = here.cell("dpsgd", SHORT)
    assert "cuda_graphs" not in cell.settings["training"]
    assert here.cell("dpsgd", {**SHORT, "training.cuda_graphs": True}).key != cell.key


def test_cells_by_strata_are_those_of_before_there_was_another_way(here: Project):
    """Records of docs/results.md are found by the names of their cells."""
    strata = here.cell("dpsgd", {**SHORT, "data.membership": "strata"})
    assert not {"membership", "key", "id", "accept_strata"} & strata.settings["data"].keys()
    assert here.cell("dpsgd", {**SHORT, "data.membership": "strata", "data.key": "2024"}).key == strata.key
    by_hash = [here.cell("dpsgd", {**SHORT, **more}).key for more in ({}, {"data.key": "2024"})]
    assert len({strata.key, *by_hash}) == 3


def test_cells_that_differ_in_another_algorithms_option_are_one(here: Project):
    grid = grid_from(
        {"algorithms": "dpsgd,naive", "datasets": "digits", "params": {"dpsgd.options.clip_norm": [0.5, 1, 2]}}
    )

    cells = here.cells(grid)

    (naive,) = [cell for cell in cells if cell.algorithm == "naive"]
    first, *others = [cell for cell in cells if cell.algorithm == "dpsgd"]
    assert len(others) == 2
    assert "dpsgd.options.clip_norm=0.5" in first.command
    assert "dpsgd.options" not in naive.command
    assert differing(cells)[first.key] == {"dpsgd.options.clip_norm": 0.5}
    assert differing([first, naive]) == {first.key: {}, naive.key: {}}


def test_a_non_private_run_is_the_same_for_every_epsilon(here: Project):
    cells = here.cells(grid_from({"algorithms": "sgd,dpsgd", "datasets": "digits", "epsilons": "1,3"}))

    assert sorted(cell.algorithm for cell in cells) == ["dpsgd", "dpsgd", "sgd"]


def test_custom_is_swept_by_its_parts_and_their_settings(here: Project):
    given = dotted(nested("custom.weights.name=psasc,custom.weights.scale=0.8,custom.schedule=steps"))
    axis = {"custom.initial.clip_norm": [0.1, 0.5]}

    cells = here.cells(grid_from({"algorithms": "custom,dpsgd", "datasets": "digits", "params": given | axis}))

    custom = [cell for cell in cells if cell.algorithm == "custom"]
    assert [cell.algorithm for cell in cells].count("dpsgd") == 1
    assert len({cell.key for cell in custom}) == 2
    options = [cell.settings["custom"]["options"] for cell in custom]
    assert [chosen["initial"] for chosen in options] == [{"clip_norm": 0.1}, {"clip_norm": 0.5}]
    for chosen in options:
        assert (chosen["weights"], chosen["schedule"]) == ({"name": "psasc", "scale": 0.8}, {"name": "steps"})
    # what a cell's own command says is the same cell
    again = nested(custom[0].command.partition("--params=")[2])
    assert here.cell("custom", {k: v for k, v in dotted(again).items() if k != "run_label"}).key == custom[0].key


@pytest.mark.parametrize(
    ("algorithm", "overrides", "words"),
    [
        ("dpsgdf", {}, "Unknown algorithm 'dpsgdf'. Did you mean 'dpsgd_f'"),
        ("dpsgd", {"dataset": "digit"}, "Unknown dataset 'digit'. Did you mean 'digits'"),
        ("dpsgd", {"training.epoch": 3}, "Did you mean 'training.epochs'"),
        ("dpsgd", {"dpsgd.options.clip": 3}, "clip_norm"),
        ("naive", {"dpsgd.options.clip": 3}, "clip_norm"),
        ("dpsgd", {"privacy.epsilon": -1}, "privacy.epsilon"),
        ("custom", {"custom.weights": "psac"}, "Did you mean 'psasc'"),
        ("custom", {"custom.weights.name": "psasc", "custom.weights.scal": 1}, "Did you mean 'scale'"),
        ("custom", {"custom.weights": "unit"}, "no bound on what one record adds"),
        ("custom", {"custom.options.weights": "psasc"}, "stand below custom itself, as custom.weights"),
        ("dpsgd", {"model.name": "mlp", "model.options.hidden": [64, "wide"]}, "'hidden.1' is not valid"),
    ],
)
def test_wrong_names_are_refused_before_anything_runs(here: Project, algorithm, overrides, words):
    with pytest.raises(EquidpError) as error:
        here.cell(algorithm, {**SHORT, **overrides})

    assert words in error.value.message


@pytest.mark.slow
def test_names_are_looked_for_with_the_settings_of_their_cells(project: Path) -> None:
    """Several data sets: one that only --params knows, paths that need --params, and files that are broken."""
    bootstrapped(project)
    own, asked = project_at(project), {"datasets": "digits,mine", "algorithms": "dpsgd"}
    file = project / "conf" / "local" / "parameters_own.yml"
    file.parent.mkdir(exist_ok=True)
    made = "presets.mine.data.source=digits,presets.mine.privacy.epsilon=3"
    cells = own.cells(choose_grid({}, None, {**asked, "params": dotted(nested(made))}))
    assert [cell.dataset for cell in cells] == ["digits", "mine"]
    file.write_text("raw_dir: ${runtime_params:raw_dir}\n", encoding="utf-8")
    grid = choose_grid({}, None, {**asked, "datasets": "digits,diabetes_bands", "params": {"raw_dir": "/tmp/x"}})
    assert len(own.cells(grid)) == 2
    for text, words in {"a: [1": "parameters_own.yml", "presets:": "presets: is empty in a file"}.items():
        file.write_text(text, encoding="utf-8")
        with pytest.raises(EquidpError, match=words):
            own.cells(choose_grid({}, None, {**asked, "datasets": "digits,diabetes_bands"}))


def test_only_what_differs_is_told(here: Project):
    cells = [here.cell("dpsgd", {**SHORT, "privacy.epsilon": e, "seed": s}) for e in (1, 3) for s in (0, 1)]

    assert [differing(cells)[cell.key] for cell in cells] == [{"privacy.epsilon": e} for e in (1, 1, 3, 3)]
