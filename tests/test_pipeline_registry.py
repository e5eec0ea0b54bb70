"""Pipelines by name: what --pipelines=a,b comes to."""

import pytest
from kedro.framework import project

from equidp.pipeline_registry import register_pipelines


@pytest.mark.parametrize(
    ("asked", "compared"),
    [
        (["dpis"], None),
        (["ingestion", "dpis"], None),
        (["dpis", "sgd"], {"dpis.metrics", "sgd.metrics"}),
        (["dpsgd", "dpis", "compare"], {"sgd.metrics", "dpsgd.metrics", "naive.metrics", "dpsgd_f.metrics"}),
    ],
)
def test_several_algorithms_are_compared_on_one_page(monkeypatch, asked, compared):
    monkeypatch.setattr(project.pipelines, "_requested_pipelines", asked)  # as Kedro does before it asks for them
    pipelines = register_pipelines()
    whole = sum((pipelines[name] for name in asked[1:]), pipelines[asked[0]])  # as Kedro adds them up

    pages = [node for node in whole.nodes if "comparison.report" in node.outputs]

    assert len(pages) == (compared is not None)
    if compared:
        assert compared == {name for name in pages[0].inputs if name.endswith(".metrics")}
