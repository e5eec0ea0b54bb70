"""raw folder → records → features → train, test, public → group counts."""

from kedro.pipeline import Pipeline

from equidp.pipelines import wired
from equidp.pipelines.ingestion import nodes


def create_pipeline() -> Pipeline:
    """Ingestion, shared by every experiment."""
    parts, read = ["train", "test", "public"], ["features_cache", "provenance", "settings"]
    raw = ["raw_folder", "records_cache", "tables", "settings"]
    rows = [
        (nodes.encode_records, raw, ["records", "provenance"], "encode_records"),
        (nodes.extract_features, ["records", *read], "features", "extract_features"),
        (nodes.split_records, ["features", "settings", "algorithms"], parts, "split_records"),
        (nodes.label_groups, [*parts, "settings"], "groups", "label_groups"),
        (nodes.draw_group_counts, ["groups", "settings"], "group_counts", "draw_group_counts"),
    ]
    return wired(rows, "ingestion")
