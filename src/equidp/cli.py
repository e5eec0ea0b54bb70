"""Commands that this project adds to `kedro`. Kept light: every `kedro` command imports this module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from equidp.config_loader import EquidpConfigLoader
    from equidp.sweep.project import Project


@click.group(name="equidp")
def cli() -> None:
    """Commands of equidp."""


@cli.command()
@click.argument("name", required=False)
@click.option("--algorithms", help="Names, separated by commas: dpsgd,dpsgd_f.")
@click.option("--datasets", help="Names, separated by commas; by default the project's dataset.")
@click.option("--epsilons", help="Target ε's, separated by commas; by default each dataset's preset decides.")
@click.option("--seeds", help="How many seeds (5 means 0 to 4), or which: 3,7.")
@click.option("--params", default="", help="Any other setting, for all cells: training.epochs=5,privacy.delta=1e-5.")
@click.option("--workers", type=click.IntRange(min=1), help="Cells at once on this machine; by default one per core.")
@click.option("--scheduler", help="Address of a Dask cluster, tcp://…; by default this machine.")
@click.option(
    "--gpus-per-cell", type=click.IntRange(min=0), help="GPUs that each cell holds; by default one where there are any."
)
@click.option("--dashboard", type=int, default=8787, show_default=True, help="Port of the local dashboard; 0: any.")
@click.option("--retries", type=click.IntRange(min=0), default=1, show_default=True, help="Of a failed cell.")
@click.option("--env", "-e", help="Configuration environment, as for `kedro run`.")
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


def project_at(path: Path, env: str | None = None) -> Project:
    """The Kedro project in a folder, as a sweep sees it; `bootstrap_project` has been called for it."""
    from kedro.framework.project import settings

    from equidp.sweep.project import Project

    def configure(runtime_params: Mapping[str, Any]) -> EquidpConfigLoader:
        loader: EquidpConfigLoader = settings.CONFIG_LOADER_CLASS(
            conf_source=str(path / settings.CONF_SOURCE),
            env=env,
            runtime_params=dict(runtime_params),
            **settings.CONFIG_LOADER_ARGS,
        )
        return loader

    def store() -> tuple[str, str]:
        """Made before any cell: many processes at once would damage a new database."""
        from equidp.hooks.store import connect

        config = configure({})
        return config["mlflow"]["server"]["mlflow_tracking_uri"], connect(config)

    return Project(path, env, configure, store)
