"""features → trials → the chosen model, its statement, its figures, a page, and what may go out."""

from kedro.pipeline import Pipeline

from equidp.pipelines import wired
from equidp.pipelines.release.nodes import write_tuned_release
from equidp.pipelines.release.pipeline import SHARED
from equidp.pipelines.reporting.nodes import statement
from equidp.pipelines.tune import nodes


def create_pipeline() -> Pipeline:
    """Tuning of the algorithm that the parameter `algorithm` names; beside ingestion, whose split it does not use."""
    read = ["features", "tuned.workplace", "settings", "algorithms", "privacy_ledger", "provenance"]
    model, privacy, choice, figures, trials = made = [
        f"tuned.{kind}" for kind in ("model", "privacy", "choice", "metrics_release", "trials")
    ]
    page = [choice, privacy, figures, trials, "provenance", "settings"]
    rows = [
        (nodes.choose_model, read, made, "choose_model"),
        (statement, [privacy, "settings"], "tuned.statement", "write_statement_tuned"),
        (nodes.write_page, page, "tuned.report", "write_report_tuned"),
        (write_tuned_release, [model, privacy, figures, *SHARED], "tuned.release", "write_release_tuned"),
    ]
    return wired(rows, "tune")
