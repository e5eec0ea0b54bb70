"""Every pipeline by name. Derived from the registry of algorithms: a new algorithm is a pipeline at once."""

from __future__ import annotations

from collections.abc import Sequence

from kedro.framework import project
from kedro.pipeline import Pipeline

from equidp.algorithms import ALGORITHMS
from equidp.errors import unknown_name
from equidp.pipelines import audit, evaluation, ingestion, release, reporting, training
from equidp.reporting.tables import BASELINE

DEMONSTRATION = ("sgd", "dpsgd", "naive", "dpsgd_f")
"""What `kedro run` shows, and what `compare` compares."""


class Registry(dict[str, Pipeline]):
    """Pipelines by name; an unknown name is an error that names the nearest."""

    def __missing__(self, name: str) -> Pipeline:
        raise unknown_name("pipeline", name, self)


def experiment(algorithm: str) -> Pipeline:
    """Ingestion, the `sgd` baseline, one algorithm, evaluation and report."""
    parts = [ingestion.create_pipeline()]
    for name in dict.fromkeys((BASELINE, algorithm)):
        parts += [training.create_pipeline(name), evaluation.create_pipeline(name)]
    return sum(parts, Pipeline([])) + reporting.create_pipeline(algorithm) + release.create_pipeline(algorithm)


def comparison(algorithms: Sequence[str]) -> Pipeline:
    """Several experiments on one split, side by side."""
    return sum(map(experiment, algorithms), Pipeline([])) + reporting.create_comparison(algorithms)


def register_pipelines() -> Registry:
    """All pipelines, built without `find_pipelines`: derived names must exist whichever one is asked for."""
    pipelines = Registry({name: experiment(name) for name in ALGORITHMS})
    pipelines["ingestion"] = ingestion.create_pipeline()
    pipelines["audit"] = ingestion.create_pipeline() + audit.create_pipeline()
    pipelines["release"] = release.create_release()
    pipelines["report"] = reporting.create_report()
    asked = set(_asked_for())
    several = [name for name in ALGORITHMS if name in asked]
    if len(several) > 1 and not asked & {"compare", "__default__"}:
        # Kedro adds up the pipelines of --pipelines=a,b, in any order: what compares them is part of one
        pipelines[several[-1]] += reporting.create_comparison(several)
    pipelines["compare"] = pipelines["__default__"] = comparison(DEMONSTRATION)
    return pipelines


def _asked_for() -> Sequence[str]:
    """The names given to --pipelines, which Kedro sets before it calls `register_pipelines`."""
    return getattr(project.pipelines, "_requested_pipelines", None) or ()
