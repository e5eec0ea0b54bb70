"""Commands that this project adds to `kedro`. Kept light: every `kedro` command imports this module."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml
from kedro.framework.cli.project import run as kedro_run
from omegaconf.errors import OmegaConfBaseException

from equidp.typed import keep_as_typed

if TYPE_CHECKING:
    from equidp.config_loader import EquidpConfigLoader
    from equidp.sweep.project import Project


LISTS = frozenset({
    "algorithms", "datasets", "epsilons", "seeds", "params", "runner_params", "pipelines", "tags", "node_names",
    "from_nodes", "to_nodes", "from_inputs", "to_outputs", "load_versions", "namespaces",
})  # fmt: skip
"""Options whose values are lists with commas."""

PORT = click.IntRange(min=0, max=65535)

IN_ENVIRONMENT = click.option(
    "--env", "-e", envvar="KEDRO_ENV", help="Configuration environment, as for `kedro run`; else KEDRO_ENV's."
)


class Repeatable(click.Command):
    """A command whose options may be repeated: lists are joined, and two different values of another are refused.

    click by itself takes the last value, and the earlier ones would be lost.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's method, with repeated options joined or refused."""
        rest, given = self._gathered(args)
        for option, values in given.items():
            if option.name not in LISTS and len(set(values)) > 1:
                raise click.UsageError(f"{option.opts[0]} is given twice, as {' and as '.join(values)}: give one.", ctx)
        joined = {option: ",".join(values) if option.name in LISTS else values[-1] for option, values in given.items()}
        typed = next((text for option, text in joined.items() if option.name == "params"), "")
        try:
            found = super().parse_args(ctx, [*(f"{max(o.opts, key=len)}={text}" for o, text in joined.items()), *rest])
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            said = " ".join(str(getattr(error, "problem", None) or error).split(" full_key:")[0].split())
            raise click.UsageError(
                f"--params={typed!r} does not read as settings ({said}). A quote, bracket or ${{ is to be closed; a "
                "list is written with +, as 16+8.",
                ctx,
            ) from error
        settings: dict[str, str] = {}
        for item in typed.split(","):
            name, _, value = (part.strip() for part in item.partition("="))
            if settings.setdefault(name, value) != value:
                both = f"{settings[name]} and as {value}"
                raise click.UsageError(f"--params gives {name} twice, as {both}: give one.", ctx)
        if isinstance(params := ctx.params.get("params"), dict):
            keep_as_typed(settings, params)
        return found

    def _gathered(self, args: list[str]) -> tuple[list[str], dict[click.Option, list[str]]]:
        """Return the rest of the command line, and the values of each option."""
        known = {
            name: option for option in self.params if isinstance(option, click.Option) for name in option.opts
            if not (option.is_flag or option.count)
        }  # fmt: skip
        rest, given, left = [], dict[click.Option, list[str]](), list(args)
        while left and left[0] != "--":
            name, sign, value = left.pop(0).partition("=")
            if name not in known or not (sign or left):
                rest.append(name + sign + value)
                continue
            given.setdefault(known[name], []).append(value if sign else left.pop(0))
        return [*rest, *left], given


@click.group(name="equidp")
def cli() -> None:
    """Commands of equidp."""


run = Repeatable(kedro_run.name, callback=kedro_run.callback, params=kedro_run.params, help=kedro_run.help)
cli.add_command(run)


@cli.command(cls=Repeatable)
@click.argument("name", required=False)
@click.option("--algorithms", help="Names, separated by commas: dpsgd,dpsgd_f. Of a sweep of parts: which to run.")
@click.option("--datasets", help="Likewise; by default the project's dataset.")
@click.option("--epsilons", help="Target ε's, separated by commas; by default each dataset's preset decides.")
@click.option("--seeds", help="How many seeds (5 means 0 to 4), or which: 3,7.")
@click.option("--reference", help="The algorithm to compare the others with, by seed; by default dpsgd.")
@click.option("--params", default="", help="Any other setting, for all cells: training.epochs=5,privacy.delta=1e-5.")
@click.option("--workers", type=click.IntRange(min=1), help="Cells at once on this machine; by default one per core.")
@click.option("--scheduler", help="Address of a Dask cluster, tcp://…; by default this machine.")
@click.option(
    "--gpus-per-cell", type=click.IntRange(min=0), help="GPUs that each cell holds; by default one where there are any."
)
@click.option(
    "--dashboard", type=PORT, default=8787, show_default=True, help="Port of the local dashboard; 0: any free one."
)
@click.option(
    "--retries", type=click.IntRange(min=0), default=1, show_default=True, help="How often a failed cell is retried."
)
@IN_ENVIRONMENT
@click.option("--dry-run", is_flag=True, help="Say what would run, and stop.")
@click.option("--list", "listing", is_flag=True, help="Show the named sweeps of conf/base/sweeps.yml, and stop.")
@click.pass_obj
def sweep(metadata: Any, name: str | None, env: str | None, **options: Any) -> None:
    """Run many cells: a named sweep, or algorithms × datasets × ε × seeds.

    Every cell is one `kedro run` with its own MLflow run. Cells that are finished are skipped, so calling a sweep again
    completes what is missing.

    \b
    kedro sweep demo
    kedro sweep --algorithms dpsgd,dpsgd_f --datasets adult,dutch --epsilons 1,3,8 --seeds 5
    """
    from equidp.sweep.command import run_command

    run_command(project_at(metadata.project_path, env), name, **options)


@cli.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Where the pages are served.")
@click.option("--port", type=PORT, default=5000, show_default=True)
@IN_ENVIRONMENT
@click.pass_obj
def ui(metadata: Any, env: str | None, host: str, port: int) -> None:
    """Show the runs in MLflow's pages, until Ctrl-C."""
    from equidp.hooks.ui import serve

    raise SystemExit(serve(*project_at(metadata.project_path, env).store(), host, port))


@cli.command("new-dataset")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--catalog", default="", help="Entry of the Kedro catalog instead of a file, such as an Excel sheet.")
@click.option("--sql", default="", help="Query of an SQLite file.")
@click.option("--name", default="", help="Name of the dataset; by default the file's, or the entry's.")
@click.option("--label", multiple=True, help="Column of the label; by default the last one. May be repeated.")
@click.option("--unit", default="", help="Column with each person's id; without it each row is protected by itself.")
@IN_ENVIRONMENT
@click.pass_obj
def new_dataset(metadata: Any, **given: Any) -> None:
    """Draft a preset for a table from its columns' names and types; called again, check it.

    \b
    kedro new-dataset data/01_raw/clinic/visits.csv --label readmitted
    kedro new-dataset --catalog visits_sheet --label readmitted
    """
    from equidp.new_dataset import run_command

    run_command(metadata.project_path, loader_at, **given)


def loader_at(path: Path, env: str | None, runtime_params: Mapping[str, Any] | None = None) -> EquidpConfigLoader:
    """The configuration of the project in a folder."""
    from kedro.framework.project import settings

    loader: EquidpConfigLoader = settings.CONFIG_LOADER_CLASS(
        conf_source=str(path / settings.CONF_SOURCE),
        env=env,
        runtime_params=dict(runtime_params or {}),
        **settings.CONFIG_LOADER_ARGS,
    )
    return loader


def project_at(path: Path, env: str | None = None) -> Project:
    """The Kedro project in a folder, as a sweep sees it; `bootstrap_project` has been called for it."""
    from equidp.sweep.project import Project

    configure = partial(loader_at, path, env)

    def store() -> tuple[str, str]:
        """Made before any cell: many processes at once would damage a new database."""
        from equidp.hooks.store import connect

        config = configure()
        return config["mlflow"]["server"]["mlflow_tracking_uri"], connect(config)

    return Project(path, env, configure, store)
