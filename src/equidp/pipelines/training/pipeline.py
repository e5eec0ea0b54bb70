"""train → plan → model, history, privacy → scores; the same shape for every algorithm, under its own namespace."""

from kedro.pipeline import Node, Pipeline, pipeline

from equidp.algorithms import ALGORITHMS
from equidp.pipelines import given
from equidp.pipelines.ingestion.nodes import split_records
from equidp.pipelines.training import nodes

PARTS, SETTINGS = {"train", "test", "public"}, "settings"
SHARED_PARAMETERS = {"params:data", "params:training", "params:seed"}


def create_pipeline(algorithm: str) -> Pipeline:
    """Training of one algorithm. Only `<algorithm>.options` differ between algorithms.

    An algorithm that trains on a fixed map of the records has its own features, split by the same draw.
    """
    body = _body(algorithm)
    name = ALGORITHMS[algorithm].features
    if name is None:
        return pipeline(body, namespace=algorithm, inputs={*PARTS, SETTINGS})
    whole = _own_features(name) + body
    shared = {"records", "provenance", "algorithms", SETTINGS}
    return pipeline(whole, namespace=algorithm, inputs=shared, parameters=SHARED_PARAMETERS)


def _own_features(name: str) -> Pipeline:
    return Pipeline(
        [
            Node(
                given(nodes.extract_own_features, name=name),
                inputs=["records", "provenance", "params:training"],
                outputs="features",
                name="extract_features",
            ),
            Node(
                split_records,
                inputs=["features", "params:data", "params:seed", "algorithms"],
                outputs=["train", "test", "public"],
                name="split_features",
            ),
        ]
    )


def _body(algorithm: str) -> Pipeline:
    return Pipeline(
        [
            Node(
                given(nodes.plan_training, algorithm=algorithm),
                inputs=["train", SETTINGS],
                outputs="plan",
                name="plan_training",
            ),
            Node(
                given(nodes.train_network, algorithm=algorithm),
                inputs=["train", "test", "public", "plan", "workplace", SETTINGS],
                outputs=["model", "history", "privacy"],
                name="train_model",
            ),
            Node(nodes.score_test, inputs=["model", "test"], outputs="scores", name="score_test"),
        ]
    )
