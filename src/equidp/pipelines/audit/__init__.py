"""Audit: attack a training run, and compare what the attack achieves with what the run claims."""

from equidp.pipelines.audit.pipeline import create_pipeline
