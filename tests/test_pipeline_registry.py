"""Pipelines by name: what --pipelines=a,b comes to."""

import inspect

import pytest
from kedro.pipeline import Pipeline

from equidp import pipeline_registry
from equidp.algorithms import ALGORITHMS
from equidp.errors import EquidpError
from equidp.pipeline_registry import DEMONSTRATION, register_pipelines
from equidp.settings import PIPELINES


@pytest.mark.parametrize(
    ("asked", "compared"),
    [
        (["dpis"], None),
        (["ingestion", "dpis"], None),
        (["dpis", "sgd"], {"dpis", "sgd"}),
        (["dpis", "audit", "sgd"], {"dpis", "sgd"}),
        (["psac", "dpis", "compare"], {*DEMONSTRATION, "psac", "dpis"}),
    ],
)
def test_several_algorithms_are_compared_on_one_page(asked, compared):
    pipelines = register_pipelines()
    whole = Pipeline([])
    for name in asked:  # as Kedro adds them up
        whole += pipelines[name]

    pages = [node for node in whole.nodes if "comparison.report" in node.outputs]

    assert len(pages) == (compared is not None)
    if compared:
        assert compared == {name.removesuffix(".metrics") for name in pages[0].inputs if name.endswith(".metrics")}
    assert {node.name for name in asked for node in pipelines[name].nodes} - {"reporting.compare_algorithms"} <= {
        node.name for node in whole.nodes
    }


def test_the_demonstration_fits_every_task():
    """Who types `kedro run --params=dataset=diabetes` has chosen no algorithm that needs classes."""
    assert not [name for name in DEMONSTRATION if ALGORITHMS[name]().build().objective.by_class]


def test_the_names_that_are_checked_before_pipelines_are_imported_are_those_of_all_pipelines():
    assert set(PIPELINES) == set(register_pipelines())


def test_a_pipeline_is_built_once_and_no_other_is(monkeypatch):
    built: list[tuple[str, ...]] = []
    experiment = pipeline_registry.Experiment

    def noted(algorithms):
        built.append(tuple(algorithms))
        return experiment(algorithms)

    monkeypatch.setattr(pipeline_registry, "Experiment", noted)
    pipelines = register_pipelines()
    assert pipelines["dpsgd"] is pipelines["dpsgd"]
    assert built == [("dpsgd",)]
    assert "dpsgd" in pipelines
    assert "dpsgdd" not in pipelines
    with pytest.raises(EquidpError, match=r"Unknown pipeline 'dpsgdd'\. Did you mean 'dpsgd'"):
        pipelines["dpsgdd"]
    assert len(pipelines) == len(PIPELINES)


def test_a_notebook_may_add_a_pipeline_to_those_of_kedro_and_sees_their_names():
    pipelines = register_pipelines()
    pipelines["mine"] = mine = Pipeline([])
    assert pipelines["mine"] is mine
    assert repr(pipelines).endswith("__default__, mine)")
    del pipelines["mine"], pipelines["dpsgd"]
    assert not {"mine", "dpsgd"} & set(pipelines)


def test_the_code_of_every_node_can_be_shown_with_its_inputs() -> None:
    """As Jupyter's `%load_node` and Kedro-Viz do it."""
    for name, pipeline in register_pipelines().items():
        for node in pipeline.nodes:
            inspect.signature(node.func).bind(*node.inputs)
            assert f"def {node.func.__name__}(" in inspect.getsource(node.func), name
