"""features → trials → the chosen model, its statement, its figures, a page, and what may go out."""

from kedro.pipeline import Node, Pipeline

from equidp.pipelines.release.nodes import write_tuned_release
from equidp.pipelines.tune import nodes
from equidp.reporting.privacy_report import privacy_report

GROUP = "tune"


def create_pipeline() -> Pipeline:
    """Tuning of the algorithm that the parameter `algorithm` names; beside ingestion, whose split it does not use."""
    return Pipeline(
        [
            Node(
                nodes.choose_model,
                inputs=["features", "tuned.workplace", "settings", "algorithms", "privacy_ledger", "provenance"],
                outputs=["tuned.model", "tuned.privacy", "tuned.choice", "tuned.metrics_release", "tuned.trials"],
                name="choose_model",
                namespace=GROUP,
            ),
            Node(
                privacy_report,
                inputs=["tuned.privacy", "params:dataset"],
                outputs="tuned.statement",
                name="write_statement_tuned",
                namespace=GROUP,
            ),
            Node(
                nodes.write_page,
                inputs=[f"tuned.{kind}" for kind in ("choice", "privacy", "metrics_release", "trials")]
                + ["provenance", "settings"],
                outputs="tuned.report",
                name="write_report_tuned",
                namespace=GROUP,
            ),
            Node(
                write_tuned_release,
                inputs=["tuned.model", "tuned.privacy", "tuned.metrics_release", "settings"],
                outputs="tuned.release",
                name="write_release_tuned",
                namespace=GROUP,
            ),
        ]
    )
