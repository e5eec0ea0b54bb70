"""Every pipeline by name. Derived from the registry of algorithms: a new algorithm is a pipeline at once."""

from __future__ import annotations

from collections.abc import Iterable

from kedro.pipeline import Pipeline

from equidp.algorithms import ALGORITHMS, BASELINE
from equidp.errors import unknown_name
from equidp.pipelines import audit, evaluation, ingestion, release, reporting, training, tune

DEMONSTRATION = ("sgd", "dpsgd", "naive", "dpsgd_f")
"""What `kedro run` shows, and what `compare` compares: algorithms for every task and grouping."""


class Pipelines(dict[str, Pipeline]):
    """Pipelines by name; an unknown name is an error that names the nearest."""

    def __missing__(self, name: str) -> Pipeline:
        if name in ALGORITHMS:
            ALGORITHMS[name]  # of another package, and broken: that is the reason
        raise unknown_name("pipeline", name, self)


class Experiment(Pipeline):
    """Ingestion, the `sgd` baseline, some algorithms, their evaluation, reports and releases; several share a page.

    Kedro adds up the pipelines of `--pipelines=a,b`: the sum of two experiments is the experiment of both.

    Args:
        algorithms: names, in any order.
        beside: another pipeline that runs with them.
    """

    def __init__(self, algorithms: Iterable[str], beside: Pipeline | None = None) -> None:
        self.algorithms = tuple(name for name in ALGORITHMS if name in set(algorithms))
        self.beside = beside or Pipeline([])
        parts = [ingestion.create_pipeline(), self.beside]
        for name in dict.fromkeys((BASELINE, *self.algorithms)):
            parts += [training.create_pipeline(name), evaluation.create_pipeline(name)]
        parts += [reporting.create_pipeline(name) for name in self.algorithms]
        parts += [release.create_pipeline(name) for name in self.algorithms if name != BASELINE]
        if len(self.algorithms) > 1:
            parts.append(reporting.create_comparison(self.algorithms))
        super().__init__({node for part in parts for node in part.nodes})

    def __add__(self, other: object) -> Pipeline:
        if isinstance(other, Experiment):
            return Experiment((*self.algorithms, *other.algorithms), self.beside + other.beside)
        return Experiment(self.algorithms, self.beside + other) if isinstance(other, Pipeline) else NotImplemented

    def __radd__(self, other: object) -> Pipeline:
        return self if other == 0 else self + other


def register_pipelines() -> Pipelines:
    """All pipelines, built without `find_pipelines`: derived names must exist whichever one is asked for."""
    pipelines = Pipelines({name: Experiment([name]) for name, _ in ALGORITHMS.sound()})
    pipelines["ingestion"] = ingestion.create_pipeline()
    pipelines["audit"] = ingestion.create_pipeline() + audit.create_pipeline()
    pipelines["tune"] = ingestion.create_pipeline() + tune.create_pipeline()
    pipelines["ledger"] = reporting.create_ledger()
    pipelines["release"] = release.create_release()
    pipelines["report"] = reporting.create_report()
    pipelines["compare"] = pipelines["__default__"] = Experiment(DEMONSTRATION)
    return pipelines
