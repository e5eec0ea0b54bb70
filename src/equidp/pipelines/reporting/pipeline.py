"""metrics, privacy, history → figures and HTML pages."""

from collections.abc import Sequence

from kedro.pipeline import Node, Pipeline

from equidp.pipelines import given
from equidp.pipelines.reporting import nodes, tracked
from equidp.reporting.privacy_report import privacy_report
from equidp.reporting.tables import BASELINE

GROUP = "reporting"
SETTINGS = ["params:dataset", "params:seed", "params:data", "params:model", "params:privacy", "params:training"]


def create_pipeline(algorithm: str) -> Pipeline:
    """Figures, the privacy statement and the page of one algorithm."""
    beside = [
        Node(
            given(nodes.accuracy_figure, algorithm=algorithm),
            inputs=[f"{algorithm}.metrics", "params:data"],
            outputs=f"{algorithm}.accuracy_figure",
            name=f"draw_accuracy_{algorithm}",
            namespace=GROUP,
        )
    ]
    if algorithm != BASELINE:
        beside += [
            Node(
                given(nodes.cost_figure, algorithm=algorithm),
                inputs=[f"{algorithm}.metrics", "params:data"],
                outputs=f"{algorithm}.cost_figure",
                name=f"draw_cost_of_privacy_{algorithm}",
                namespace=GROUP,
            ),
            Node(
                given(nodes.clip_norm_figure, algorithm=algorithm),
                inputs=f"{algorithm}.history",
                outputs=f"{algorithm}.clip_norm_figure",
                name=f"draw_clip_norms_{algorithm}",
                namespace=GROUP,
            ),
            Node(
                privacy_report,
                inputs=[f"{algorithm}.privacy", "params:dataset"],
                outputs=f"{algorithm}.statement",
                name=f"write_statement_{algorithm}",
                namespace=GROUP,
            ),
        ]
    page = Node(
        given(nodes.run_report, algorithm=algorithm),
        inputs=[
            *(f"{algorithm}.{name}" for name in ("metrics", "privacy", "history")),
            "groups",
            "provenance",
            *SETTINGS,
            f"{algorithm}.metrics_release",
            *(f"params:{options}" for options in nodes.options_of([algorithm])),
        ],
        outputs=f"{algorithm}.report",
        name=f"write_report_{algorithm}",
        namespace=GROUP,
    )
    return Pipeline([*beside, page])


def create_comparison(algorithms: Sequence[str]) -> Pipeline:
    """The page and the table that put several algorithms side by side."""
    results = [f"{a}.{name}" for name in ("metrics", "privacy", "history") for a in algorithms]
    results += [f"params:{options}" for options in nodes.options_of(algorithms)]
    return Pipeline(
        [
            Node(
                nodes.comparison_of(algorithms),
                inputs=["groups", "provenance", *SETTINGS, *results],
                outputs=["comparison.report", "comparison.table"],
                name="compare_algorithms",
                namespace=GROUP,
            )
        ]
    )


def create_ledger() -> Pipeline:
    """The figure of what all runs on the data set have spent."""
    return Pipeline(
        [
            Node(
                nodes.draw_ledger,
                inputs=["privacy_ledger", "settings"],
                outputs="ledger_figure",
                name="draw_ledger",
                namespace=GROUP,
            )
        ]
    )


def create_report() -> Pipeline:
    """The page that compares tracked runs, whenever they were made."""
    return Pipeline(
        [
            Node(
                tracked.compare_tracked_runs,
                inputs="params:report",
                outputs=["tracked.report", "tracked.table"],
                name="compare_tracked_runs",
                namespace=GROUP,
            )
        ]
    )
