"""Kedro wiring only: every node is a thin function around the library."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial, wraps
from inspect import signature
from typing import Any

from kedro.pipeline import Node, Pipeline

# Evaluation and reporting read the outputs of several namespaces on purpose: `sgd.scores` beside `dpsgd_f.scores`.
warnings.filterwarnings("ignore", message="One or more dataset names contain '.'", category=UserWarning)


def given(function: Callable, **values: Any) -> Callable:
    """Return a node's function with some arguments set, under its own name.

    It is a function and not a `partial`, because `%load_node` shows the code of functions only.
    """

    @wraps(function)
    def bound(*inputs: Any) -> Any:
        return function(*inputs, **values)

    bound.__signature__ = signature(partial(function, **values))  # type: ignore[attr-defined]
    return bound


def wired(rows: Sequence[tuple], namespace: str | None = None) -> Pipeline:
    """A pipeline of nodes, each given as function, inputs, outputs and name."""
    return Pipeline([Node(*parts, name=name, namespace=namespace) for *parts, name in rows])
