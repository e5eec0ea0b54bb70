"""Training of one algorithm on the split: plan, train, score."""

from equidp.pipelines.training.pipeline import create_pipeline
