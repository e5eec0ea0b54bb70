"""Audit: attack a training run, and hold what the attack achieves against what the run claims."""

from __future__ import annotations

from equidp.audit.one_run import epsilon_lower_bound, p_value
from equidp.audit.recipe import Recipe
from equidp.audit.run import run
from equidp.parameters import AuditSettings

__all__ = ["AuditSettings", "Recipe", "epsilon_lower_bound", "p_value", "run"]
