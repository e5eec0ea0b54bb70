"""raw folder → records → features → train, test, public → group counts."""

from kedro.pipeline import Node, Pipeline

from equidp.pipelines.ingestion import nodes

GROUP = "ingestion"


def create_pipeline() -> Pipeline:
    """Ingestion, shared by every experiment."""
    return Pipeline(
        [
            Node(
                nodes.encode_records,
                inputs=["raw_folder", "records_cache", "tables", "settings"],
                outputs=["records", "provenance"],
                name="encode_records",
                namespace=GROUP,
            ),
            Node(
                nodes.extract_features,
                inputs=["records", "features_cache", "provenance", "settings"],
                outputs="features",
                name="extract_features",
                namespace=GROUP,
            ),
            Node(
                nodes.split_records,
                inputs=["features", "settings", "algorithms"],
                outputs=["train", "test", "public"],
                name="split_records",
                namespace=GROUP,
            ),
            Node(
                nodes.label_groups,
                inputs=["train", "test", "public", "settings"],
                outputs="groups",
                name="label_groups",
                namespace=GROUP,
            ),
            Node(
                nodes.draw_group_counts,
                inputs=["groups", "settings"],
                outputs="group_counts",
                name="draw_group_counts",
                namespace=GROUP,
            ),
        ]
    )
