"""train → plan → model, history, privacy → scores; the same shape for every algorithm, under its own namespace."""

from kedro.pipeline import Node, Pipeline, pipeline

from equidp.algorithms import ALGORITHMS
from equidp.pipelines import given
from equidp.pipelines.ingestion.nodes import split_records
from equidp.pipelines.training import nodes

PARTS, ALL = {"train", "test", "public"}, {"settings", "on_epoch", "privacy_ledger"}


def create_pipeline(algorithm: str) -> Pipeline:
    """Training of one algorithm, which shares all inputs with the others but its workplace.

    An algorithm that trains on a fixed map of the records has its own features, split by the same draw.
    """
    body = _body(algorithm)
    name = ALGORITHMS[algorithm].features
    if name is None:
        return pipeline(body, namespace=algorithm, inputs=PARTS | ALL)
    shared = ALL | {"records", "features_cache", "provenance", "algorithms"}
    return pipeline(_own_features(name) + body, namespace=algorithm, inputs=shared)


def _own_features(name: str) -> Pipeline:
    return Pipeline(
        [
            Node(
                given(nodes.extract_own_features, name=name),
                inputs=["records", "features_cache", "provenance", "settings"],
                outputs="features",
                name="extract_features",
            ),
            Node(
                split_records,
                inputs=["features", "settings", "algorithms"],
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
                inputs=["train", "settings"],
                outputs="plan",
                name="plan_training",
            ),
            Node(
                given(nodes.train_network, algorithm=algorithm),
                inputs=["train", "test", "public", "plan", "workplace", "settings", "on_epoch", "privacy_ledger"],
                outputs=["model", "history", "privacy"],
                name="train_model",
            ),
            Node(nodes.score_test, inputs=["model", "test"], outputs="scores", name="score_test"),
        ]
    )
