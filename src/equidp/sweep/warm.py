"""What every run imports, imported once: runs are forked from a process that has this module.

It only imports. Forks share what is there before them, so no random number may be drawn here; a run makes its
generators after the fork, from its seed or the system's. An import that fails here fails again in the run, which then
says why.
"""

import contextlib
from importlib import import_module

with contextlib.suppress(Exception):
    for name in (
        "kedro.framework.cli.cli",
        "mlflow.pyfunc",
        "mlflow.store.tracking.sqlalchemy_store",
        "equidp.settings",
        "equidp.pipeline_registry",
    ):
        import_module(name)
