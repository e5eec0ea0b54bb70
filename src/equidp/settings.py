"""Kedro's project settings."""

import io
import os
import sys
import warnings
from typing import Any

import click
from click.core import ParameterSource
from kedro.framework import project
from kedro.framework.session import KedroSession
from kedro.framework.session.store import BaseSessionStore
from kedro.io import DatasetError

from equidp.system import collection, interrupts

interrupts.end_quietly()  # before imports that take seconds

from equidp.algorithms import ALGORITHMS  # noqa: E402
from equidp.config_loader import EquidpConfigLoader  # noqa: E402
from equidp.errors import EquidpError, credentials_told, refuse_unknown  # noqa: E402
from equidp.hooks.guard import GuardHook  # noqa: E402
from equidp.hooks.print import PrintHook  # noqa: E402
from equidp.hooks.track import TrackHook  # noqa: E402

# A remark to callers, about which a user of this project can do nothing.
warnings.filterwarnings("ignore", message="Option '--pipeline' is deprecated")

# A terminal without ε or Δ shows a question mark; an error here would lose the end of a run.
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")

# A service that closes stderr, or a window without a console, has none, and a progress bar would end the run.
if sys.stderr is None:
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)

PIPELINES = (*ALGORITHMS, "ingestion", "audit", "tune", "ledger", "report", "release", "compare", "__default__")
"""Names that `register_pipelines` registers."""

FILTERED_AWAY = ("Pipeline contains no nodes after", "Pipeline does not contain")
"""Beginnings of Kedro's messages on --tags, --nodes, --from-nodes and the like that name nothing in the pipeline."""

NOT_IN_CATALOG = ("An exception occurred when parsing config", "'load_versions' keys")
"""Beginnings of Kedro's messages on a wrong entry of the catalog."""


class Session(KedroSession):
    """Kedro's session, with a sentence as the error for a mistyped node or entry of the catalog."""

    def run(self, *args: Any, **named: Any) -> Any:
        """As Kedro's method, with clear errors."""
        _refuse_no_pipeline(click.get_current_context(silent=True))
        # before the pipelines are imported, which takes seconds
        if project.PACKAGE_NAME == "equidp":  # a package of the user's own has other pipelines
            refuse_unknown("pipeline", named.get("pipeline_names") or (), PIPELINES)
        try:
            with credentials_told(), collection.postponed():
                return super().run(*args, **named)
        except ValueError as error:
            if not str(error).startswith(FILTERED_AWAY):
                raise
            raise EquidpError(
                f"{str(error).rstrip('.')}: `kedro registry describe <pipeline>` lists its nodes."
            ) from error
        except DatasetError as error:
            if not str(error).startswith(NOT_IN_CATALOG):
                raise
            raise EquidpError(" ".join(str(error).split())) from error


def _refuse_no_pipeline(command: click.Context | None) -> None:
    """Refuse a script's `--pipeline=$name` without a name, which Kedro would take for its default of four trainings."""
    if command is None:
        return
    for option in ("pipeline", "pipelines"):
        given = command.get_parameter_source(option) is ParameterSource.COMMANDLINE
        if given and not command.params[option]:
            raise EquidpError(
                f"--{option}= names no pipeline: give one (`kedro registry list` shows all), or leave the option out "
                "for the demonstration."
            )


HOOKS = (TrackHook(), PrintHook(), GuardHook())
DISABLE_HOOKS_FOR_PLUGINS = ("kedro-mlflow",)  # if it is installed, it would open runs of its own
CONFIG_LOADER_CLASS = EquidpConfigLoader
CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    "config_patterns": {"mlflow": ["mlflow*"], "sweeps": ["sweeps*"]},
    # Without this, --params would drop the other keys of a block if conf/local has any file, and an experiment's name
    # there would drop all other keys of `tracking`: which pipelines open no run, and where artifacts are
    "merge_strategy": {"parameters": "soft", "mlflow": "soft"},
}
SESSION_CLASS = Session
SESSION_STORE_CLASS = BaseSessionStore
