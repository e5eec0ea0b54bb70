"""train, test, public → findings (audit.json) → figures and page."""

from kedro.pipeline import Pipeline

from equidp.audit.figures import bounds_beside_claims
from equidp.pipelines import wired
from equidp.pipelines.audit import nodes


def create_pipeline() -> Pipeline:
    """Audit of the algorithm that the setting `algorithm` names."""
    found = "audit_findings"
    rows = [
        (nodes.audit_algorithm, ["train", "test", "public", "settings"], found, "audit_algorithm"),
        (bounds_beside_claims, found, "audit_bounds", "draw_audit_bounds"),
        (nodes.draw_exposure, [found, "settings"], "audit_exposure", "draw_exposure"),
        (nodes.write_report, [found, "provenance", "settings"], "audit_report", "write_audit_report"),
    ]
    return wired(rows, "audit")
