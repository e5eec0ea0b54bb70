"""train → plan → model, history, privacy → scores; the same shape for every algorithm, under its own namespace."""

from collections.abc import Callable
from functools import partial, update_wrapper

from kedro.pipeline import Node, Pipeline, pipeline

from equidp.pipelines.training import nodes

SHARED_INPUTS = {"train", "test", "public"}
SHARED_PARAMETERS = {"params:data", "params:model", "params:privacy", "params:training", "params:seed", "params:resume"}


def create_pipeline(algorithm: str) -> Pipeline:
    """Training of one algorithm. Only `<algorithm>.options` differ between algorithms."""
    body = Pipeline(
        [
            Node(
                _for(nodes.plan_training, algorithm),
                inputs=["train", "params:data", "params:privacy", "params:training", "params:options"],
                outputs="plan",
                name="plan_training",
            ),
            Node(
                _for(nodes.train_network, algorithm),
                inputs=[
                    "train",
                    "test",
                    "public",
                    "plan",
                    "workplace",
                    "params:data",
                    "params:model",
                    "params:privacy",
                    "params:training",
                    "params:options",
                    "params:seed",
                    "params:resume",
                ],
                outputs=["model", "history", "privacy"],
                name="train_model",
            ),
            Node(nodes.score_test, inputs=["model", "test"], outputs="scores", name="score_test"),
        ]
    )
    return pipeline(body, namespace=algorithm, inputs=SHARED_INPUTS, parameters=SHARED_PARAMETERS)


def _for(function: Callable, algorithm: str) -> Callable:
    """The node function of one algorithm, under its own readable name."""
    return update_wrapper(partial(function, algorithm=algorithm), function)
