"""Record: what is logged of a pipeline, that is its runs and their names, parameters, tags, metrics and artifacts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlflow
from kedro.config import AbstractConfigLoader
from kedro.io import DataCatalog
from kedro.pipeline import Pipeline
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID, MLFLOW_RUN_NOTE

from equidp.accounting.plan import Plan
from equidp.algorithms import ALGORITHMS, BASELINE
from equidp.errors import EquidpError
from equidp.evaluation.noised import flat_released
from equidp.hooks import runs, store
from equidp.hooks.entries import (
    ARTIFACTS,
    AUDIT,
    COMPARISON,
    RELEASE,
    RELEASED,
    SHARED_ARTIFACTS,
    TUNE,
    written_to,
)
from equidp.hooks.guard import algorithms_in, names_of, refusal_in, special
from equidp.mechanism.device import choose_device
from equidp.options import dotted
from equidp.parameters import concerning
from equidp.pipelines.provenance import git_commit
from equidp.reporting.headlines import headline_metrics, overall
from equidp.reporting.statement_sections import delta_text, epsilon_text
from equidp.reporting.titles import METRIC_TITLES, figure_text
from equidp.sweep.cell import ROW
from equidp.system import interrupts
from equidp.tasks import kind_of
from equidp.training.checkpoint import StoppedError

logger = logging.getLogger(__name__)

EXACT = ("test/", "baseline/", "cost_of_privacy/")
"""The beginnings of names of exact figures of records."""

NOT_IN_NAMES = ("dataset", "seed", "algorithm", "raw_dir", "resume", "audit", "report", "release", "tune")
"""Settings that are not listed in a run's name: the name has them in another place, or not at all."""

COMMAND = "kedro_command"
"""Tag that holds the command to run this again."""

LONGEST_NAME = 250
"""The most letters of a run's name in the databases that MLflow can use."""


class RunRecorder:
    """The MLflow runs of one `kedro run`. The store and the experiment of mlflow.yml are made if they do not exist.

    Raises:
        EquidpError: the store cannot be used.
    """

    def __init__(self, config: AbstractConfigLoader) -> None:
        self._parameters: dict[str, Any] = config["parameters"]
        self._given = dotted(config.runtime_params or {}, empty=True)
        self._settings = config["mlflow"]
        self._uri = self._settings["server"]["mlflow_tracking_uri"]
        runs.end_interrupted()  # earlier runs of the same notebook
        active = mlflow.active_run()  # if the user has opened a run, this run is logged to it, in its store
        self._experiment = active.info.experiment_id if active else store.connect(config)

    @property
    def on_epoch(self) -> Callable[[str, Mapping[str, float]], None]:
        """The function that training calls after every epoch, with the algorithm and the epoch's figures."""
        return lambda algorithm, row: runs.log_epoch(algorithm, self._shown(row))

    def _shown(self, row: Mapping[str, float]) -> dict[str, float]:
        """Return the figures of an epoch that MLflow draws; those of groups are in history.parquet and on the page."""
        kept = {name: value for name, value in overall(row).items() if name != "sensitivity"}
        return _named(kept, inside=self._inside)

    @property
    def _inside(self) -> bool:
        """Whether exact figures get a mark: in a secure run that releases figures with noise."""
        privacy = self._parameters["privacy"]
        return privacy["secure"] and privacy["evaluation"]["epsilon"] is not None

    def open(self, run_params: dict[str, Any], pipeline: Pipeline) -> None:
        """Open the run of a single algorithm, or a parent run with a child for each algorithm."""
        names = names_of(run_params)
        runs.begin(mlflow.active_run() is None)
        if set(names) <= set(self._settings["tracking"]["disable_tracking"]["pipelines"]):
            return
        # interrupts wait, because a run that the store has made but not yet confirmed would be lost
        with interrupts.waiting(), self._refusing("Nothing was run."):
            if special(pipeline) != AUDIT:  # an audit's figures have names of their own
                self._refuse_second()
            if mlflow.active_run() is None:
                mlflow.start_run(experiment_id=self._experiment, run_name="+".join(names))
            self._describe(run_params, pipeline)

    def _refuse_second(self) -> None:
        """Refuse a user's active run that holds an earlier run, whose settings MLflow would show beside this model."""
        active = mlflow.active_run()
        if active is not None and COMMAND in MlflowClient().get_run(active.info.run_id).data.tags:
            raise EquidpError(
                "The active MLflow run holds an earlier run of this project, and settings, figures and models of both "
                "would be mixed: end it, or start each in one of its own, as `with mlflow.start_run(nested=True)` does."
            )

    def _describe(self, run_params: dict[str, Any], pipeline: Pipeline) -> None:
        active = mlflow.active_run()
        assert active is not None
        mlflow.set_tags({name: value for name, value in run_params.items() if value})
        mlflow.set_tag(COMMAND, self._command(run_params))
        if owner := special(pipeline):
            self._describe_special(owner, active)
        elif algorithms := algorithms_in(pipeline):
            self._describe_trainings(algorithms, names_of(run_params), active)

    def _describe_special(self, owner: str, active: Run) -> None:
        """Open the single run of a tuning or an audit."""
        audited = self._parameters["audited"]["algorithm"]
        mlflow.set_tags({"mlflow.runName": f"{owner} {self._run_name(audited)}", **self._tags(audited)})
        runs.close_crashed()
        runs.open_run(owner, active.info.run_id)
        settings = self._settings_of(BASELINE, more=("resume", owner, "audited"))
        left_out = varied_names(self._parameters) if owner == TUNE else ()
        runs.log_params(owner, {name: value for name, value in settings.items() if name not in left_out})

    def _describe_trainings(self, algorithms: Sequence[str], names: Sequence[str], active: Run) -> None:
        """Open the run of a single algorithm, or the runs of several algorithms below the pipeline's run."""
        mlflow.set_tags(self._tags(None))
        runs.close_crashed()
        if len(names) == 1 and names[0] in algorithms:
            algorithms = (names[0],)
            runs.open_run(names[0], active.info.run_id)
            mlflow.set_tag("mlflow.runName", self._run_name(names[0], active.data.tags.get(ROW)))
        else:
            mlflow.set_tag("mlflow.runName", self._run_name("+".join(algorithms)))
            for name in algorithms:
                named, parent = self._run_name(name), {MLFLOW_PARENT_RUN_ID: active.info.run_id}
                made = MlflowClient().create_run(active.info.experiment_id, tags=parent, run_name=named)
                runs.open_run(name, made.info.run_id, child=True)
            runs.open_run(COMPARISON, active.info.run_id)
            runs.log_params(COMPARISON, self._settings_of(*algorithms, more=("resume",)))
        for name in algorithms:
            more = ("resume",) if len(algorithms) == 1 else ()
            runs.log_params(name, self._settings_of(name, more=more))
            runs.log_tags(name, self._tags(name))

    def node_done(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Log the outputs of a node that are logged before the end."""
        for name, found in outputs.items():
            owner, _, kind = name.rpartition(".")
            ours = owner in runs.tracked()  # a user's own pipeline may also make a `model`
            match kind:
                case "provenance":
                    for algorithm in runs.tracked():
                        runs.log_tags(algorithm, {"raw_fingerprint": found["raw_fingerprint"]})
                        runs.log_dataset(algorithm, found["dataset"], found["raw_fingerprint"], inputs["raw_folder"])
                case "audit_findings":
                    runs.log_metrics(AUDIT, _bounds(found))
                case "plan" if ours:
                    facts = ("noise_multiplier", "sampling_rate", "steps", "records")
                    runs.log_params(owner, {f"resolved.{fact}": getattr(Plan(**found), fact) for fact in facts})
                case "model" if ours and "trainable_parameters" in found.card:
                    runs.log_params(owner, {"resolved.trainable_parameters": found.card["trainable_parameters"]})
                case "history" if ours:
                    runs.log_history(owner, [self._shown(row) for row in found.to_dict("records")])

    def finish(self, pipeline: Pipeline, catalog: DataCatalog) -> None:
        """Log the results and end the runs.

        Raises:
            EquidpError: the store fails; all results are on disk.
        """
        how = "" if special(pipeline) == AUDIT else " with resume=true, which does not train again,"
        left = (
            f"All results are on disk, but the run in MLflow is incomplete: once the store answers, the same "
            f"command{how} logs them."
        )
        with self._refusing(left, OSError):
            self._log_results(pipeline, catalog)
            runs.catch_up()
            runs.close_runs("FINISHED")
        runs.begin(False)

    def _log_results(self, pipeline: Pipeline, catalog: DataCatalog) -> None:
        made = pipeline.all_outputs()  # if a pipeline is cut by --to-nodes, other files are an earlier run's
        for owner, names in SHARED_ARTIFACTS.items():
            for name in names:
                if name in made and (path := written_to(catalog, name)).is_file():
                    runs.log_artifact(owner, path)
        if "tuned.choice" in made:
            choice = catalog.load("tuned.choice")
            runs.log_metrics(TUNE, {"epsilon": choice["epsilon"]})
            if not choice["exact"]:  # the ε of the validation records, and the noised score by which was chosen
                scored = {"epsilon": choice["validation"]["epsilon"], choice["score"]: choice["value"]}
                runs.log_metrics(TUNE, {f"validation/{name}": value for name, value in scored.items()})
            runs.log_params(TUNE, {f"chosen.{name}": value for name, value in choice["chosen"].items()})
        if "tuned.metrics_release" in made and (released := catalog.load("tuned.metrics_release")):
            runs.log_metrics(TUNE, overall(flat_released(released)))
        _log_model(TUNE, "tuned", made, catalog)
        for algorithm in algorithms_in(pipeline):
            if algorithm in runs.tracked():
                _log_algorithm(algorithm, made, catalog, inside=self._inside)

    def fail(self, error: Exception) -> None:
        """End the runs of a pipeline that failed. A training that was stopped can go on, so its run is not failed.

        A pipeline that is refused before its first epoch leaves no run: a mistyped setting is no experiment.
        """
        refused = refusal_in(error)
        try:
            if refused and not isinstance(refused, StoppedError) and not runs.begun():
                runs.discard()
            else:
                runs.close_runs("KILLED" if isinstance(refused, StoppedError) else "FAILED")
            runs.begin(False)
        except store.FAILURES as failure:
            interrupts.raise_hidden(failure)
            logger.warning("MLflow's store failed (%s): there this run stays open.", store.reason(failure))
            runs.abandon()

    @contextmanager
    def _refusing(self, consequence: str, *others: type[Exception]) -> Iterator[None]:
        """Within this context a failure of the store ends the command with one sentence."""
        failures: tuple[type[Exception], ...] = (*store.FAILURES, *others)
        try:
            yield
        except failures as error:
            refusal = store.refusal(self._uri, error, consequence)
            runs.abandon()
            raise refusal from error

    def _run_name(self, algorithm: str, row: str | None = None) -> str:
        return run_name(algorithm, self._parameters, self._given, row)

    def _command(self, run_params: Mapping[str, Any]) -> str:
        """Return the command to run this again."""
        options = {"pipelines": "pipeline_names", "nodes": "node_names"} | {
            name: name.replace("-", "_") for name in ("from-inputs", "from-nodes", "to-nodes", "tags")
        }
        given = {option: run_params.get(name) for option, name in options.items()}
        words = [f"--{option}={','.join(values)}" for option, values in given.items() if values]
        settings = ",".join(f"{name}={value}" for name, value in self._given.items())
        return " ".join(["kedro run", *words, *([f"--params={settings}"] if settings else [])])

    def _settings_of(self, *algorithms: str, more: tuple[str, ...]) -> dict[str, Any]:
        """Return the settings that concern these algorithms, by dotted name."""
        return dotted(concerning(self._parameters, algorithms, *more), empty=True)

    def _tags(self, algorithm: str | None) -> dict[str, Any]:
        shared = {
            "dataset": self._parameters["dataset"],
            "seed": self._parameters["seed"],
            "device": str(choose_device(self._parameters["training"]["device"])),
            "git_commit": git_commit(),
        }
        if _secure(self._parameters):  # the seed is only for split and first weights, but looks like the noise's
            del shared["seed"]
        given = {"algorithm": algorithm, "run_label": self._parameters["run_label"]}
        return shared | {name: value for name, value in given.items() if value}


def varied_names(parameters: Mapping[str, Any]) -> set[str]:
    """Return the names of the settings that a tuning varies, as they are logged; the chosen values are `chosen.…`."""
    names = dotted(parameters["tune"]["grid"]) | dotted(parameters["tune"]["box"])
    own = f"{parameters['audited']['algorithm']}."
    options = (name.removeprefix(own).removeprefix("options.") for name in names if name.startswith(own))
    return {*names, *(f"audited.options.{option}" for option in options)}


def run_name(algorithm: str, parameters: Mapping[str, Any], given: Mapping[str, Any], row: str | None = None) -> str:
    """Return a run's name in MLflow: algorithm, settings of the command line, dataset, and the seed or `secure`.

    The order matters, because MLflow's list of runs shows only about twenty letters.

    Args:
        algorithm: its name, or several names with `+` between them.
        parameters: the run's validated parameters.
        given: settings of the command line, by dotted name.
        row: in a sweep, the name of the table's row, which says what differs.
    """
    others = ALGORITHMS.keys() - {BASELINE, *algorithm.split("+")}
    shown = {name: value for name, value in given.items() if name.split(".")[0] not in (*others, *NOT_IN_NAMES)}
    tails = {name: _tail(name) for name in shown}
    last = Counter(tails.values())
    short = {name: tail if last[tail] == 1 else name for name, tail in tails.items()}
    words = [f" {short[name]}={value}" for name, value in shown.items()]
    more = "".join(words) if row is None else row.removeprefix(algorithm)
    drawn = "secure" if algorithm != BASELINE else "not private"  # secure mode does not protect the baseline
    drawn = drawn if _secure(parameters) else f"seed={parameters['seed']}"
    name = f"{algorithm}{more} {parameters['dataset']} {drawn}"
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


def _tail(name: str) -> str:
    """Return the last part of a setting's name; two parts for `privacy.evaluation`, whose ε is not the model's."""
    if name.startswith("privacy.evaluation."):
        return name.removeprefix("privacy.")
    return name.removesuffix(".name").rpartition(".")[2]


def _secure(parameters: Mapping[str, Any]) -> bool:
    return bool(parameters.get("privacy", {}).get("secure"))


def _named(figures: Mapping[str, float], *, inside: bool) -> dict[str, float]:
    """Return figures under the names that MLflow shows: exact ones as `nonprivate/…` if `inside` is set."""
    return {f"nonprivate/{name}" if inside and name.startswith(EXACT) else name: of for name, of in figures.items()}


def _log_algorithm(name: str, made: set[str], catalog: DataCatalog, *, inside: bool) -> None:
    metrics = catalog.load(f"{name}.metrics") if f"{name}.metrics" in made else None
    if metrics is not None:
        runs.log_metrics(name, _named(headline_metrics(metrics), inside=inside))
    if f"{name}.privacy" in made:
        privacy = catalog.load(f"{name}.privacy")
        if privacy["private"]:
            figures = {figure: privacy[figure] for figure in ("epsilon", "epsilon_rdp")}
            runs.log_metrics(name, figures | {"epsilon_published": privacy["epsilon_published"]["value"]})
        runs.log_tags(name, _privacy_tags(privacy))
        if metrics is not None:
            runs.log_tags(name, {MLFLOW_RUN_NOTE: _description(privacy, metrics, inside=inside)})
    for kind in ARTIFACTS:
        if f"{name}.{kind}" in made:
            runs.log_artifact(name, written_to(catalog, f"{name}.{kind}"))
    if f"{name}.{RELEASED}" in made and (released := catalog.load(f"{name}.{RELEASED}")):
        runs.log_metrics(name, overall(flat_released(released)))
        runs.log_artifact(name, written_to(catalog, f"{name}.{RELEASED}"))
    _log_model(name, name, made, catalog)


def _log_model(owner: str, name: str, made: set[str], catalog: DataCatalog) -> None:
    """Log the folder that may be published, and the model itself, to load and score with."""
    if f"{name}.{RELEASE}" in made and (folder := written_to(catalog, f"{name}.{RELEASE}")).is_dir():
        runs.log_artifact(owner, folder, RELEASE)  # some runs write no such folder
    if f"{name}.model" in made:
        beside = [f"{name}.{kind}" for kind in ("privacy", "statement") if f"{name}.{kind}" in made]
        runs.log_model(owner, written_to(catalog, f"{name}.model"), [written_to(catalog, one) for one in beside])


def _bounds(findings: Mapping[str, Any]) -> dict[str, float]:
    figures = {"epsilon": findings["claim"]["epsilon"]}
    for attack in ("gradient_canaries", "input_canaries"):
        if found := findings[attack]:
            figures |= {f"audit/{attack}/{name}": found[name] for name in ("epsilon_lower_bound", "epsilon_claimed")}
    return figures


def _privacy_tags(privacy: dict[str, Any]) -> dict[str, str]:
    tags = {"private": str(privacy["private"]).lower()}
    if privacy["private"]:
        sampling = privacy["sampling"].partition(":")[0].lower()
        tags |= {"adjacency": privacy["adjacency"], "sampling": sampling, "secure": str(privacy["secure"]).lower()}
    return tags


def _description(privacy: dict[str, Any], metrics: dict[str, Any], *, inside: bool) -> str:
    """Return a run's description in MLflow, in one line; without exact figures if others are released with noise."""
    task = kind_of(metrics)
    main = task.main
    value = metrics["overall"][main]
    shown = "undefined" if value is None else figure_text(value, 4)
    figure = f"{metrics.get('evaluated_on', 'test')} {METRIC_TITLES[main]} {shown}"
    stays = "; exact figures stay inside, as nonprivate/…."
    if not privacy["private"]:
        return f"Not private{stays}" if inside else f"Not private; {figure}."
    cost = metrics["cost_of_privacy"]["overall"][main]
    mode = "" if privacy["secure"] else ", research mode"
    mode += ", test records decided on steps and have no ε" if privacy.get("test_records_decide") else ""
    epsilon = f"ε = {epsilon_text(privacy['epsilon'])} at δ = {delta_text(privacy['delta'], 2)}{mode}"
    if inside:
        return epsilon + stays
    against = (
        "no cost of privacy, as the baseline diverged"
        if cost is None
        else f"cost of privacy {figure_text(cost, 4, '+')}"
    )
    return f"{epsilon}; {figure}, {against}."
