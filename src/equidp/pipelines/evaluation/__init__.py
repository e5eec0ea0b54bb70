"""Per-group metrics, and what privacy cost each group."""

from equidp.pipelines.evaluation.pipeline import create_pipeline
