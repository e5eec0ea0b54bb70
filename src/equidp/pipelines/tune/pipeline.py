"""features → trials → the chosen model, its statement, its figures."""

from kedro.pipeline import Node, Pipeline

from equidp.pipelines.tune import nodes
from equidp.reporting.privacy_report import privacy_report

GROUP = "tune"


def create_pipeline() -> Pipeline:
    """Tuning of the algorithm that the parameter `algorithm` names; beside ingestion, whose split it does not use."""
    return Pipeline(
        [
            Node(
                nodes.choose_model,
                inputs=["features", "tuned.workplace", "settings", "algorithms", "privacy_ledger"],
                outputs=["tuned.model", "tuned.privacy", "tuned.choice", "tuned.metrics_release"],
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
        ]
    )
