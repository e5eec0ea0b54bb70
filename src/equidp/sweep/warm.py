"""What every run imports, imported once: runs are forked from a process that has this module.

An import that fails here fails again in the run, which then says why.
"""

import contextlib
from importlib import import_module

with contextlib.suppress(Exception):
    for name in (
        "kedro.framework.cli.cli",
        "mlflow.pyfunc",
        "mlflow.store.tracking.sqlalchemy_store",
        "torch._dynamo",  # by every optimiser
        "equidp.settings",
        "equidp.pipeline_registry",
    ):
        import_module(name)
