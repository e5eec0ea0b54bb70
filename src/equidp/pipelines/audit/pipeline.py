"""train, test, public → findings (audit.json) → figures and page."""

from kedro.pipeline import Node, Pipeline

from equidp.audit.figures import bounds_beside_claims
from equidp.pipelines.audit import nodes
from equidp.pipelines.reporting.pipeline import SETTINGS

GROUP = "audit"


def create_pipeline() -> Pipeline:
    """Audit of the algorithm that the parameter `algorithm` names."""
    return Pipeline(
        [
            Node(
                nodes.audit_algorithm,
                inputs=[
                    "train",
                    "test",
                    "public",
                    "settings",
                ],
                outputs="audit_findings",
                name="audit_algorithm",
                namespace=GROUP,
            ),
            Node(
                bounds_beside_claims,
                inputs="audit_findings",
                outputs="audit_bounds",
                name="draw_audit_bounds",
                namespace=GROUP,
            ),
            Node(
                nodes.draw_exposure,
                inputs=["audit_findings", "params:data"],
                outputs="audit_exposure",
                name="draw_exposure",
                namespace=GROUP,
            ),
            Node(
                nodes.write_report,
                inputs=["audit_findings", "provenance", *SETTINGS, "params:audit", "params:audited"],
                outputs="audit_report",
                name="write_audit_report",
                namespace=GROUP,
            ),
        ]
    )
