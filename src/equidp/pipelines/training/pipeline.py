"""train → plan → model, history, privacy → scores; the same shape for every algorithm, under its own namespace."""

from kedro.pipeline import Pipeline, pipeline

from equidp.algorithms import ALGORITHMS
from equidp.pipelines import given, wired
from equidp.pipelines.ingestion.nodes import mapped, split_records
from equidp.pipelines.training import nodes

PARTS, ALL = ["train", "test", "public"], {"settings", "on_epoch", "privacy_ledger", "provenance"}


def create_pipeline(algorithm: str) -> Pipeline:
    """Training of one algorithm, which shares all inputs but the workplace with the other algorithms.

    An algorithm that trains on a fixed map of the records has its own features. They are split by the same draw.
    """
    plan, train = (given(f, algorithm=algorithm) for f in (nodes.plan_training, nodes.train_network))
    trained = [*PARTS, "plan", "workplace", "settings", "on_epoch", "privacy_ledger", "provenance"]
    body = [
        (plan, ["train", "settings"], "plan", "plan_training"),
        (train, trained, ["model", "history", "privacy"], "train_model"),
        (nodes.score_test, ["model", "test", "settings"], "scores", "score_test"),
    ]
    name = ALGORITHMS[algorithm].features
    if name is None:
        return pipeline(wired(body), namespace=algorithm, inputs={*PARTS} | ALL)
    extract, read = given(mapped, name=name, options={}), ["records", "features_cache", "provenance"]
    own = [
        (extract, [*read, "settings"], "features", "extract_features"),
        (split_records, ["features", "settings", "algorithms"], PARTS, "split_features"),
    ]
    return pipeline(wired(own + body), namespace=algorithm, inputs={*read, "algorithms"} | ALL)
