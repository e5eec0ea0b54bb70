"""Audit: attack a training run, and hold what the attack achieves against what the run claims."""

from equidp.pipelines.audit.pipeline import create_pipeline

__all__ = ["create_pipeline"]
