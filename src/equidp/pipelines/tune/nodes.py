"""Nodes of tuning."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equidp.accounting.events import Event
from equidp.data.records import Records, Split
from equidp.errors import EquidpError
from equidp.evaluation.histogram import Noised, noised_histogram
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.noise import derived_seed
from equidp.models.weights import Weights, load_weights, network_of, save_weights
from equidp.options import as_typed, dotted
from equidp.parameters import Settings, concerning, varied
from equidp.pipelines.evaluation.nodes import release_figures
from equidp.pipelines.ingestion.nodes import divide
from equidp.pipelines.provenance import provenance_facts
from equidp.pipelines.training.nodes import group_arrays, model_card, score_test, warn_of_weak_promises
from equidp.reporting.statement_sections import epsilon_text
from equidp.reporting.tuning_page import tuning_page
from equidp.sweep.apart import Apart, alone
from equidp.system.files import remove_kept, settle, storage_error, write_private
from equidp.system.logs import held_back
from equidp.system.workplace import DRAWN
from equidp.training import TrainingRequest, predict, train_model
from equidp.training.charging import CHARGED, enter, enter_more, of_law, repeated
from equidp.training.checkpoint import StoppedError
from equidp.training.conclusion import HISTOGRAM
from equidp.training.digests import fingerprint
from equidp.training.interrupted import EVERY, beyond_plan, of_any_trial
from equidp.training.journal import OtherSettingsError
from equidp.training.preparation import random_source
from equidp.training.statement import figures_entry
from equidp.training.tuning import Point, Tuning, plan_tuning, score, tuned_statement

TRIAL = "nonprivate_trial.json"
"""The file of a trial's result. It stays inside, like the file of what was drawn before the first trial."""

LOCK, LOG = "nonprivate_trials.lock", "nonprivate_log"
"""LOCK is held until every process of a tuning has ended. LOG: what a trial in a process of its own prints."""

FOLDER = "nonprivate_trial"
"""With a trial's number: the trial's own folder."""

BEGUN = "nonprivate_begun"
"""With a trial's number: the mark that the trial's folder was made."""

MODEL = "model.safetensors"

logger = logging.getLogger(__name__)


def choose_model(
    features: Records,
    workplace: Path,
    settings: Settings,
    algorithms: Mapping[str, Algorithm],
    ledgers: Path,
    provenance: Mapping[str, Any],
) -> tuple[Weights, dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the model that private selection chose, privacy.json, tune.json, figures of the test part if asked for.

    Returns:
        Results of the chosen trial alone; all trials' folders are removed at the end of the run. The last value must
        stay inside: all trials if the choice is exact or `training.diagnostics` asks for it, else an empty dict.

    Raises:
        EquidpError: settings that cannot be tuned, or an unfinished tuning that is not continued.
    """
    held = settings.data.model_copy(update={"evaluate_on": "validation"})
    parts = divide(features, held, settings.seed, algorithms.values())
    tuning, drawn_by = plan_tuning(parts.train, settings), parts.train.membership
    warn_of_weak_promises(settings.audited, tuning.plan, parts.train, settings, tuned=not settings.tune.exact)
    # only one histogram of the test part is drawn, so no law of trials is needed, and less noise
    single = settings.privacy.model_copy(update=dict.fromkeys(("trials_law", "trials_mean", "trials_shape")))
    once = dataclasses.replace(settings, privacy=single)
    _announce(tuning, once)
    if (workplace / DRAWN).is_file() and not settings.resume:
        raise EquidpError(
            f"An unfinished tuning lies in {workplace}: its trials count. Go on with resume=true, or give this one a "
            "run_label, and add up the ε of both."
        )
    facts = _facts(tuning, parts, settings)
    _kept(workplace, facts)  # another tuning is refused before anything is charged
    due = _due(tuning)
    entered = partial(enter, ledgers, workplace, once, provenance, drawn_by, due, algorithm=settings.audited)
    run = entered()
    with alone(workplace / LOCK) as lock, nullcontext() if _tells(settings) else _unnumbered(workplace):
        drawn = _drawn(workplace, facts, tuning, settings)
        scores, more = _every_score(drawn, tuning, parts, workplace, settings, ledgers, run, lock)
        chosen = scores.index(max(scores))  # the first of equal ones
        found = json.loads((_folder(workplace, chosen) / TRIAL).read_text(encoding="utf-8"))
        weights, point = load_weights(_folder(workplace, chosen) / MODEL), tuning.points[drawn[chosen]]
    entered(run=run)
    if more:
        enter_more(ledgers, settings, run, more)
        logger.warning(
            "A trial that was interrupted took steps again: ε is %s instead of %s.",
            epsilon_text(tuning.epsilon(more)),
            epsilon_text(tuning.epsilon()),
        )
    privacy = tuned_statement(found["privacy"], tuning, settings, point, more)
    test = divide(features, settings.data, settings.seed, algorithms.values())
    figures = release_figures(
        score_test(weights, test.test, settings), weights, test.test, parts.train, workplace, once, algorithm="tuned"
    )
    privacy |= figures_entry(once.privacy, once.data)
    choice = _choice(privacy, tuning, settings, found["histogram"], scores[chosen])
    return weights, privacy, choice, figures, _every_trial(tuning, drawn, scores, settings)


def _due(tuning: Tuning) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what the ledger is charged before the first trial, by (what, part)."""
    due = {("tuning", "train"): {"events": tuning.reference} | of_law(tuning.plan.trials)}
    if tuning.score_event is not None:
        due["scores", "validation"] = {"events": (tuning.score_event,)} | of_law(tuning.law)
    return due


def _choice(
    privacy: Mapping[str, Any], tuning: Tuning, settings: Settings, histogram: dict[str, Any], value: float
) -> dict[str, Any]:
    """tune.json: what was chosen, by which figure, and at what cost."""
    return {
        "algorithm": settings.audited,
        "secure": settings.privacy.secure,
        "epsilon": privacy["epsilon"],
        "epsilon_declared": tuning.epsilon(),  # before the first trial; below epsilon if a trial repeated steps
        "delta": privacy["delta"],
        "trials": tuning.plan.trials.to_dict(),
        **privacy["tuning"],
        "histogram": None if settings.tune.exact else histogram,
        "value": value,
    }


def _folder(workplace: Path, number: int) -> Path:
    return workplace / f"{FOLDER}-{number}"


def _every_score(
    drawn: list[int], tuning: Tuning, parts: Split, workplace: Path, settings: Settings, ledgers: Path, run: str,
    lock: int,
) -> tuple[list[float], list[Event]]:  # fmt: skip
    """Train and score every trial, several at a time; return the scores, and what covers any charge beyond a plan."""
    beyond: dict[int, list[Event]] = {}
    scores: list[float] = []

    def before(number: int) -> tuple[int, Point, Split, Path, Tuning, Settings]:
        """Return a trial's arguments. Steps that it may repeat after its process was killed are charged before that."""
        folder, point = _folder(workplace, number), tuning.points[drawn[number]]
        if settings.privacy.secure and folder.exists() and not (folder / TRIAL).is_file():
            beyond[number] = list(repeated(folder, point.settings.algorithm(settings.audited), point.plan))
            due = of_any_trial(beyond.values(), tuning, settings.audited)
            enter_more(ledgers, settings, run, due, ahead=True)
        _begin(workplace, number)
        return number, point, parts, folder, tuning, settings

    if settings.tune.workers > 1:
        apart = Apart(
            _trial_apart,
            preload=__name__,
            before=lambda number: (*before(number), torch.get_num_threads()),
            lock=lock,
            log=lambda number: workplace / f"{LOG}-{number}.log",
            workers=settings.tune.workers,
        )
        with _told_to_go_on(workplace):
            apart.run(number for number in range(len(drawn)) if not (_folder(workplace, number) / TRIAL).is_file())
    for number in range(len(drawn)):
        with nullcontext() if _tells(settings) else held_back("equidp", below=logging.CRITICAL):
            found = _trial(*before(number))  # a finished trial's kept result
        beyond[number] = [Event.from_dict(event) for event in found["beyond_plan"]]
        scores.append(found["score"])
    return scores, of_any_trial(beyond.values(), tuning, settings.audited)


def _begin(workplace: Path, number: int) -> None:
    """Make a trial's folder, and a mark that it was made.

    Raises:
        EquidpError: the folder was made but is gone: the ledger counts what the trial had shown, but ε would not.
    """
    folder, mark = _folder(workplace, number), workplace / f"{BEGUN}-{number}"
    if mark.exists() and not folder.exists():
        raise EquidpError(
            f"The unfinished tuning in {workplace} has lost the folder of a trial, and ε would not count what that "
            "trial had shown: put it back; or give this one a run_label, and add up the ε of both."
        )
    if not mark.exists():
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error(folder, error) from error
        write_private(mark, b"")


def _tells(settings: Settings) -> bool:
    """Whether trials print. Prints show how many trials, K, there are, and ε holds only while nobody knows K.

    With a seed K is no secret, and a choice without privacy has no ε.
    """
    return settings.tune.exact or not settings.privacy.secure


def _stopped(workplace: Path, signum: int) -> StoppedError:
    return StoppedError(
        f"Stopped; what the tuning has done is kept in {workplace}. Go on by the same command with resume=true "
        "added to --params.",
        signum,
    )


@contextmanager
def _told_to_go_on(workplace: Path) -> Iterator[None]:
    """Turn Ctrl-C or SIGTERM while other processes train into a sentence, as where this process trains."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        raise _stopped(workplace, signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM) from None


@contextmanager
def _unnumbered(workplace: Path) -> Iterator[None]:
    """Report an error that ends a trial, and so the tuning, without the trial's number or how far it had come."""
    try:
        yield
    except StoppedError as stopped:
        raise _stopped(workplace, stopped.exit_code - 128) from None
    except EquidpError as error:
        raise EquidpError(re.sub(rf"({FOLDER}|{LOG}|{BEGUN})-\d+", r"\1", error.message)) from None


def _every_trial(tuning: Tuning, drawn: list[int], scores: list[float], settings: Settings) -> dict[str, Any]:
    if not (settings.tune.exact or settings.training.diagnostics):
        return {}
    pairs = zip(drawn, scores, strict=True)
    return {"trials": [{"settings": dict(tuning.points[place].changes), "score": score} for place, score in pairs]}


def write_page(
    choice: dict[str, Any],
    privacy: dict[str, Any],
    released: dict[str, Any],
    trials: dict[str, Any],
    provenance: dict[str, Any],
    settings: Settings,
) -> str:
    """The HTML page of the tuning, one self-contained file."""
    shown = _chosen_settings(settings, choice["chosen"]) | {"tune": settings.tune.model_dump(mode="json")}
    title = f"Tuning of {settings.audited} on {settings.dataset}"
    return tuning_page(title, choice, privacy, released, trials, shown, provenance_facts(provenance))


def _chosen_settings(settings: Settings, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the chosen model. Those that the grid varies are marked as chosen."""
    name = settings.audited
    shown = dotted(concerning(varied(settings, chosen).to_dict(), [name]), empty=True)
    for setting in chosen:
        block, _, rest = setting.partition(".")
        place = setting if setting in shown else f"{block}.options.{rest}"
        shown[place] = f"{as_typed(shown.get(place, chosen[setting]))} (chosen)"
    return shown


def forget_trials(workplace: Path) -> None:
    """Remove what a finished tuning drew and trained, because only the chosen trial may become known."""
    for name in (CHARGED, DRAWN, HISTOGRAM, LOCK):  # CHARGED first: files left by a break must not look charged
        remove_kept(workplace / name)
    for log in workplace.glob(f"{LOG}-*.log"):
        log.unlink()
    _forget_folders(workplace)


def _forget_folders(workplace: Path) -> None:
    for mark in workplace.glob(f"{BEGUN}-*"):  # marks first: a mark without its folder would look like a lost trial
        mark.unlink()
    for folder in workplace.glob(f"{FOLDER}-*"):
        shutil.rmtree(folder)


def _announce(tuning: Tuning, settings: Settings) -> None:
    """What everything will cost, before the first trial."""
    trials, unit = tuning.plan.trials, settings.privacy.unit
    if tuning.score_event is None:
        logger.warning(
            "tune.exact: a choice without privacy, for research. All %d combinations are trained, and the exact figure "
            "chooses: for a %s of the training part they cost ε = %s at δ = %g together; those of the validation part "
            "have no guarantee.",
            len(tuning.points),
            unit,
            epsilon_text(tuning.epsilon()),
            tuning.plan.delta,
        )
        _announce_figures(settings)
        return
    logger.info(
        "tune: %d combinations, a number of trials drawn from the %s law of mean %g. For a %s of the training part "
        "choice and model cost ε = %s at δ = %g; for one of the validation part choice and scores cost ε = %s.",
        len(tuning.points),
        trials.law,
        trials.mean,
        unit,
        epsilon_text(tuning.epsilon()),
        tuning.plan.delta,
        epsilon_text(tuning.score_epsilon),
    )
    if settings.tune.workers > 1:
        logger.info("tune: trials are trained by %d processes, which print into the workplace.", settings.tune.workers)
    elif not _tells(settings):
        logger.info("tune: trials print nothing, as their number is not told.")
    _announce_figures(settings)


def _announce_figures(settings: Settings) -> None:
    if figures := figures_entry(settings.privacy, settings.data).get("evaluation"):
        cost = epsilon_text(figures["epsilon"])
        logger.info("tune: for a %s of the test part released figures cost ε = %s.", settings.privacy.unit, cost)


def _facts(tuning: Tuning, parts: Split, settings: Settings) -> dict[str, Any]:
    """Return facts that must be the same for an unfinished tuning to be continued."""
    chosen = settings.to_dict() | {"resume": None, "raw_dir": None}
    chosen["tune"] = {**chosen["tune"], "workers": None}
    asked = hashlib.sha256(json.dumps(chosen, sort_keys=True, default=str).encode())
    asked.update(fingerprint(parts.train).encode() + fingerprint(parts.test).encode())
    # a finished trial is not trained again, so the statement must give the noise that it had
    return {"asked": asked.hexdigest(), "noise": [f"{of.plan.noise_multiplier:.9g}" for of in tuning.points]}


def _kept(workplace: Path, facts: Mapping[str, Any]) -> list[int] | None:
    """Return which point each trial of the unfinished tuning in this folder takes; None if there is no such tuning.

    Raises:
        EquidpError: it was begun with other `facts`.
    """
    path = workplace / DRAWN
    if not path.is_file():
        return None
    kept = json.loads(path.read_text(encoding="utf-8"))
    if kept["asked"] != facts["asked"] or kept.get("noise", facts["noise"]) != facts["noise"]:
        raise EquidpError(
            f"The unfinished tuning in {workplace} has another run_label, other settings, other records or, as another "
            "version of equidp began it, another noise: go on by its own command, with resume=true and that version."
        )
    return list(kept["points"])


def _drawn(workplace: Path, facts: Mapping[str, Any], tuning: Tuning, settings: Settings) -> list[int]:
    """Return which point each trial takes. It is drawn once, and on disk before the first trial begins.

    Raises:
        EquidpError: another unfinished tuning lies there.
    """
    if (kept := _kept(workplace, facts)) is not None:
        return kept
    points = list(range(len(tuning.points)))
    if tuning.score_event is not None:
        random = random_source(settings.privacy, derived_seed(settings.seed, "tune/drawn"))
        count = tuning.plan.trials.draw(float(random.uniform(1)))
        points = (random.uniform(count).numpy() * len(tuning.points)).astype(int).tolist()
    _forget_folders(workplace)  # of a finished tuning that was stopped while it removed its files
    write_private(workplace / DRAWN, json.dumps({**facts, "points": points}).encode())
    return list(points)


def _trial(number: int, point: Point, parts: Split, folder: Path, tuning: Tuning, settings: Settings) -> dict[str, Any]:
    """Train and score one trial; if an earlier call of this tuning finished it, return the kept result."""
    if (folder / TRIAL).is_file():
        found: dict[str, Any] = json.loads((folder / TRIAL).read_text(encoding="utf-8"))
        return found
    name, of = settings.audited, point.settings
    request = dataclasses.replace(
        TrainingRequest.of(of, name, point.plan, folder),
        privacy=settings.privacy,
        seed=_seed(number, settings),
        resume=any(folder.iterdir()),  # left by an earlier call of this tuning alone
        checkpoint_every=of.operation.checkpoint_every or EVERY,  # steps that a secure run repeats are charged again
    )
    try:
        trained = train_model(request, parts, progress=_tells(settings))
    except OtherSettingsError as error:
        # if the trial began anew in another folder, nothing would be left of what this one had shown
        raise EquidpError(
            f"The unfinished tuning in {folder.parent} has trials that another version of equidp began otherwise "
            f"({error.differing}): go on with that version and resume=true, and leave its files where they are; or "
            "give this one a run_label, and add up the ε of both."
        ) from error
    weights = Weights(trained.weights, model_card(name, parts.train, of))
    noised = _scored(weights, parts.test, tuning, settings, number)
    ledger = [Event.from_dict(event) for event in trained.privacy["ledger"]]
    found = {
        "score": score(noised, settings.tune.score, settings.data.groups[0]),
        "histogram": noised.to_dict(),
        "privacy": trained.privacy,
        "beyond_plan": [event.to_dict() for event in beyond_plan(point.plan, of, name, ledger)],
    }
    save_weights(weights, folder / MODEL)
    settle(folder / MODEL)  # if a power cut lost the chosen model, all that the tuning spent would be lost
    write_private(folder / TRIAL, json.dumps(found).encode())  # last: a trial with this file is complete
    return found


def _seed(number: int, settings: Settings) -> int:
    """Return a trial's seed. Each seeded trial has its own, so that no two share batches and noise.

    In a secure tuning only the initial weights follow from it, and all trials start alike. If initial weights told a
    trial's number, the model would show it, and so how many trials before it were no better. ε does not cover that.
    """
    return settings.seed if settings.privacy.secure else derived_seed(settings.seed, f"tune/{number}")


def _trial_apart(
    number: int, point: Point, parts: Split, folder: Path, tuning: Tuning, settings: Settings, threads: int
) -> None:
    """Do a trial in a process of its own, with so many threads that it sums in the same order as a single worker."""
    torch.set_num_threads(threads)
    _trial(number, point, parts, folder, tuning, settings)


def _scored(weights: Weights, validation: Records, tuning: Tuning, settings: Settings, number: int) -> Noised:
    """Return the validation part's histogram, noised unless the choice is exact; scores need predicted classes only."""
    scores: np.ndarray = predict(network_of(weights), validation.features, alike=settings.privacy.secure).numpy()
    units = validation.unit
    return noised_histogram(
        scores,
        validation.labels.numpy(),
        group_arrays(validation, settings.data.groups),
        classes=validation.schema.classes,
        bins=len(validation.schema.classes),
        noise_multiplier=0.0 if tuning.score_event is None else tuning.score_event.noise_multiplier,
        random=random_source(settings.privacy, derived_seed(settings.seed, f"tune/score/{number}")),
        units=units.numpy() if units is not None and settings.privacy.by_unit else None,
    )
