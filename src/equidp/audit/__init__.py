"""Audit: attack a training run, and compare what the attack achieves with what the run claims.

- `one_run`: the lower bound on ε from one training. `canaries`: the records that the attack guesses about.
- `membership`: how well an attack recognises training records, per group.
- `setup`: how an audit trains a model. `run`: one audit, from a split to `audit.json`.
- `figures`, `page`: the audit's own figures and HTML page.

It imports `mechanism`, `data`, `parameters`, and `reporting` for its page. Begin with `run.run`.
"""

from __future__ import annotations

from equidp.audit.one_run import epsilon_lower_bound, p_value
from equidp.audit.run import run
from equidp.audit.setup import TrainingSetup
from equidp.parameters import AuditSettings
