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

interrupts.end_quietly()  # before what takes seconds to import

from equidp.algorithms import ALGORITHMS  # noqa: E402
from equidp.config_loader import EquidpConfigLoader  # noqa: E402
from equidp.errors import EquidpError, refuse_unknown  # noqa: E402
from equidp.hooks.guard import GuardHook  # noqa: E402
from equidp.hooks.print import PrintHook  # noqa: E402
from equidp.hooks.track import TrackHook  # noqa: E402

# A remark to callers, which a user of this project can do nothing about.
warnings.filterwarnings("ignore", message="Option '--pipeline' is deprecated")

# A terminal that has no ε or Δ shows a question mark: it is no reason to lose the end of a run.
if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")

# A service that closes it, or a window without a console, has none: a progress bar would end the run.
if sys.stderr is None:
    sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)

PIPELINES = (*ALGORITHMS, "ingestion", "audit", "tune", "ledger", "report", "release", "compare", "__default__")
"""What `register_pipelines` registers."""

FILTERED_AWAY = ("Pipeline contains no nodes after", "Pipeline does not contain")
"""How Kedro begins to tell that --tags, --nodes, --from-nodes and the like name what is not there."""

NOT_IN_CATALOG = ("An exception occurred when parsing config", "'load_versions' keys")
"""How it begins to tell what is wrong with an entry of the catalog."""


class Session(KedroSession):
    """Kedro's, which tells of a mistyped node or entry of the catalog in a sentence."""

    def run(self, *args: Any, **named: Any) -> Any:
        """As Kedro's."""
        _refuse_no_pipeline(click.get_current_context(silent=True))
        # before the pipelines are imported, which takes seconds
        if project.PACKAGE_NAME == "equidp":  # a package of the user's own has others
            refuse_unknown("pipeline", named.get("pipeline_names") or (), PIPELINES)
        try:
            with collection.postponed():
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
DISABLE_HOOKS_FOR_PLUGINS = ("kedro-mlflow",)  # where it is still installed: it would open runs of its own
CONFIG_LOADER_CLASS = EquidpConfigLoader
CONFIG_LOADER_ARGS = {
    "base_env": "base",
    "default_run_env": "local",
    "config_patterns": {"mlflow": ["mlflow*"], "sweeps": ["sweeps*"]},
    # without this, any file in conf/local would make --params drop the other keys of a block, and an experiment's name
    # there would drop all else of `tracking`: what opens no run, and where artifacts lie
    "merge_strategy": {"parameters": "soft", "mlflow": "soft"},
}
SESSION_CLASS = Session
SESSION_STORE_CLASS = BaseSessionStore
