"""scores → evaluation → metrics, against the baseline where there is one."""

from kedro.pipeline import Pipeline

from equidp.algorithms import BASELINE
from equidp.evaluation.metrics import metrics_document
from equidp.pipelines import given, wired
from equidp.pipelines.evaluation import nodes


def create_pipeline(algorithm: str) -> Pipeline:
    """Evaluation of one algorithm; the cost of privacy is measured against the `sgd` baseline of the same run."""
    evaluate, own = given(nodes.evaluate_groups, algorithm=algorithm), given(metrics_document, baseline=None)
    scores, evaluation, metrics = (f"{algorithm}.{kind}" for kind in ("scores", "evaluation", "metrics"))
    measure = (evaluate, [scores, "test", "settings"], evaluation, f"evaluate_{algorithm}")
    if algorithm == BASELINE:  # never released: it is an exact function of training records, whatever noise counts get
        return wired([measure, (own, evaluation, metrics, f"metrics_of_{algorithm}")], "evaluation")
    both = [evaluation, f"{BASELINE}.evaluation", scores, f"{BASELINE}.scores", "test", "settings"]
    compare = given(nodes.cost_against_baseline, algorithm=algorithm)
    release = given(nodes.release_figures, algorithm=algorithm)
    read = [scores, f"{algorithm}.model", "test", "train", f"{algorithm}.workplace", "settings"]
    rows = [
        measure,
        (compare, both, metrics, f"cost_of_privacy_{algorithm}"),
        (release, read, f"{algorithm}.metrics_release", f"release_figures_{algorithm}"),
    ]
    return wired(rows, "evaluation")
