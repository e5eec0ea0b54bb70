"""Print: the tables of results at the end of a run, and the paths of all files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.framework.hooks import hook_impl
from kedro.io import DataCatalog
from kedro.pipeline import Pipeline
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from equidp.hooks.entries import RELEASE, written_to
from equidp.hooks.guard import evaluated, names_of
from equidp.options import as_typed
from equidp.system.logs import terminal

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)

STAYS_INSIDE = (
    "These figures are exact. They stay inside, like report.html{}; what may go out is in release/. No ε covers "
    "further runs that they decide on."
)
UNLESS = ", unless release.unprotected=test publishes them"
"""Added to `STAYS_INSIDE`, unless figures with noise are released, which exact ones would undo, and unless the figures
are of validation records."""


class PrintHook:
    """Shows the user the results."""

    @hook_impl(tryfirst=True)
    def after_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog) -> None:
        """Print before anything is logged, so that results are shown even if MLflow fails."""
        try:
            print_results(names_of(run_params), pipeline, catalog)
        except OSError as error:  # a log on a full disk, or a closed terminal: logging to MLflow must go on
            logger.warning("The results could not be printed (%s). They are in data/08_reporting.", error)


def print_results(names: Sequence[str], pipeline: Pipeline, catalog: DataCatalog) -> None:
    """Print the tables and paths that the pipeline makes."""
    if "audit_report" in pipeline.all_outputs():
        _print_audit(catalog.load("audit_findings"))
        for name in ("audit_findings", "audit_report"):
            _print_path(name, written_to(catalog, name))
    if "tuned.choice" in pipeline.all_outputs():
        _print_choice(catalog.load("tuned.choice"), catalog.load("tuned.metrics_release"))
    kept = {"tuned.choice", "tuned.statement", "tuned.metrics_release", "tuned.trials", "ledger_figure"}
    for name in sorted(name for name in kept & pipeline.all_outputs() if written_to(catalog, name).exists()):
        _print_path(name, written_to(catalog, name))
    if finished := evaluated(pipeline):
        from equidp.reporting.tables import print_table, results_table

        results = [{name: catalog.load(f"{name}.{kind}") for name in finished} for kind in ("metrics", "privacy")]
        print_table(results_table(*results), Console())
        if secure := [of for of in results[1].values() if of["secure"]]:
            unless = "" if any(of.get("evaluation") or of.get("evaluated_on") for of in secure) else UNLESS
            terminal().print(STAYS_INSIDE.format(unless), highlight=False)
    if tuple(names) == ("ingestion",):
        print_groups(catalog.load("groups"), written_to(catalog, "groups"))
    for name in sorted(pipeline.outputs()):
        if name.endswith(".report") or (name.endswith(f".{RELEASE}") and written_to(catalog, name).exists()):
            _print_path(name, written_to(catalog, name))


def print_groups(groups: pd.DataFrame, path: Path) -> None:
    """Print the groups and their sizes in each part of the split, with a mark or a 0 instead of the file's notes."""
    from equidp.reporting.tables import FEW_MEANS, PARTS, marked

    table = Table(title="Records of each group in each part of the split", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("grouping", "group"):
        table.add_column(column, overflow="fold")
    for part in PARTS:
        table.add_column(part, justify="right", no_wrap=True)
    for row in groups.to_dict("records"):
        name = marked({row["group"]: row["test"]})[row["group"]]
        table.add_row(*(escape(str(value)) for value in (row["grouping"], name, *(row[part] for part in PARTS))))
    terminal().print(table)
    if not groups["evaluable"].all():
        terminal().print(FEW_MEANS)
    _print_path("groups", path)


def _print_path(name: str, path: Path) -> None:
    """Print a path without rich, which would leave out a folder's `[name]`; JupyterLab would also cut underscores."""
    print(f"{name}: {path}")


def _print_choice(choice: dict[str, Any], released: dict[str, Any]) -> None:
    """Print which settings were chosen, by which figure, and the ε of the records in each part."""
    from equidp.reporting.statement_sections import delta_text, epsilon_text

    parts = {"training": choice, "validation": choice["validation"] or {}, "test": released}
    costs = [
        f"{part} part: ε = {epsilon_text(of['epsilon'])} at δ = {delta_text(of['delta'], 2)}"
        for part, of in parts.items()
        if of
    ]
    settings = ", ".join(f"{name}={as_typed(value)}" for name, value in choice["chosen"].items())
    how = "exact: a choice without privacy, for research" if choice["exact"] else "with noise"
    terminal().print(
        f"chosen: {settings} ({choice['score'].replace('_', ' ')} {choice['value']:.3f}, {how}).\n{'; '.join(costs)}.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _print_audit(findings: dict[str, Any]) -> None:
    """Print the bounds beside the claims, one line for each attack."""
    from equidp.audit.run import REMEDY
    from equidp.reporting.statement_sections import delta_text, epsilon_text

    for attack in ("gradient_canaries", "input_canaries"):
        if found := findings[attack]:
            verdict = "consistent with" if found["consistent"] else "REFUTES"
            terminal().print(
                f"{attack.replace('_', ' ')}: ε ≥ {found['epsilon_lower_bound']:.3f} shown, {verdict} "
                f"ε ≤ {epsilon_text(found['epsilon_claimed'], 3)} claimed at δ = {delta_text(found['delta'], 2)}"
            )
            if not found["refutable"]:
                terminal().print(
                    f"  With all {found['guesses']} guesses right it would have shown ε ≥ "
                    f"{found['epsilon_within_reach']:.3f}, so this claim was not tested. {REMEDY}"
                )
