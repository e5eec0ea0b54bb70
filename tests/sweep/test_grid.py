"""Grids: products, unions, what the command line changes, what is refused."""

from __future__ import annotations

import pytest
import yaml

from equidp.errors import EquidpError
from equidp.options import dotted
from equidp.sweep.grid import choose_grid, grid_from, nested, params_text

GRIDS = {
    "two": {
        "algorithms": ["dpsgd", "naive"],
        "datasets": ["digits"],
        "epsilons": [1, 3],
        "seeds": 2,
        "params": {"training.epochs": 5},
        "grids": [{}, {"algorithms": ["dpsgd_f"], "seeds": [7], "params": {"dpsgd_f.options.ratio_over": ["batch"]}}],
    }
}


def test_a_grid_is_the_product_of_its_axes():
    grid = grid_from(
        {"algorithms": "dpsgd,naive", "epsilons": "1,3", "seeds": 2, "params": {"a.b": [1, 2], "training.epochs": 5}}
    )

    points = list(grid.points())

    assert len(points) == 2 * 2 * 2 * 2
    assert len({str(point) for point in points}) == 16
    assert all(settings["training.epochs"] == 5 for _, settings in points)
    assert {settings["a.b"] for _, settings in points} == {1, 2}
    assert [settings["seed"] for _, settings in points[:2]] == [0, 1]


@pytest.mark.parametrize(
    ("given", "seeds"), [(3, (0, 1, 2)), ("3", (0, 1, 2)), ("3,7", (3, 7)), ([4], (4,)), (None, ())]
)
def test_seeds_are_a_number_of_seeds_or_a_list(given, seeds):
    assert grid_from({"algorithms": ["dpsgd"]} | ({} if given is None else {"seeds": given})).seeds == seeds


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("seeds", "0", "Sweep setting seeds='0': give how many seeds, from 1 up"),
        ("seeds", " ", "Sweep setting seeds=' ': give at least one value"),
        ("seeds", "20240501", "at most 10,000; the seed 20240501 alone is [20240501]"),
        ("seeds", 10**23, "a number says how many seeds"),
        ("seeds", "²", "Input should be a valid integer"),
        ("seeds", 0, "seeds=0: give how many seeds"),
        ("seeds", -1, "seeds=-1: give how many seeds"),
        ("seeds", True, "seeds=True: give how many seeds"),
        ("seeds", [True], "seeds=[True]: give how many seeds"),
        ("seeds", None, "seeds=None: give at least one value"),
        ("datasets", "", "datasets='': give at least one value"),
        ("epsilons", [], "epsilons=[]: give at least one value"),
        ("params", {"training.epochs": []}, "training.epochs=[]: give at least one value"),
    ],
)
def test_an_axis_without_values_is_refused(key, value, words):
    """A default would take its place without a word."""
    with pytest.raises(EquidpError) as error:
        choose_grid({"x": {"algorithms": "dpsgd", key: value}}, "x", {})

    assert words in error.value.message


def test_parts_inherit_what_stands_above_and_their_union_is_run():
    points = list(choose_grid(GRIDS, "two", {}).points())

    first, second = points[:8], points[8:]
    assert {algorithm for algorithm, _ in first} == {"dpsgd", "naive"}
    assert [(algorithm, settings["seed"]) for algorithm, settings in second] == [("dpsgd_f", 7), ("dpsgd_f", 7)]
    assert all(settings["training.epochs"] == 5 for _, settings in points)
    assert all(settings["dpsgd_f.options.ratio_over"] == "batch" for _, settings in second)


def test_the_command_line_holds_for_every_part():
    grid = choose_grid(GRIDS, "two", {"epsilons": "8", "algorithms": None, "params": {"training.epochs": 1}})

    points = list(grid.points())

    assert {settings["privacy.epsilon"] for _, settings in points} == {8.0}
    assert {settings["training.epochs"] for _, settings in points} == {1}
    assert {algorithm for algorithm, _ in points} == {"dpsgd", "naive", "dpsgd_f"}


PAPERS = {
    "papers": {
        "seeds": 2,
        "grids": [
            {"algorithms": ["dpsgd"], "datasets": ["relu", "relu_2"]},
            {"algorithms": ["auto_s", "sa_dpsgd"], "datasets": ["tanh", "tanh_2"]},
        ],
    }
}


def test_of_a_sweep_of_parts_the_command_line_keeps_algorithms_and_datasets_and_makes_no_others():
    kept = choose_grid(PAPERS, "papers", {"datasets": "tanh_2,relu", "algorithms": "dpsgd,sa_dpsgd", "seeds": "1"})

    assert [(name, settings["dataset"]) for name, settings in kept.points()] == [
        ("dpsgd", "relu"),
        ("sa_dpsgd", "tanh_2"),
    ]
    assert {settings["seed"] for _, settings in kept.points()} == {0}


def test_an_axis_that_no_part_has_is_given_to_all():
    points = choose_grid(GRIDS, "two", {"datasets": "digits"}).points()
    assert {settings["dataset"] for _, settings in points} == {"digits"}
    bare = {"x": {"grids": [{"algorithms": ["dpsgd"]}, {"algorithms": ["naive"]}]}}
    assert [s["dataset"] for _, s in choose_grid(bare, "x", {"datasets": "adult"}).points()] == ["adult", "adult"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"datasets": "tanh,adult"}, "No part of sweep 'papers' has the dataset 'adult'; they have relu, relu_2, tanh"),
        ({"algorithms": "naive"}, "has the algorithm 'naive'; they have dpsgd, auto_s, sa_dpsgd."),
        ({"algorithms": "dpsgd", "datasets": "tanh"}, "No part of sweep 'papers' has all of that"),
        ({"datasets": " , "}, "Sweep setting datasets=' , ': give at least one value"),
    ],
)
def test_what_no_part_of_a_sweep_has_is_refused(given, words):
    with pytest.raises(EquidpError) as error:
        choose_grid(PAPERS, "papers", given)

    assert words in error.value.message


def test_wrong_names_and_values_are_refused():
    with pytest.raises(EquidpError, match=r"Unknown sweep 'tow'\. Did you mean 'two'"):
        choose_grid(GRIDS, "tow", {})
    with pytest.raises(EquidpError, match="Did you mean 'epsilons'"):
        grid_from({"epsilon": [1]})
    with pytest.raises(EquidpError, match="epsilons"):
        grid_from({"algorithms": ["dpsgd"], "epsilons": "1,x"})
    with pytest.raises(EquidpError, match="run_label=mine: a sweep labels each cell itself"):
        grid_from({"params": {"run_label": "mine"}})
    with pytest.raises(EquidpError, match="names no algorithm"):
        list(grid_from({"datasets": ["digits"]}).points())


@pytest.mark.parametrize(
    ("params", "key"),
    [
        ({"seed": 3}, "seeds"),
        ({"seed": [1, 2]}, "seeds"),
        ({"dataset": "adult"}, "datasets"),
        ({"privacy.epsilon": 8}, "epsilons"),
        ({"privacy.epsilon": [None, 8]}, "epsilons"),
        ({"privacy.epsilon": None}, "epsilons"),  # `two` has some
        ({"algorithm": "naive"}, "algorithms"),
    ],
)
def test_a_setting_that_has_a_key_of_its_own_is_refused_among_the_params(params, key):
    """An axis would take its place without a word."""
    with pytest.raises(EquidpError, match=f"give --{key}, or {key} in a file"):
        choose_grid(GRIDS, "two", {"params": params})
    with pytest.raises(EquidpError, match=f"give --{key}"):
        list(grid_from({"algorithms": "dpsgd", "epsilons": 3, "grids": [{"params": params}]}).points())


def test_no_target_epsilon_is_a_param():
    points = list(grid_from({"algorithms": "dpsgd", "params": {"privacy.epsilon": None}}).points())

    assert points == [("dpsgd", {"privacy.epsilon": None, "seed": 0})]


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("x:", "Sweep 'x': give keys such as algorithms and seeds, not None."),
        ("x: [a]", "Sweep 'x': give keys"),
        ("x: {grids: [null]}", "Part 1 of sweep 'x': give keys"),
        ("x: {grids: [{grids: [{}, b]}]}", "Part 2 of part 1 of sweep 'x': give keys"),
        ("x: {grids: {a: 1}}", "Grids of sweep 'x': give a list of parts, not {'a': 1}."),
        ("x: {params: [a]}", "Params of sweep 'x': give settings"),
        ("x: {grids: [{params: }]}", "Params of part 1 of sweep 'x': give settings"),
    ],
)
def test_a_sweep_of_another_shape_is_refused_by_its_name(written, words):
    with pytest.raises(EquidpError) as error:
        choose_grid(yaml.safe_load(written), "x", {})

    assert error.value.message.startswith(words)


def test_params_are_written_as_kedro_reads_them():
    settings = {"privacy.epsilon": None, "privacy.secure": True, "data.groups": ["sex", "race"], "seed": 3, "x.y": 1e-5}

    text = params_text(settings)

    assert text == "privacy.epsilon=null,privacy.secure=true,data.groups=sex+race,seed=3,x.y=1e-05"
    assert nested(text) == {
        "privacy": {"epsilon": None, "secure": True},
        "data": {"groups": "sex+race"},
        "seed": 3,
        "x": {"y": 1e-5},
    }


@pytest.mark.parametrize("value", ["a,b", {"a": 1}])
def test_values_that_params_cannot_hold_are_refused(value):
    with pytest.raises(EquidpError, match="preset"):
        params_text({"model.options": value})


@pytest.mark.parametrize("text", ["training.epochs=[5,6]", "training.epochs=[5", "training.epochs='5"])
def test_a_list_in_params_is_refused_with_the_place_for_it(text):
    with pytest.raises(EquidpError, match=r"axis of a grid, or .* a preset, in conf/local") as error:
        nested(text)
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data.key", "01"),
        ("data.key", "4e999"),
        ("data.options.label", "010"),
        ("data.positive_class", "yes"),
        ("data.positive_class", "1"),
        ("training.optimizer", "adam"),
    ],
)
def test_texts_that_yaml_takes_for_something_else_stay_texts(name, value):
    """The keys 01 and 1 were one split, 4e999 and 7e999 another, and a class `yes` was refused for want of quotes."""
    assert dotted(nested(params_text({name: value}))) == {name: value}


def test_a_key_is_taken_as_typed():
    assert nested("data.key=01,training.epochs=01") == {"data": {"key": "01"}, "training": {"epochs": 1}}


def test_a_param_without_a_value_is_refused():
    with pytest.raises(EquidpError, match="setting=value"):
        nested("training.epochs")
