"""One algorithm trained on the split: plan, train, score."""

from equidp.pipelines.training.pipeline import create_pipeline
