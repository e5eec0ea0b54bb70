"""Tune: one of several trainings, chosen under differential privacy."""

from equidp.pipelines.tune.pipeline import create_pipeline
