"""Guard: refuses runs that cannot work or would mislead, keeps other runs from its files, removes untrue results."""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.framework.project import pipelines
from kedro.io import DataCatalog, DatasetError, MemoryDataset, SharedMemoryDataCatalog
from kedro.pipeline import Node, Pipeline

from equidp.algorithms import ALGORITHMS, BASELINE
from equidp.config_loader import EquidpConfigLoader, project_is_at
from equidp.errors import EquidpError, first_line, unknown_name
from equidp.hooks.entries import (
    AUDIT,
    CHOICE,
    RELEASE,
    RELEASED,
    RESULTS,
    TUNE,
    entry_of,
    is_result,
    refuse_lossy,
    refuse_no_folder,
    refuse_shared,
    written_to,
)
from equidp.hooks.handed import Handed, is_ours, refuse_namespace, refuse_rewired
from equidp.hooks.turn import Turn
from equidp.parameters import TUNED, Settings
from equidp.system import collection, interrupts
from equidp.system.extras import EXCEL, not_installed
from equidp.system.files import REFUSALS, locked, refused, remove, settle, storage_error
from equidp.system.notebooks import without_ipython
from equidp.system.workplace import CHECKPOINT_FILE, DRAWN
from equidp.tasks import CLASSIFICATION

LOCK = "run.lock"
"""A file beside the results of ingestion, which every run writes. A run holds it while it is at work."""

logger = logging.getLogger(__name__)


def algorithms_in(pipeline: Pipeline) -> tuple[str, ...]:
    """Return the algorithms that a pipeline trains, in the registry's order."""
    namespaces = {node.namespace for node in pipeline.nodes}
    return tuple(name for name in ALGORITHMS if name in namespaces)


def special(pipeline: Pipeline) -> str | None:
    """Return `tune` or `audit` if a pipeline is one, else None; the setting `algorithm` names their algorithm."""
    namespaces = {node.namespace for node in pipeline.nodes}
    return next((name for name in (TUNE, AUDIT) if name in namespaces), None)


def names_of(run_params: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the pipelines that were asked for."""
    return tuple(run_params.get("pipeline_names") or ["__default__"])


def _refuse_to_lose(pipeline: Pipeline, catalog: DataCatalog, resume: bool) -> None:
    """Refuse to train over a secure model: its ε is spent, and nothing makes the same model again."""
    for model in (name for name in pipeline.all_outputs() if name.endswith(".model")):
        name, said = model.removesuffix(".model"), {}
        statement, workplace = written_to(catalog, f"{name}.privacy"), catalog.load(f"{name}.workplace")
        with suppress(OSError, ValueError):  # without a whole statement there is no release either
            said = json.loads(statement.read_text(encoding="utf-8"))
        # only from these files can a run continue without a new training; a kill may also leave half-written files, or
        # files that a finished run was about to delete
        unfinished = any((workplace / kept).is_file() for kept in (CHECKPOINT_FILE, DRAWN))
        if said.get("secure") and not (resume and unfinished):
            if name == TUNED and not unfinished:
                from equidp.pipelines.tune.nodes import forget_trials

                forget_trials(workplace)  # a kill may have left some trials, which reveal how many there were
            ways = "Finish that run by its command with resume=true in --params, give" if unfinished else "Give"
            raise EquidpError(
                f"{statement.parent} holds the results of a secure run, whose ε is spent, and this run would remove "
                f"them. {ways} this one a place of its own by --params=run_label=…, or move that folder away."
            )


def _refuse_unwritable(pipeline: Pipeline, catalog: DataCatalog) -> None:
    """Refuse folders that cannot be written to: otherwise this shows only after the training, when ε is spent."""
    for name in sorted(pipeline.all_outputs()):
        path = str(entry_of(catalog, name).get("filepath", ""))
        if path and "://" not in path and (error := refused(Path(path).parent)):
            raise storage_error(Path(path), error)


def refusal_in(error: BaseException | None) -> EquidpError | None:
    """Return the refusal that an error is, or that caused it; None if there is none."""
    while error is not None and not isinstance(error, EquidpError):
        error = error.__cause__
    return error


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def refused_by_disk(error: BaseException, catalog: DataCatalog) -> EquidpError | None:
    """Return the refusal if a disk did not take what Kedro saved, or None. On a full disk remove an incomplete file."""
    if isinstance(error, NotADirectoryError) and error.filename:  # the only such error that Kedro does not wrap
        return storage_error(Path(error.filename), error)
    name, cause = str(error).split(":")[0], _first_cause(error)
    # for a versioned dataset's folder Kedro's message is different
    wrapped = "while saving" in str(error) or isinstance(cause, NotADirectoryError)
    saving = isinstance(error, DatasetError) and wrapped and name in catalog
    if not (saving and isinstance(cause, OSError) and cause.errno in REFUSALS):
        return None
    path = written_to(catalog, name)
    if cause.errno in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):
            path.unlink()
    return storage_error(path, cause)


class GuardHook:
    """Refuses a run in one sentence before anything runs, and tells nodes which algorithms run."""

    def __init__(self) -> None:
        self._held, self._saving, self._turn = ExitStack(), ExitStack(), Turn()

    @hook_impl(wrapper=True)
    def after_context_created(self, context: KedroContext) -> Generator[None, Any, Any]:
        """Validate all settings before another hook imports MLflow: a mistyped one ends here, in one sentence."""
        interrupts.keep()
        _refuse_homeless()
        _refuse_undecoded(context.project_path)
        assert isinstance(context.config_loader, EquidpConfigLoader)
        context.config_loader.settings  # noqa: B018 (a wrong setting is refused here)
        with self._turn.prepared():
            self._loader, given = context.config_loader, copy.deepcopy(context.config_loader.runtime_params)
            project_is_at(context.project_path)
            result = yield
            _refuse_changed(context, self._loader, given)
            return result

    @hook_impl
    def after_catalog_created(self, catalog: DataCatalog) -> None:
        """Give nodes the validated settings themselves, so that nothing builds them again."""
        catalog["settings"] = MemoryDataset(self._loader.settings, copy_mode="assign")
        catalog["tables"] = MemoryDataset(partial(load_entry, catalog), copy_mode="assign")

    @hook_impl(wrapper=True)
    def before_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog
    ) -> Generator[None, Any, Any]:
        """Refuse a run that cannot work, and keep other runs from its files and its process."""
        with self._turn.begun(catalog):
            self._prepare(run_params, pipeline, catalog)
            with interrupts.waiting(), without_ipython():
                return (yield)

    def _prepare(self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog) -> None:
        """Refuse a run that cannot work, and say which algorithms run: some need public records from ingestion."""
        settings: Settings = catalog.load("settings")
        refuse_namespace(pipeline.nodes)
        refuse_rewired(pipeline.nodes)
        if kind := special(pipeline):
            _refuse_other(settings, kind)
        names = [*algorithms_in(pipeline), *([settings.audited] if kind else [])]
        # parts that do not go together are refused before anything runs
        algorithms = {name: settings.algorithm(name) for name in names}
        if algorithms:
            from equidp.training.planning import refuse_without_classes
            from equidp.training.preparation import device_of

            device_of(settings.training)  # refuses a device that this machine does not have
            for algorithm in algorithms.values():
                refuse_without_classes(algorithm, settings.data.task)
        _tell_unread(run_params, sorted(algorithms))
        _tell_unreleased(settings, algorithms_in(pipeline))
        catalog["algorithms"] = MemoryDataset(algorithms, copy_mode="assign")
        # if the run is tracked, `TrackHook` replaces this function
        catalog["on_epoch"] = MemoryDataset(lambda algorithm, figures: None, copy_mode="assign")
        _refuse_misleading(run_params, pipeline, catalog)
        refuse_lossy(algorithms_in(pipeline), catalog)
        try:
            for name in pipeline.datasets():  # a wrong entry is refused here, not after hours of training
                catalog.get(name, fallback_to_runtime_pattern=True)
        except DatasetError as error:  # for example of a class that needs another package
            raise EquidpError(" ".join(str(error).split())) from error
        refuse_shared(algorithms_in(pipeline), self._loader.marked_catalog())
        refuse_no_folder(pipeline.inputs(), catalog)
        self._hold(pipeline, catalog)
        _refuse_to_lose(pipeline, catalog, settings.resume)
        _refuse_unwritable(pipeline, catalog)
        collection.settle()
        self._catalog, self._made, self._trained = catalog, pipeline.all_outputs(), algorithms_in(pipeline)
        self._handed = Handed(self._loader.settings, catalog)

    @hook_impl(wrapper=True)
    def before_node_run(self, node: Node, inputs: dict[str, Any]) -> Generator[None, Any, Any]:
        """Refuse inputs that other hooks have replaced after the run was checked."""
        given = yield
        self._handed.refuse_others(node, inputs, given)
        return given

    @hook_impl(wrapper=True)
    def after_node_run(self, node: Node, outputs: dict[str, Any]) -> Generator[None, Any, Any]:
        """Remember the records that a node has made, before other hooks see them."""
        self._handed.made(node, outputs)
        return (yield)

    @hook_impl
    def before_dataset_saved(self, dataset_name: str) -> None:
        """Remove all results of an earlier model before a new one replaces it. An interrupt waits until that is saved.

        Otherwise a run that ends here, or is cut by --to-nodes, would leave the new model beside an earlier run's ε.
        """
        name, _, kind = dataset_name.rpartition(".")
        if kind == "model" and name in (*self._trained, "tuned"):
            self._remove_earlier(name)
        self._saving.enter_context(interrupts.waiting())  # Kedro writes most files under their own names

    @hook_impl
    def after_dataset_saved(self) -> None:
        """The file is complete: let an interrupt that came meanwhile take effect."""
        self._saving.close()

    @hook_impl(wrapper=True)
    def after_pipeline_run(self, pipeline: Pipeline, catalog: DataCatalog) -> Generator[None, Any, Any]:
        """Delete the checkpoints once MLflow has the results, too."""
        from equidp.training import forget

        with closing(self._turn), self._held:
            result = yield
            self._settle(pipeline)
            for name in completed(pipeline):
                forget(catalog.load(f"{name}.workplace"))
            if "tuned.model" in pipeline.all_outputs():
                from equidp.pipelines.tune.nodes import forget_trials

                forget_trials(catalog.load("tuned.workplace"))
            return result

    @hook_impl(wrapper=True)
    def on_pipeline_error(self, error: Exception) -> Generator[None, Any, Any]:
        """Raise a refusal as one sentence, because Kedro wraps all errors of a dataset that saves or loads."""
        self._saving.close()
        refusal = refusal_in(error) or refused_by_disk(error, self._catalog)
        self._held.close()
        with closing(self._turn):
            result = yield  # the other hooks close their runs first
        if refusal is not None:
            raise refusal from None
        return result

    def _settle(self, pipeline: Pipeline) -> None:
        """Make models and their results durable before checkpoints are deleted, or a power cut could lose both.

        ε is spent then, and in secure mode the same model cannot be made again.
        """
        for output in pipeline.all_outputs():
            name, _, kind = output.rpartition(".")
            ours = name in (*self._trained, TUNED) and kind in ("model", *RESULTS, *CHOICE)
            if ours and (path := written_to(self._catalog, output)).is_file():
                settle(path)

    def _remove_earlier(self, name: str) -> None:
        """Remove the results of an earlier run's model, and log it if somebody may miss them."""
        kinds = (*RESULTS, *CHOICE) if name == "tuned" else RESULTS
        said = {stale: written_to(self._catalog, stale) for stale in (f"{name}.{kind}" for kind in kinds)}
        # every run makes a baseline, so only those of its results are missed that this run does not make again
        missed = (path for stale, path in said.items() if name != BASELINE or stale not in self._made)
        if earlier := next((path for path in missed if path.exists()), None):
            logger.info("An earlier run's results in %s are replaced; run_label=… keeps both.", earlier.parent)
        for path in said.values():
            remove(path)

    def _hold(self, pipeline: Pipeline, catalog: DataCatalog) -> None:
        """Keep other runs from this run's files until it ends, because its nodes read them again.

        Otherwise a run could train its baseline by another run's plan, or log another run's model beside its own ε.

        Raises:
            EquidpError: another run of this dataset, seed and run_label is at work.
        """
        for earlier in (self._saving, self._held):  # Ctrl-C in a notebook ends a run without a call of the hooks
            earlier.close()
        if not algorithms_in(pipeline) and not {"provenance", f"finished.{RELEASE}"} & pipeline.all_outputs():
            return
        path = written_to(catalog, "provenance").with_name(LOCK)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = self._held.enter_context(path.open("ab"))
        except OSError as error:
            raise storage_error(path, error) from error
        if not locked(file):
            script = (
                " If this is a script that trains on several ranks, Python runs it again in each of them: put what it "
                'does under if __name__ == "__main__".'
            )
            # Python's name of a script that is run again; in the process that starts others it is another __main__
            again = getattr(sys.modules.get("__mp_main__"), "__name__", "") == "__mp_main__"
            raise EquidpError(
                "Another run of this dataset, seed and run_label is at work, and both would write the same files: wait "
                "for it, or give this one a run_label (--params=run_label=…); `kedro sweep` does so for many runs."
                + (script if again else "")
            )


def _refuse_homeless() -> None:
    """Refuse a user without a home folder, as in some containers: MLflow asks for it, and ends in a traceback."""
    try:
        Path.home()
    except RuntimeError as error:
        raise EquidpError(
            "This user has no home folder: HOME is not set, and the system's list of users has no such user. Set HOME "
            "to a folder, such as HOME=/tmp."
        ) from error


def _refuse_changed(context: KedroContext, loader: EquidpConfigLoader, given: object) -> None:
    """Refuse settings that another hook has changed: the run would not follow them, but MLflow would show them."""
    same = context.config_loader is loader and loader.runtime_params == given
    validated = loader.settings.to_dict()  # further names may belong to nodes of the user's own
    if not same or loader["parameters"] != {**loader["parameters"], **validated}:
        raise EquidpError(
            "A hook has changed the settings after they were validated (after_context_created), and this run would not "
            "follow it: take that hook out, and set them in conf/, by --params or as KedroSession's runtime_params."
        )


def _refuse_undecoded(project: Path) -> None:
    """Refuse a path that is not UTF-8 here: neither MLflow nor, after the training, safetensors could write to it."""
    try:
        utf_8 = len(str(project).encode()) == len(os.fsencode(project))
    except UnicodeEncodeError:
        utf_8 = False
    if not utf_8:
        raise EquidpError(
            "The project's path has letters that are not read as UTF-8 here: set PYTHONUTF8=1 or LC_ALL=C.UTF-8, or "
            "rename the folders."
        )


def evaluated(pipeline: Pipeline) -> tuple[str, ...]:
    """Return the algorithms whose metrics a pipeline makes, even if it is cut by --to-nodes."""
    return tuple(name for name in algorithms_in(pipeline) if f"{name}.metrics" in pipeline.all_outputs())


def completed(pipeline: Pipeline) -> tuple[str, ...]:
    """Return the algorithms of which a pipeline, which may be cut, makes all results that are released or shown.

    For others the checkpoint is kept: without it a secure run's missing figures or release would cost a new training.
    """
    last, made = (RELEASED, RELEASE, "report"), pipeline.all_outputs()
    return tuple(
        name for name in evaluated(pipeline) if name == BASELINE or made >= {f"{name}.{kind}" for kind in last}
    )


def _refuse_other(settings: Settings, pipeline: str) -> None:
    """Refuse to audit or tune a model that `tune` chose, and tasks other than classification."""
    if settings.audited == TUNED:
        raise EquidpError(
            f"algorithm={TUNED} names the model that the pipeline {TUNE} chose, which the pipeline {RELEASE} alone "
            f"takes: name an algorithm for the pipeline {pipeline}, such as algorithm=dpsgd_f."
        )
    if (task := settings.data.task) != CLASSIFICATION:
        what = "gives records wrong classes" if pipeline == AUDIT else "chooses by the accuracy of classes"
        raise EquidpError(f"The pipeline {pipeline} {what}: it is for classification, not for the task {task}.")


def load_entry(catalog: DataCatalog, name: str) -> Any:
    """Load an entry of the catalog that a user's settings name. Raises EquidpError if that cannot be done."""
    if name not in catalog:
        raise unknown_name("entry of the catalog in data.options.catalog", name, catalog.keys())
    try:
        return catalog.load(name)
    except DatasetError as error:
        cause = _first_cause(error)
        if isinstance(cause, ImportError) and EXCEL in str(cause):  # pandas 2 sets no `name` on the error
            raise not_installed(EXCEL, f"data.options.catalog={name}") from error
        reason = first_line(cause).rstrip(".")
        do = "install what is missing" if isinstance(cause, ImportError) else "correct the entry"
        raise EquidpError(f"data.options.catalog={name} cannot be read ({reason}); {do}.") from error


def _tell_unread(run_params: dict[str, Any], trained: Sequence[str]) -> None:
    """Warn of settings on the command line for algorithms that do not run. In a file such settings are no mistake."""
    for name in run_params.get("runtime_params") or {}:
        if name in ALGORITHMS and name not in (BASELINE, *trained):
            logger.warning(
                "--params sets %s, which has no effect: what runs here is %s.",
                name,
                ", ".join(trained) or "no algorithm",
            )


def _tell_unreleased(settings: Settings, trained: Sequence[str]) -> None:
    """Warn if documents are asked for and only the baseline runs; no refusal, because sweeps have baselines, too."""
    if settings.release.documents and trained == (BASELINE,):
        logger.warning(
            "%s trains without differential privacy, so nothing of it may go out and no release/ is written: train a "
            "private algorithm, such as --pipeline=dpsgd, for release.documents=true.",
            BASELINE,
        )


def _refuse_misleading(run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog) -> None:
    """Refuse ways to run a pipeline by which results would be lost, or be taken for another run's."""
    if isinstance(catalog, SharedMemoryDataCatalog):
        raise EquidpError(
            "ParallelRunner is not for this project: its nodes log to one MLflow run, which other processes do not "
            "see. Leave --runner out, or take ThreadRunner, or `kedro sweep` for many runs at once."
        )
    if run_params.get("only_missing_outputs"):
        raise EquidpError(
            "--only-missing-outputs would take files of earlier settings for this run's: leave it out. An interrupted "
            "run goes on by the same command with resume=true added to --params."
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
    whole = sum((pipelines[name] for name in names_of(run_params)), Pipeline([]))
    # also for a user's own pipeline with nodes of ours: a page of old figures would show this run's settings
    ours = {name for node in pipeline.nodes if is_ours(node) for name in node.inputs}
    for name in sorted((whole.all_outputs() | set(filter(is_result, ours))) & pipeline.inputs()):
        raise EquidpError(
            f"{name!r} would be an earlier run's, whatever its settings, and what makes it is left out here: start the "
            "pipeline further up, or run all of it."
        )
