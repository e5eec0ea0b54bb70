"""Private selection: several trainings with settings drawn from a declared grid, of which the best scored is released.

A trial draws settings uniformly from the grid, trains on the training part, and scores the model by a noised histogram
of the validation part. Its output is settings, model and histogram. K trials run, where K is drawn from a declared law.
Of the trial with the best score everything is released, of the others nothing, and K is not released. Nor is the number
of the chosen trial: as a trained model shows what it started from, all trials of a secure run start from the same
weights.

*A training record.* The settings have the same law for any data, and the histogram is computed from the model and from
other records. So a trial's divergence is at most the largest one of the grid's trainings (a mixture with a known label
has at most the divergence of its worst component). One training is the reference, and its ε is told by one or two
orders, fixed before the first trial. The noise of every other setting is solved for such that its divergence at these
orders is at most the reference's. The theorem of `accounting.trials` is applied to the reference.

*A box* of ranges becomes a grid of points, by a sequence that spreads them evenly and knows neither records nor scores.
Each trial draws one point with replacement, so trials are independent and of one law, as the theorem wants. If each
trial took the next point of the sequence, they would be neither. A sampler that sees scores (Bayesian optimisation,
successive halving) makes a trial's law depend on the scores of others, and so on the records. Then f(x) = E[x^K] does
not hold, and each of its trials would have to be charged.

*A validation record.* Settings and model have the same law for any validation part, and the histogram is one Gaussian
release. The theorem is applied to that release.

No record is in both parts, so each of the two is charged with its own figure. The theorem wants a fixed order among
outputs of equal score. Trials are alike and independent. So the first of equal ones has the same law as one that is
chosen by a random number which each trial draws, and this is such an order.

*After a crash* in a secure run, steps that are done again are charged again. The most that any trial's ledger has
beyond its plan is rounded up to what breaks may cost any trial of the grid, and added to the reference for all trials.

*Without privacy of the choice* (`tune.exact`, for research alone): every combination is trained, and the exact figure
chooses. A training record then pays for all trainings together. It does not pay for the choice, which other records
made, those of the validation part. A validation record has no guarantee.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from scipy.stats import qmc

from equidp.accounting.accounted import Accounted
from equidp.accounting.calibration import divergences, noise_within
from equidp.accounting.events import Event, merged
from equidp.accounting.plan import Plan
from equidp.accounting.trials import Trials
from equidp.algorithms import ALGORITHMS
from equidp.data.membership import split_sentence
from equidp.data.records import Membership, Records
from equidp.data.sources import unit_noun
from equidp.errors import EquidpError, refuse_unknown
from equidp.evaluation.histogram import Noised, figures_event, sensitivity, tables
from equidp.evaluation.noised import Cells, known_large, overall
from equidp.mechanism.algorithm import Algorithm
from equidp.models import MODELS, card_options, model_features
from equidp.parameters import Settings, varied
from equidp.training.planning import plan_of
from equidp.training.preparation import refuse_unfit
from equidp.training.request import TrainingRequest
from equidp.training.statement import REPEATED, added_or_removed

VARIED = ("training", "model")
"""Blocks of settings that a grid may vary, besides the algorithm's own."""

MOST_POINTS = 10_000


@dataclass(frozen=True)
class Point:
    """One combination of a grid: what it changes, by dotted name; all its settings; its plan, noise included."""

    changes: Mapping[str, Any]
    settings: Settings
    plan: Plan


@dataclass(frozen=True)
class Tuning:
    """All that is fixed before the first trial, and public.

    Attributes:
        points: the grid; the training of the first point is the reference.
        reference: events whose divergences no trial exceeds; for an exact choice, those of all trials together.
        score_event: the noised histogram of the validation part; None where the choice is exact.
        law: of the number of trials. The plans have the same law, limited to the orders at which no trial exceeds the
            reference.
    """

    points: tuple[Point, ...]
    reference: tuple[Event, ...]
    score_event: Event | None
    law: Trials

    def epsilon(self, more: Sequence[Event] = ()) -> float:
        """ε of choice and model for a training record; `more` are events beyond the plans."""
        return self.plan.trials.epsilon((*self.reference, *more), self.plan.delta).value

    @property
    def score_epsilon(self) -> float:
        """ε of choice and scores for a validation record; infinite where the choice is exact."""
        if self.score_event is None:
            return math.inf
        return self.law.epsilon((self.score_event,), self.plan.delta).value

    @property
    def plan(self) -> Plan:
        """The plan of the reference."""
        return self.points[0].plan


def plan_tuning(train: Records, settings: Settings) -> Tuning:
    """Fix grid, noise and ε.

    Args:
        train: the training part, without the validation part; only its public sizes are used.
        settings: the run's.

    Raises:
        EquidpError: for no law of the number of trials, a grid that cannot be trained, a model that does not fit the
            records, or a target that cannot be met.
    """
    _refuse_untunable(settings)
    combinations = _combinations(settings)
    if settings.tune.exact:
        alone = tuple(_point(changes, train, settings) for changes in combinations)
        _refuse_unfit(alone, train, settings)
        every = merged(event for of in alone for event in of.settings.algorithm(settings.audited).events(of.plan))
        return Tuning(alone, every, None, settings.privacy.trials)
    first, *others = combinations
    point = _point(first, train, settings)
    reference = merged(point.settings.algorithm(settings.audited).events(point.plan))
    trials = point.plan.trials.telling(reference, point.plan.delta)
    assert trials.orders is not None
    given = settings.privacy.model_copy(update={"epsilon": None, "noise_multiplier": point.plan.noise_multiplier})
    like = dataclasses.replace(settings, privacy=given)  # `_within` solves for the reference instead
    within = partial(_within, name=settings.audited, reference=reference, orders=trials.orders, known={})
    points = (point, *(within(_point(changes, train, like)) for changes in others))
    _refuse_unfit(points, train, settings)
    event = figures_event(settings.tune.epsilon, settings.privacy.delta, settings.privacy.trials, "tune.epsilon")
    limited = (dataclasses.replace(of, plan=dataclasses.replace(of.plan, trials=trials)) for of in points)
    return Tuning(tuple(limited), reference, event, settings.privacy.trials)


def score(noised: Noised, kind: str, grouping: str) -> float:
    """The score that orders trials: a figure of a noised histogram, in [0, 1].

    A figure that is mostly noise is used too, because it orders trials better than nothing does. The worst group is
    sought among the groups that are known to have ten records or more, if there are any. Without noise, a class or
    group that has no record is left out.
    """
    whole, unknown = overall(noised), noised.sd > 0
    if kind == "accuracy":
        return whole.rough(whole.of())
    recalls = [whole.rough(whole.of(k)) for k in range(whole.classes) if unknown or whole.counts[k].any()]
    if kind == "balanced_accuracy":
        return sum(recalls) / len(recalls)
    if grouping == "class":
        return min(recalls)
    named = zip(noised.names[grouping], noised.counts[grouping], strict=True)
    every = {name: Cells(counts, noised.sd) for name, counts in named}
    groups = {name: of for name, of in every.items() if unknown or of.counts.any()}
    large = known_large(every)
    kept = [of for name, of in groups.items() if name in large] or list(groups.values())
    return min(of.rough(of.of()) for of in kept)


def tuned_statement(
    privacy: Mapping[str, Any], tuning: Tuning, settings: Settings, chosen: Point, more: Sequence[Event]
) -> dict[str, Any]:
    """privacy.json of the chosen model: that of its trial, with the ε of choice and model in the place of the trial's.

    It does not say whether this trial repeated steps after an interruption, because that would tell the trial's number.
    """
    charged = merged((*tuning.reference, *more))
    plan = chosen.plan
    accounted = Accounted(plan, charged, charged, None)
    epsilon, curve = accounted.epsilon(), accounted.trade_off()
    target = None if settings.tune.exact else settings.privacy.epsilon  # if exact, it is each training's alone
    trial = {name: value for name, value in privacy.items() if name != "steps_repeated"}  # its place would tell, too
    return {
        **trial,
        "epsilon": epsilon.value,
        "epsilon_rdp": epsilon.rdp,
        "epsilon_pld": epsilon.pld,
        "epsilon_published": {**privacy["epsilon_published"], "guarantee": False},  # of one training, not of the choice
        "epsilon_replace_one": accounted.replace_one(),
        "target_epsilon": target,
        "target_epsilon_as": None if target is None else "sound",
        "trade_off": None if curve is None else curve.to_dict(),
        "ledger": [event.to_dict() for event in merged(chosen.settings.algorithm(settings.audited).events(plan))],
        "charged": [event.to_dict() for event in charged],
        **({"steps_repeated": True} if more else {}),
        "tuning": {
            "score": settings.tune.score,
            "grid": {
                name: [_published(name, value, tuning.points) for value in values]
                for name, values in settings.tune.values.items()
            },
            "box": settings.tune.ranges,
            "points": len(tuning.points),
            "chosen": {name: _published(name, value, tuning.points) for name, value in chosen.changes.items()},
            "exact": settings.tune.exact,
            "validation": tuning.score_event
            and {
                "epsilon": tuning.score_epsilon,
                "delta": plan.delta,
                "unit": settings.privacy.unit,
                "adjacency": added_or_removed(settings.privacy),
                "mechanism": tuning.score_event.to_dict(),
                "sensitivity": sensitivity(settings.data.groups),
                "tables": list(tables(settings.data.groups)),
            },
        },
        "assumptions": [*privacy["assumptions"][:-2], _split(privacy, tuning), _assumed(tuning)],
        "notes": [
            *(note for note in privacy["notes"] if note != REPEATED),
            *([REPEATED] if more else []),
            _note(tuning, privacy["epsilon"]),
        ],
    }


def _published(setting: str, value: Any, points: Sequence[Point]) -> Any:
    """A value of the grid as a model's card shows it: the statement goes out, so of a file it has only the name."""
    block, _, option = setting.rpartition(".")
    if block == "model.options":
        for model in (of.settings.model for of in points):
            if option in MODELS[model.name].Options.paths:
                return card_options(model.name, {**model.options, option: value})[option]
    return value


def _split(privacy: Mapping[str, Any], tuning: Tuning) -> str:
    """The sentence on the split: a record of the validation part has another ε than the model's, or none."""
    how = "nothing protects" if tuning.score_event is None else "has an ε of its own, for choice and scores"
    membership, unit = Membership(**privacy["membership"]), unit_noun(privacy["unit"])
    return split_sentence(membership, unit, exposed="the validation part", how=how)


def _assumed(tuning: Tuning) -> str:
    """The sentence on trials, instead of a training's, which is on trials that the user makes one by one."""
    if tuning.score_event is None:
        return "All trainings of the grid are charged; publishing further runs composes their ledgers."
    return (
        "The number of trials, and the settings of each, were drawn before the first of them and whatever the records. "
        "All trials have one training part, and a validation part that none of them trains on. Nothing but the chosen "
        "one is ever shown. Publishing further runs composes their ledgers."
    )


def _note(tuning: Tuning, alone: float) -> str:
    if tuning.score_event is None:
        return (
            f"A choice without privacy (tune.exact): {len(tuning.points)} trainings, of which the best exact figure of "
            f"the validation part chose. ε is that of all of them together. The chosen training alone has ε = "
            f"{alone:.4g}, which says nothing about the choice. Validation records have no guarantee."
        )
    return (
        f"At the Rényi orders {' and '.join(f'{order:g}' for order in tuning.plan.trials.orders or ())} no trial has a "
        "larger divergence than the events listed as charged; ε is that of the choice among a random number of such "
        "trials, by these orders."
    )


def _refuse_untunable(settings: Settings) -> None:
    """Refuse settings for which the theorem does not hold."""
    name, privacy = settings.audited, settings.privacy
    if settings.tune.exact and (privacy.secure or not privacy.trials.single):
        raise EquidpError(
            "tune.exact=true chooses without privacy, among all combinations, for research: leave privacy.secure and "
            "the declared number of trials out."
        )
    if privacy.trials_law is None and not settings.tune.exact:
        raise EquidpError(
            "tune needs the law of the number of trials: give privacy.trials_law (geometric, negative_binomial or "
            "poisson) and privacy.trials_mean."
        )
    if settings.data.membership != "hash":
        raise EquidpError(
            "tune needs parts in which no record depends on the others: take data.membership=hash instead of strata."
        )
    if settings.data.evaluate_on != "test":
        raise EquidpError("tune holds a validation part of its own: leave data.evaluate_on=validation out.")
    if privacy.epsilon_as == "published":
        raise EquidpError("tune states the guaranteed ε: leave privacy.epsilon_as=published out.")
    if settings.release.unprotected:
        raise EquidpError("tune makes no exact figures and no audit: leave release.unprotected out.")
    if settings.tune.sampler != "halton":
        raise EquidpError(
            f"tune.sampler={settings.tune.sampler}: give halton. The bound on ε is for trials that are drawn "
            "independently and from one law; a sampler that sees scores makes each trial depend on those before it."
        )
    if settings.tune.workers > 1 and sys.platform == "win32":
        raise EquidpError("tune.workers needs what Windows lacks: leave it out, or use WSL.")
    _refuse_algorithm(settings.algorithm(name), name)
    _refuse_other_places(settings)


def _refuse_other_places(settings: Settings) -> None:
    """Refuse an empty grid or box, a setting that is in both, and settings that no trial may vary."""
    values, ranges = settings.tune.values, settings.tune.ranges
    for where, names in (("grid", values), ("box", ranges)):
        blocks = (setting.split(".")[0] for setting in names)
        refuse_unknown(f"block of settings in tune.{where}", blocks, (*VARIED, settings.audited))
    if both := values.keys() & ranges.keys():
        raise EquidpError(f"tune.grid and tune.box both have {min(both)}: give it in one of them.")
    if empty := [name for name, of in values.items() if not of]:
        raise EquidpError(f"tune.grid.{empty[0]} has no values: give some, such as 0.1+0.5.")
    if not values and not ranges:
        raise EquidpError(
            "tune.grid is empty: name settings and values, such as tune.grid.training.learning_rate=0.1+0.5, or a "
            "range, such as tune.box.training.learning_rate=0.05+2+log."
        )


def _refuse_algorithm(algorithm: Algorithm, name: str) -> None:
    """Refuse an algorithm that no trial can train with; it has the settings of some trial."""
    unprotected = algorithm.needs_public or algorithm.acceptance.on_test  # it reads records without adding noise
    if not (algorithm.private and algorithm.fixed) or unprotected or ALGORITHMS[name].features:
        raise EquidpError(
            f"tune cannot take {name} with these settings: its events must be fixed before training, and it must train "
            "on the records as they are, without a public part or an energy of test records. Name another algorithm, "
            "such as algorithm=dpsgd_f."
        )


def _combinations(settings: Settings) -> list[dict[str, Any]]:
    values = settings.tune.values
    grid = [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    found = [{**one, **other} for one in grid for other in _spread(settings.tune.ranges, settings.tune.points)]
    if not 1 <= len(found) <= MOST_POINTS:
        raise EquidpError(f"tune has {len(found)} combinations of settings: give 1 to {MOST_POINTS}.")
    return found


def _spread(ranges: Mapping[str, Sequence[Any]], points: int) -> list[dict[str, Any]]:
    """Points of a box, by the Halton sequence. Its first point, a corner, is left out."""
    if not ranges:
        return [{}]
    shares = qmc.Halton(len(ranges), scramble=False).random(points + 1)[1:]
    axes = [_axis(name, ends, shares[:, k]) for k, (name, ends) in enumerate(ranges.items())]
    return [dict(zip(ranges, chosen, strict=True)) for chosen in zip(*axes, strict=True)]


def _axis(name: str, given: Sequence[Any], shares: NDArray) -> list[int] | list[float]:
    """Values of one range, at the places in it that `shares` in (0, 1) say."""
    ends = [] if isinstance(given, str) else [str(end) for end in given]
    log = ends[2:] == ["log"]
    try:
        low, high = map(float, ends[:2] if log else ends)
        allowed = (0 if log else -math.inf) < low < high < math.inf
    except ValueError:
        allowed = False
    if not allowed:
        raise EquidpError(
            f"tune.box.{name}={'+'.join(ends)}: give two numbers, the smaller first, such as 0.05+2, or 0.05+2+log for "
            "a logarithmic range, whose ends are above 0."
        )
    whole = all(end.lstrip("-").isdigit() for end in ends[:2])
    if whole:
        low, high = low - 0.5, high + 0.5  # so that both ends are as probable as any number between them
    at = low * (high / low) ** shares if log else low + (high - low) * shares
    return [round(one) for one in at] if whole else [float(f"{one:.4g}") for one in at]


def _point(changes: Mapping[str, Any], train: Records, settings: Settings) -> Point:
    of = varied(settings, changes)
    if of.training.devices != 1:  # a grid may set it, too
        raise EquidpError("tune trains in one process: leave training.devices out.")
    if _mapped(settings) not in (None, _mapped(of)):  # the chosen model would name a map that it was not trained on
        asked = ", ".join(f"{setting}={value}" for setting, value in changes.items())
        raise EquidpError(
            f"tune: with {asked} a model needs other features than model.name={settings.model.name} as it is set, and "
            "these are computed once, before the first trial: leave it out, or tune each on its own and add up the ε."
        )
    _refuse_algorithm(of.algorithm(settings.audited), settings.audited)
    return Point(changes, of, plan_of(settings.audited, train, of))


def _refuse_unfit(points: Sequence[Point], train: Records, settings: Settings) -> None:
    """Try every model and loss of the grid once, because one that does not fit would end the tuning in a trial, after
    all of it was charged.
    """

    def alike(of: Settings) -> str:
        return repr((of.model, of.training.model_copy(update={"learning_rate": 0.0})))

    for point in {alike(point.settings): point for point in points}.values():
        refuse_unfit(TrainingRequest.of(point.settings, settings.audited, point.plan, Path()), train)


def _mapped(settings: Settings) -> tuple[str, dict[str, Any]] | None:
    """The fixed map whose features the model trains on; None if it trains on the records as they are."""
    return model_features(settings.model.name, settings.model.options)


def _within(
    point: Point,
    name: str,
    reference: Sequence[Event],
    orders: Sequence[float],
    known: dict[tuple[tuple[Event, ...], ...], float],
) -> Point:
    """The point with the least noise whose divergences are at most the reference's.

    `known`: noises found before, by a point's events at the given noise and at twice that. One of the two is not
    enough: a release with noise of its own, and one with noise in multiples of the gradient's, may be the same at one.
    """
    algorithm, plan = point.settings.algorithm(name), point.plan
    as_given = merged(algorithm.events(plan))
    if as_given == tuple(reference):
        return point

    def events(sigma: float) -> tuple[Event, ...]:
        return merged(algorithm.events(dataclasses.replace(plan, noise_multiplier=sigma)))

    key, most = (as_given, events(2 * plan.noise_multiplier)), divergences(reference, orders)
    least = known.get(key)
    if least is None or any(a > b for a, b in zip(divergences(events(least), orders), most, strict=True)):
        try:
            least = known[key] = noise_within(events, reference, orders)
        except EquidpError as error:
            asked = ", ".join(f"{setting}={value}" for setting, value in dict(point.changes).items())
            raise EquidpError(
                f"tune: {asked} costs more than the first combination, whatever its noise: leave it out, name values "
                "that cost most first, or give its other releases noise in multiples of the gradient's (`1x`)."
            ) from error
    return dataclasses.replace(point, plan=dataclasses.replace(plan, noise_multiplier=least))
