"""scores → evaluation → metrics, against the baseline where there is one."""

from kedro.pipeline import Node, Pipeline

from equidp.pipelines import given
from equidp.pipelines.evaluation import nodes
from equidp.reporting.tables import BASELINE

GROUP = "evaluation"


def create_pipeline(algorithm: str) -> Pipeline:
    """Evaluation of one algorithm; the cost of privacy is measured against the `sgd` baseline of the same run."""
    measure = Node(
        given(nodes.evaluate_groups, algorithm=algorithm),
        inputs=[f"{algorithm}.scores", "test", "settings"],
        outputs=f"{algorithm}.evaluation",
        name=f"evaluate_{algorithm}",
        namespace=GROUP,
    )
    if algorithm == BASELINE:
        document = Node(
            nodes.baseline_metrics,
            inputs=f"{algorithm}.evaluation",
            outputs=f"{algorithm}.metrics",
            name=f"metrics_of_{algorithm}",
            namespace=GROUP,
        )
    else:
        document = Node(
            nodes.cost_against_baseline,
            inputs=[
                f"{algorithm}.evaluation",
                f"{BASELINE}.evaluation",
                f"{algorithm}.scores",
                f"{BASELINE}.scores",
                "test",
                "settings",
            ],
            outputs=f"{algorithm}.metrics",
            name=f"cost_of_privacy_{algorithm}",
            namespace=GROUP,
        )
    if (
        algorithm == BASELINE
    ):  # its figures are exact functions of training records: no noise on test counts covers them
        return Pipeline([measure, document])
    release = Node(
        given(nodes.release_figures, algorithm=algorithm),
        inputs=[f"{algorithm}.scores", "test", "train", f"{algorithm}.workplace", "settings"],
        outputs=f"{algorithm}.metrics_release",
        name=f"release_figures_{algorithm}",
        namespace=GROUP,
    )
    return Pipeline([measure, document, release])
