"""What happens around a Kedro run: which MLflow runs exist, what they hold, and what the terminal says at the end."""

from __future__ import annotations

import errno
import logging
import warnings
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.framework.project import pipelines
from kedro.io import DataCatalog, DatasetError, MemoryDataset, SharedMemoryDataCatalog
from kedro.pipeline import Pipeline
from mlflow import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from equidp.algorithms import ALGORITHMS
from equidp.audit.run import REMEDY
from equidp.config_loader import EquidpConfigLoader, project_is_at
from equidp.errors import EquidpError
from equidp.evaluation.metrics import flat_metrics
from equidp.mechanism.device import choose_device
from equidp.pipelines import tracking
from equidp.pipelines.provenance import git_commit
from equidp.reporting.privacy_report import epsilon_text
from equidp.reporting.tables import BASELINE, FEW_MEANS, PARTS, marked, print_table, results_table
from equidp.sweep.cell import ROW
from equidp.system import interrupts
from equidp.system.files import REFUSALS, locked, storage_error
from equidp.system.notebooks import without_ipython
from equidp.training import forget
from equidp.training.checkpoint import StoppedError
from equidp.training.preparation import device_of

# kedro-mlflow defines a model as it is imported, and MLflow asks its author for type hints, past any filter
with warnings.catch_warnings(record=True):
    from kedro_mlflow.framework.hooks.mlflow_hook import mlflow_hook

ARTIFACTS = (
    "metrics", "privacy", "statement", "history", "report", "accuracy_figure", "cost_figure", "clip_norm_figure",
)  # fmt: skip

LOCK = "run.lock"
"""Beside what ingestion writes, which every run does; held while it is at work."""

AUDIT, COMPARISON = "audit", "comparison"
SHARED_ARTIFACTS = {
    AUDIT: ("audit_findings", "audit_bounds", "audit_exposure", "audit_report"),
    COMPARISON: ("comparison.report", "comparison.table"),
}
"""What belongs to no algorithm's run of its own."""
WIDTH = 100
NOT_TOLD = ("dataset", "seed", "algorithm", "raw_dir", "resume", "audit", "report")
"""What the name of a run in MLflow tells in another place, or not at all."""
LONGEST_NAME = 250
"""In the databases that MLflow can be given."""
SHARED_SETTINGS = ("data", "model", "privacy", "training")

logger = logging.getLogger(__name__)


def algorithms_in(pipeline: Pipeline) -> tuple[str, ...]:
    """The algorithms a pipeline trains, in the registry's order."""
    namespaces = {node.namespace for node in pipeline.nodes}
    return tuple(name for name in ALGORITHMS if name in namespaces)


def audits(pipeline: Pipeline) -> bool:
    """Whether a pipeline is an audit."""
    return any(node.namespace == AUDIT for node in pipeline.nodes)


def names_of(run_params: dict[str, Any]) -> tuple[str, ...]:
    """The pipelines that were asked for."""
    return tuple(run_params.get("pipeline_names") or ["__default__"])


def refusal_in(error: BaseException | None) -> EquidpError | None:
    """The refusal that an error is, or was caused by; None where there is none."""
    while error is not None and not isinstance(error, EquidpError):
        error = error.__cause__
    return error


def refused_by_disk(error: BaseException, catalog: DataCatalog) -> EquidpError | None:
    """What a disk's refusal of something that Kedro saves comes to; half a file on a full disk goes."""
    if isinstance(error, NotADirectoryError) and error.filename:  # the one refusal that Kedro does not wrap
        return storage_error(Path(error.filename), error)
    name, cause = str(error).split(":")[0], error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    # of a versioned dataset's folder Kedro says something else
    told = "while saving" in str(error) or isinstance(cause, NotADirectoryError)
    saving = isinstance(error, DatasetError) and told and name in catalog
    if not (saving and isinstance(cause, OSError) and cause.errno in REFUSALS):
        return None
    path = _filepath(catalog, name)
    if cause.errno in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):
            path.unlink()
    return storage_error(path, cause)


def results_of(catalog: DataCatalog, algorithms: Sequence[str], kind: str) -> dict[str, Any]:
    """One kind of output (`metrics`, `privacy`) per algorithm."""
    return {name: catalog.load(f"{name}.{kind}") for name in algorithms}


def terminal() -> Console:
    """Where results are printed: as wide as the terminal, 100 columns where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


class RunHook:
    """Tells nodes which algorithms run, and tells the user what came out."""

    def __init__(self) -> None:
        self._held, self._saving = ExitStack(), ExitStack()

    @hook_impl(wrapper=True)
    def after_context_created(self, context: KedroContext) -> Generator[None, Any, Any]:
        """Validate all settings before anything runs: a mistyped one ends here, in one sentence."""
        interrupts.keep()
        assert isinstance(context.config_loader, EquidpConfigLoader)
        self._settings = context.config_loader.settings
        project_is_at(context.project_path)
        mlflow_yml = context.config_loader["mlflow"]
        self._store = str(mlflow_yml["server"]["mlflow_tracking_uri"])
        tracking.check_store(self._store)
        tracking.end_interrupted()  # in the same notebook; what kedro-mlflow finds active here, it goes on with
        try:
            tracking.make_store(self._store, mlflow_yml["tracking"]["experiment"])
            return (yield)
        except tracking.FAILURES as error:
            raise tracking.refusal(self._store, error, "Nothing was run.") from error

    @hook_impl
    def after_catalog_created(self, catalog: DataCatalog) -> None:
        """Nodes are given the settings themselves: they were validated, and nothing builds them again."""
        catalog["settings"] = MemoryDataset(self._settings, copy_mode="assign")

    @hook_impl(wrapper=True)
    def before_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog
    ) -> Generator[None, Any, Any]:
        """Say which algorithms run, as ingestion sets public records aside for those that need them."""
        names = [*algorithms_in(pipeline), *([self._settings.audited] if audits(pipeline) else [])]
        # parts that cannot hold together are refused before anything runs
        algorithms = {name: self._settings.algorithm(name) for name in names}
        if algorithms:
            device_of(self._settings.training)  # and so is a device that is not here
        _tell_unread(run_params, sorted(algorithms))
        catalog["algorithms"] = MemoryDataset(algorithms, copy_mode="assign")
        _refuse_misleading(run_params, pipeline, catalog)
        self._hold(pipeline, catalog)
        self._catalog, self._made = catalog, pipeline.all_outputs()
        tracking.begin(mlflow.active_run() is None)
        # kedro-mlflow keeps its last run's id: a pipeline without tracking would log to the run before it
        mlflow_hook.run_id = None
        # kedro-mlflow looks at the catalog's entries before factory patterns have made any: make them now
        for name in pipeline.datasets():
            catalog.get(name, fallback_to_runtime_pattern=True)
        try:
            with interrupts.waiting(), without_ipython():
                return (yield)
        except tracking.FAILURES as error:
            refusal = tracking.refusal(self._store, error, "Nothing was run.")
            _abandon_tracking()
            raise refusal from error

    @hook_impl
    def before_dataset_saved(self, dataset_name: str) -> None:
        """Before a new model takes its place, everything that was said of the old one goes.

        A run that ends here, or is cut by --to-nodes, would leave the new model beside an earlier run's ε. An interrupt
        waits from here on.
        """
        name, _, kind = dataset_name.rpartition(".")
        if kind == "model" and name in ALGORITHMS:
            said = {stale: _filepath(self._catalog, stale) for stale in (f"{name}.{kind}" for kind in ARTIFACTS)}
            # a baseline comes with every run, and of its figures no more than a run makes is missed
            missed = (path for stale, path in said.items() if name != BASELINE or stale not in self._made)
            if earlier := next((path for path in missed if path.exists()), None):
                logger.info("An earlier run's results in %s are replaced; run_label=… keeps both.", earlier.parent)
            for path in said.values():
                path.unlink(missing_ok=True)
        self._saving.enter_context(interrupts.waiting())  # Kedro writes most files under their own names

    @hook_impl
    def after_dataset_saved(self) -> None:
        """The file is whole: an interrupt that came meanwhile is due."""
        self._saving.close()

    @hook_impl(wrapper=True)
    def before_node_run(self) -> Generator[None, Any, Any]:
        """A store that fails while kedro-mlflow writes a node's parameters does not end the run."""
        enabled = mlflow_hook._is_mlflow_enabled
        mlflow_hook._is_mlflow_enabled = enabled and not tracking.lost()
        try:
            return (yield)
        except tracking.FAILURES as error:
            tracking.lose(error)
            return []
        finally:
            mlflow_hook._is_mlflow_enabled = enabled

    @hook_impl(wrapper=True)
    def after_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog
    ) -> Generator[None, Any, Any]:
        """Print the table of results and where everything lies; once MLflow has them too, forget the checkpoints."""
        with self._held:
            _print_results(names_of(run_params), pipeline, catalog)
            try:
                result = yield
            except (*tracking.FAILURES, OSError) as error:
                again = "the same command" + (
                    "" if audits(pipeline) else " with resume=true, which does not train again,"
                )
                advice = f"once the store answers, {again} logs them."
                refusal = tracking.refusal(
                    self._store, error, f"All results are on disk, but the run in MLflow is incomplete: {advice}"
                )
                _abandon_tracking()
                raise refusal from error
            tracking.forget_runs()
            for name in _evaluated(pipeline):
                forget(catalog.load(f"{name}.workplace"))
            return result

    @hook_impl(wrapper=True)
    def on_pipeline_error(self, error: Exception) -> Generator[None, Any, Any]:
        """Refused input stays one sentence: Kedro wraps whatever a dataset raises while it saves or loads."""
        self._saving.close()
        result, active = [], mlflow.active_run()
        refusal = refusal_in(error) or refused_by_disk(error, self._catalog)
        self._held.close()
        try:
            result = yield  # the other hooks close their runs first
            if active is not None and isinstance(refusal, StoppedError):
                MlflowClient().set_terminated(active.info.run_id, "KILLED")  # it can go on: it has not failed
            tracking.forget_runs()
        except tracking.FAILURES as failure:
            tracking.lose(failure)
            _abandon_tracking()
        if refusal is not None:
            raise refusal from None
        return result

    def _hold(self, pipeline: Pipeline, catalog: DataCatalog) -> None:
        """Keep the run's files to this run until it ends: what one node writes, the next one reads from there.

        Of two runs at once one would train its baseline by the other's plan, or log the other's model beside its own ε.

        Raises:
            EquidpError: where another run of this dataset, seed and run_label is at work.
        """
        for earlier in (self._saving, self._held):  # Ctrl-C in a notebook ends a run without telling hooks
            earlier.close()
        if not algorithms_in(pipeline) and "provenance" not in pipeline.all_outputs():
            return
        path = _filepath(catalog, "provenance").with_name(LOCK)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._held.enter_context(path.open("ab"))
        except OSError as error:
            raise storage_error(path, error) from error
        if not locked(file):
            raise EquidpError(
                "Another run of this dataset, seed and run_label is at work, and both would write the same files: wait "
                "for it, or give this one a run_label (--params=run_label=…); `kedro sweep` does so for many runs."
            )


class TrackingHook:
    """One MLflow run per trained private model, and a parent where there are several."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Keep the resolved settings: defaults included, they are what is logged."""
        self._parameters = context.config_loader["parameters"]
        self._given = tracking.flatten(context.config_loader.runtime_params or {})

    @hook_impl(trylast=True)
    def before_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog) -> None:
        """After kedro-mlflow opened its run: that is the single algorithm's, or the parent of one child each."""
        active = mlflow.active_run()
        algorithms = algorithms_in(pipeline)
        if active is None or not (algorithms or audits(pipeline)):
            return
        client = MlflowClient()
        names, row = names_of(run_params), active.data.tags.get(ROW)
        mlflow.set_tags(self._tags(self._parameters["audited"]["algorithm"] if audits(pipeline) else None))
        if audits(pipeline):
            tracking.open_run(client, AUDIT, active.info.run_id)
            return
        if len(names) == 1 and names[0] in algorithms:
            algorithms = (names[0],)
            tracking.open_run(client, names[0], active.info.run_id)
            mlflow.set_tag("mlflow.runName", self._run_name(names[0], row))
        else:
            mlflow.set_tag("mlflow.runName", self._run_name("+".join(algorithms)))
            for name in algorithms:
                tracking.open_run(client, name, self._child(client, active, name), child=True)
            tracking.open_run(client, COMPARISON, active.info.run_id)
        for name in algorithms:
            tracking.log_params(name, self._settings(name))
            tracking.log_tags(name, self._tags(name))

    @hook_impl(tryfirst=True)
    def after_pipeline_run(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog) -> None:
        """Log metrics, statements and artifacts of every finished algorithm, and close its run."""
        made = pipeline.all_outputs()  # of a pipeline cut by --to-nodes other files are an earlier run's
        for owner, names in SHARED_ARTIFACTS.items():
            for name in names:
                if name in made:
                    tracking.log_artifact(owner, _filepath(catalog, name))
        for name in algorithms_in(pipeline):
            if name not in tracking.tracked():
                continue
            metrics = catalog.load(f"{name}.metrics") if f"{name}.metrics" in made else None
            if metrics is not None:
                tracking.log_metrics(name, flat_metrics(metrics))
            if f"{name}.privacy" in made:
                privacy = catalog.load(f"{name}.privacy")
                tracking.log_metrics(name, _epsilons(privacy))
                tracking.log_tags(name, _privacy_tags(privacy))
                if metrics is not None:
                    tracking.log_tags(name, {MLFLOW_RUN_NOTE: _told(privacy, metrics)})
            for kind in ARTIFACTS:
                if f"{name}.{kind}" in made:
                    tracking.log_artifact(name, _filepath(catalog, f"{name}.{kind}"))
            if f"{name}.model" in made:
                told = [f"{name}.{kind}" for kind in ("privacy", "statement") if f"{name}.{kind}" in made]
                tracking.log_model(name, _filepath(catalog, f"{name}.model"), [_filepath(catalog, one) for one in told])
        tracking.catch_up()
        tracking.close_runs("FINISHED")

    @hook_impl
    def on_pipeline_error(self, error: Exception, run_params: dict[str, Any], pipeline: Pipeline) -> None:
        """A failed run's children say so."""
        tracking.close_runs("KILLED" if isinstance(refusal_in(error), StoppedError) else "FAILED")

    def _child(self, client: MlflowClient, parent: Any, algorithm: str) -> str:
        run = client.create_run(
            parent.info.experiment_id,
            tags={"mlflow.parentRunId": parent.info.run_id},
            run_name=self._run_name(algorithm),
        )
        return run.info.run_id

    def _run_name(self, algorithm: str, row: str | None = None) -> str:
        """Algorithm, what the command line set (in a sweep what its row is called by), dataset and seed.

        In this order: MLflow's list of runs shows some twenty letters.
        """
        others = ALGORITHMS.keys() - {BASELINE, *algorithm.split("+")}
        given = {name: value for name, value in self._given.items() if name.split(".")[0] not in (*others, *NOT_TOLD)}
        told = [f" {name.rpartition('.')[2]}={value}" for name, value in given.items()]
        more = "".join(told) if row is None else row.removeprefix(algorithm)
        name = f"{algorithm}{more} {self._parameters['dataset']} seed={self._parameters['seed']}"
        return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"

    def _settings(self, algorithm: str) -> dict[str, Any]:
        shared = {name: self._parameters[name] for name in ("dataset", "seed", *SHARED_SETTINGS)}
        own = {f"{name}.options": self._parameters[name]["options"] for name in (BASELINE, algorithm)}
        return tracking.flatten(shared | own)

    def _tags(self, algorithm: str | None) -> dict[str, Any]:
        shared = {
            "dataset": self._parameters["dataset"],
            "seed": self._parameters["seed"],
            "device": str(choose_device(self._parameters["training"]["device"])),
            "git_commit": git_commit(),
        }
        given = {"algorithm": algorithm, "run_label": self._parameters["run_label"]}
        return shared | {name: value for name, value in given.items() if value}


def _evaluated(pipeline: Pipeline) -> tuple[str, ...]:
    """The algorithms whose metrics a pipeline, whole or cut by --to-nodes, makes."""
    return tuple(name for name in algorithms_in(pipeline) if f"{name}.metrics" in pipeline.all_outputs())


def _tell_unread(run_params: dict[str, Any], trained: Sequence[str]) -> None:
    """A setting of an algorithm that does not run is none of this run's in a file; on the command line it is a slip."""
    for name in run_params.get("runtime_params") or {}:
        if name in ALGORITHMS and name not in (BASELINE, *trained):
            logger.warning(
                "--params sets %s, which has no effect: what runs here is %s.",
                name,
                ", ".join(trained) or "no algorithm",
            )


def _refuse_misleading(run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog) -> None:
    """Refuse ways to run a pipeline in which results would be lost, or pass for another run's."""
    if isinstance(catalog, SharedMemoryDataCatalog):
        raise EquidpError(
            "ParallelRunner is not for this project: its nodes log to one MLflow run, which other processes do not "
            "see. Leave --runner out, or take ThreadRunner, or `kedro sweep` for many runs at once."
        )
    if run_params.get("only_missing_outputs"):
        raise EquidpError(
            "--only-missing-outputs would take files of earlier settings for this run's: leave it out. An interrupted "
            "run goes on with --params=resume=true."
        )
    if run_params.get("load_versions"):
        raise EquidpError(
            "--load-versions has nothing to choose from, as no dataset here has versions: leave it out. MLflow keeps "
            "the results of every run."
        )
    for name in sorted(pipeline.inputs()):
        dataset = catalog.get(name)
        if dataset is None or (isinstance(dataset, MemoryDataset) and not dataset.exists()):
            raise EquidpError(
                f"{name!r} is not kept between runs, and what makes it is left out here: start the pipeline further "
                "up, or run all of it."
            )
    _refuse_lossy_catalog(pipeline, catalog)
    whole = sum((pipelines[name] for name in names_of(run_params)), Pipeline([]))
    for name in sorted(whole.all_outputs() & pipeline.inputs()):
        raise EquidpError(
            f"{name!r} would be an earlier run's, whatever its settings, and what makes it is left out here: start the "
            "pipeline further up, or run all of it."
        )


def _refuse_lossy_catalog(pipeline: Pipeline, catalog: DataCatalog) -> None:
    """Refuse a catalog of the user's own in which results are not files each: they are read again, and logged."""
    kinds = [f"{algorithm}.{kind}" for algorithm in algorithms_in(pipeline) for kind in ("model", *ARTIFACTS)]
    places: dict[Path, str] = {}
    for name in [*kinds, *(name for names in SHARED_ARTIFACTS.values() for name in names)]:
        dataset = catalog.get(name)
        local = getattr(dataset, "_protocol", "file") == "file" and hasattr(dataset, "_filepath")
        if not local or getattr(dataset, "_version", None) is not None:
            raise EquidpError(
                f"{name!r} is no plain local file in the catalog: give it a filepath on this machine, without "
                "`versioned`, as it is read again and logged to MLflow (run_label=… keeps the results of several runs)."
            )
        path = _filepath(catalog, name)
        if (other := places.setdefault(path, name)) != name:
            raise EquidpError(
                f"{other!r} and {name!r} are one file in the catalog, {path}: the second would replace the first. "
                "Write {algorithm} into the path."
            )


def _abandon_tracking() -> None:
    """No run is left open: MLflow would end it as finished when the process exits."""
    with suppress(*tracking.FAILURES):
        mlflow.end_run("FAILED")
    tracking.forget_runs()


def _print_results(names: Sequence[str], pipeline: Pipeline, catalog: DataCatalog) -> None:
    """Tables and paths, whichever the pipeline has."""
    if "audit_report" in pipeline.all_outputs():
        _print_audit(catalog.load("audit_findings"))
        for name in ("audit_findings", "audit_report"):
            terminal().print(f"{name}: {_filepath(catalog, name)}", soft_wrap=True, highlight=False)
    if finished := _evaluated(pipeline):
        print_table(
            results_table(results_of(catalog, finished, "metrics"), results_of(catalog, finished, "privacy")),
            Console(),
        )
    if tuple(names) == ("ingestion",):
        _print_groups(catalog.load("groups"), _filepath(catalog, "groups"))
    for name in sorted(pipeline.outputs()):
        if name.endswith(".report"):
            terminal().print(f"{name}: {_filepath(catalog, name)}", soft_wrap=True, highlight=False)


def _print_groups(groups: pd.DataFrame, path: Path) -> None:
    """The groups and their sizes in each part of the split; what a note in the file says, a mark and a 0 say here."""
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
        terminal().print(FEW_MEANS, highlight=False)
    terminal().print(f"groups: {path}", soft_wrap=True, highlight=False)


def _print_audit(findings: dict[str, Any]) -> None:
    """Bounds beside claims, one line per attack."""
    for attack in ("gradient_canaries", "input_canaries"):
        if found := findings[attack]:
            verdict = "consistent with" if found["consistent"] else "REFUTES"
            terminal().print(
                f"{attack.replace('_', ' ')}: ε ≥ {found['epsilon_lower_bound']:.3f} shown, {verdict} "
                f"ε ≤ {epsilon_text(found['epsilon_claimed'], 3)} claimed at δ = {found['delta']:.2g}",
                highlight=False,
            )
            if not found["refutable"]:
                terminal().print(
                    f"  With all {found['guesses']} guesses right it would have shown ε ≥ "
                    f"{found['epsilon_within_reach']:.3f}, so this claim was not put to the test. {REMEDY}",
                    highlight=False,
                )


def _epsilons(privacy: dict[str, Any]) -> dict[str, float]:
    if not privacy["private"]:
        return {}
    figures = {name: privacy[name] for name in ("epsilon", "epsilon_rdp", "epsilon_pld", "delta")}
    return figures | {"epsilon_published": privacy["epsilon_published"]["value"]}


def _privacy_tags(privacy: dict[str, Any]) -> dict[str, str]:
    tags = {"private": str(privacy["private"]).lower()}
    if privacy["private"]:
        sampling = privacy["sampling"].partition(":")[0].lower()
        tags |= {"adjacency": privacy["adjacency"], "sampling": sampling, "secure": str(privacy["secure"]).lower()}
    return tags


def _told(privacy: dict[str, Any], metrics: dict[str, Any]) -> str:
    """A run's description in MLflow, in one line."""
    accuracy = f"{metrics.get('evaluated_on', 'test')} accuracy {metrics['overall']['accuracy']:.4f}"
    if not privacy["private"]:
        return f"Not private; {accuracy}."
    cost = metrics["cost_of_privacy"]["overall"]["accuracy"]
    epsilon = f"ε = {epsilon_text(privacy['epsilon'])} at δ = {privacy['delta']:.2g}"
    against = "no cost of privacy, as the baseline diverged" if cost is None else f"{cost:+.4f} against the baseline"
    return f"{epsilon}; {accuracy}, {against}."


def _filepath(catalog: DataCatalog, name: str) -> Path:
    """Where a dataset of the catalog is written."""
    return Path(str(getattr(catalog.get(name), "_filepath")))  # noqa: B009 (Kedro's file datasets share the name)
