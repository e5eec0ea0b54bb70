"""Every pipeline by name. Derived from the registry of algorithms: a new algorithm is a pipeline at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial

from kedro.pipeline import Pipeline

from equidp.algorithms import ALGORITHMS, BASELINE
from equidp.errors import unknown_name
from equidp.pipelines import audit, evaluation, ingestion, release, reporting, training, tune

DEMONSTRATION = ("sgd", "dpsgd", "naive", "dpsgd_f")
"""Algorithms that `kedro run` and `compare` run; they fit every task and grouping."""


class Pipelines(MutableMapping[str, Pipeline]):
    """Pipelines by name; an unknown name is an error that names the nearest.

    A pipeline is built when it is first asked for: all together take a tenth of a second or two, and a run needs one.
    """

    def __init__(self, builders: Mapping[str, Callable[[], Pipeline]]) -> None:
        self._builders, self._built = dict(builders), dict[str, Pipeline]()

    def __getitem__(self, name: str) -> Pipeline:
        if name not in self._builders:
            if name in ALGORITHMS:
                ALGORITHMS[name]  # an algorithm of another package that is broken: this raises the reason
            raise unknown_name("pipeline", name, self)
        if name not in self._built:
            self._built[name] = self._builders[name]()
        return self._built[name]

    def __setitem__(self, name: str, pipeline: Pipeline) -> None:
        self._builders[name], self._built[name] = lambda: pipeline, pipeline

    def __delitem__(self, name: str) -> None:
        del self._builders[name]
        self._built.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._builders

    def __iter__(self) -> Iterator[str]:
        return iter(self._builders)

    def __len__(self) -> int:
        return len(self._builders)

    def __repr__(self) -> str:
        return f"Pipelines({', '.join(self)})"


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
    """Return all pipelines. `find_pipelines` is not used, because names of algorithms must exist in any case."""
    demonstration = partial(Experiment, DEMONSTRATION)
    return Pipelines(
        {name: partial(Experiment, [name]) for name, _ in ALGORITHMS.sound()}
        | {
            "ingestion": ingestion.create_pipeline,
            "audit": lambda: ingestion.create_pipeline() + audit.create_pipeline(),
            "tune": lambda: ingestion.create_pipeline() + tune.create_pipeline(),
            "ledger": reporting.create_ledger,
            "release": release.create_release,
            "report": reporting.create_report,
            "compare": demonstration,
            "__default__": demonstration,
        }
    )
