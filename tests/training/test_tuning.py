"""Private selection: what it costs by hand, what each trial may cost, how many there are, and what a crash leaves."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting.dp_event import ComposedDpEvent, RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy import stats
from scipy.optimize import brentq

from equidp.accounting.calibration import divergences, noise_within
from equidp.accounting.dataset_ledger import DatasetLedger
from equidp.accounting.epsilon import epsilon
from equidp.accounting.events import Event, merged
from equidp.accounting.trials import Trials
from equidp.data.records import Split
from equidp.data.sources import source
from equidp.errors import EquidpError
from equidp.evaluation.histogram import Noised
from equidp.parameters import Settings, resolve, varied
from equidp.pipelines.ingestion.nodes import divide
from equidp.pipelines.tune import nodes
from equidp.training import TrainingRequest
from equidp.training.checkpoint import Checkpointer, StoppedError
from equidp.training.interrupted import beyond_plan, of_any_trial
from equidp.training.journal import block_of
from equidp.training.statement import REPEATED
from equidp.training.tuning import _published, _within, plan_tuning, score, tuned_statement

pytestmark = pytest.mark.usefixtures("coarse")

LAW = {"trials_law": "geometric", "trials_mean": 3}

DELTA, ORDERS = 1e-5, np.concatenate([np.arange(1.1, 11, 0.1), np.arange(11, 64), [128.0, 256, 512, 1024]])


def settings(tmp_path: Path, **more: Any) -> Settings:
    return resolve(
        {
            "dataset": "digits",
            "algorithm": "dpsgd",
            "raw_dir": str(tmp_path),
            "model": {"name": "logistic"},
            "privacy": {"noise_multiplier": 2.0, "delta": DELTA} | LAW,
            "training": {"epochs": 1, "batch_size": 256, "device": "cpu"},
            "tune": {"grid": {"dpsgd": {"options": {"clip_norm": [0.1, 1.0]}}, "training": {"batch_size": "128+256"}}},
        }
        | more
    )


@pytest.fixture(scope="module")
def digits() -> Any:
    kind = source("digits", {})
    return kind.read(kind.locate(Path()))


def parts(digits: Any, of: Settings) -> Any:
    held = of.data.model_copy(update={"evaluate_on": "validation"})
    return divide(digits, held, of.seed, [of.algorithm("dpsgd")])


def converted(orders: np.ndarray, divergence: np.ndarray) -> float:
    """ε of Rényi divergences (Canonne, Kamath and Steinke 2020, proposition 12)."""
    return float(np.min(divergence + np.log1p(-1 / orders) - (math.log(DELTA) + np.log(orders)) / (orders - 1)))


def test_the_choice_by_two_laws_costs_a_validation_record_what_the_theorems_say(tmp_path: Any, digits: Any) -> None:
    """By hand: the score is one Gaussian of divergence R = λ/2σ²; the theorems are 2 and 6 of the paper."""
    for law in ({"trials_law": "geometric", "trials_mean": 5}, {"trials_law": "poisson", "trials_mean": 5}):
        given = settings(tmp_path, privacy={"noise_multiplier": 2.0, "delta": DELTA, **law})
        tuning = plan_tuning(parts(digits, given).train, given)
        sigma = tuning.score_event.noise_multiplier
        divergence = ORDERS / (2 * sigma**2)
        if law["trials_law"] == "geometric":  # γ = 1/mean, η = 1
            least = np.min((1 - 1 / ORDERS) * divergence + math.log(5) / ORDERS)
            whole = divergence + 2 * least + math.log(5) / (ORDERS - 1)
        else:  # δ̂ of the Gaussian at ε̂ = ln(λ/(λ−1)), with E[K] in the place of the rate
            at = np.log1p(1 / (ORDERS - 1))
            upper, lower = 0.5 / sigma - at * sigma, -0.5 / sigma - at * sigma
            normal = torch.distributions.Normal(0.0, 1.0)
            hat = normal.cdf(torch.from_numpy(upper)).numpy() - np.exp(at) * normal.cdf(torch.from_numpy(lower)).numpy()
            # dp_accounting has δ̂ by the Rényi divergence, which is no less
            assert tuning.score_epsilon >= converted(ORDERS, divergence + 5 * hat + math.log(5) / (ORDERS - 1)) - 1e-3
            continue
        assert tuning.score_epsilon == pytest.approx(converted(ORDERS, whole), rel=0.01)
        assert tuning.score_epsilon <= 1.0


def test_no_trial_has_a_larger_divergence_than_the_one_that_epsilon_is_of(tmp_path: Any, digits: Any) -> None:
    given = settings(tmp_path)
    tuning = plan_tuning(parts(digits, given).train, given)
    assert len(tuning.points) == 4
    assert len({point.plan.noise_multiplier for point in tuning.points}) == 2  # two batch sizes
    orders = tuning.plan.trials.orders
    assert orders is not None
    most = divergences(tuning.reference, orders)
    for point in tuning.points:
        found = divergences(point.settings.algorithm("dpsgd").events(point.plan), orders)
        assert all(a <= b * (1 + 1e-9) for a, b in zip(found, most, strict=True))
    assert tuning.epsilon() == pytest.approx(Trials(law="geometric", mean=3).epsilon(tuning.reference, DELTA).value)
    assert tuning.epsilon([Event(0.5, 2.0)]) > tuning.epsilon()


def test_trials_are_compared_where_the_divergence_of_the_first_is_known(tmp_path: Any, digits: Any) -> None:
    """Below order 2 it may be known at none: beside an infinite one, 25 times the steps had the noise 1, and ε 40."""
    given = settings(
        tmp_path,
        privacy={"noise_multiplier": 3.0, "delta": DELTA, "trials_law": "poisson", "trials_mean": 50},
        training={"epochs": 2, "batch_size": 575, "device": "cpu"},
        tune={"grid": {"training": {"epochs": "2+50"}}},
    )
    tuning = plan_tuning(parts(digits, given).train, given)
    orders = tuning.plan.trials.orders
    assert orders is not None
    most, longer = divergences(tuning.reference, orders), tuning.points[1]
    assert all(0 < one < math.inf for one in most)
    events = longer.settings.algorithm("dpsgd").events(longer.plan)
    assert all(a <= b for a, b in zip(divergences(events, orders), most, strict=True))
    assert epsilon(events, DELTA).value < tuning.epsilon()


@pytest.mark.parametrize("orders", [(1.1, 4.4), (4.4, 1.1)])
def test_no_noise_is_found_within_an_unknown_divergence(orders: tuple[float, ...]) -> None:
    reference = (Event(0.5, 3.0, 4),)
    assert math.inf in divergences(reference, orders)
    with pytest.raises(ValueError, match="bound no other"):
        noise_within(lambda noise: (Event(0.5, noise, 100),), reference, orders)


def test_a_release_in_multiples_of_the_noise_is_no_other_at_one_noise_only(tmp_path: Any, digits: Any) -> None:
    """At σ = 1 counts of noise `1x` and of 1.0 are one event, but more noise helps the first alone."""
    privacy = {"noise_multiplier": 1.0, "delta": DELTA, "trials_law": "geometric", "trials_mean": 3}

    def planned(*levels: Any, epochs: tuple[int, int] = (1, 8)) -> Any:
        grid = {"training": {"epochs": list(epochs)}, "dpsgd_f": {"options": {"count_noise_multiplier": list(levels)}}}
        given = settings(tmp_path, algorithm="dpsgd_f", privacy=privacy, tune={"grid": grid})
        return plan_tuning(parts(digits, given).train, given)

    assert len(planned("1x").points) == 2
    told = r"tune: .*count_noise_multiplier=1\.0 costs more than the first combination, whatever its noise.* most first"
    with pytest.raises(EquidpError, match=told):
        planned("1x", 1.0)
    assert len(planned("1x", 1.0, epochs=(8, 1)).points) == 4, "as the sentence asks for"


def test_a_noise_that_was_found_for_another_point_is_taken_where_it_is_enough_alone(tmp_path: Any, digits: Any) -> None:
    """Two points may have the same events at the noise that is given and at twice as much, and others at that found."""
    given = settings(tmp_path)
    point = plan_tuning(parts(digits, given).train, given).points[0]
    noise, reference, orders = point.plan.noise_multiplier, (Event(0.1, 3.0, 5),), (4.0, 16.0)

    class Stub:
        def __init__(self, found: Callable[[float], Event]) -> None:
            self.found = found

        def algorithm(self, name: str) -> Any:
            return self

        def events(self, plan: Any) -> tuple[Event, ...]:
            sigma = plan.noise_multiplier
            return (Event(0.1, sigma, 10) if sigma in (noise, 2 * noise) else self.found(sigma),)

    known: dict[Any, float] = {}
    at_both, at_one = (lambda sigma: Event(0.1, sigma / 1.5, 10)), (lambda sigma: Event(0.001, sigma / 5, 10))
    for found in (lambda sigma: Event(0.1, sigma, 10), at_one, at_both):
        stub: Any = Stub(found)
        within = _within(replace(point, settings=stub), "dpsgd", reference, orders, known)
        pairs = zip(divergences(stub.events(within.plan), orders), divergences(reference, orders), strict=True)
        assert all(a <= b for a, b in pairs)


def test_what_is_trained_of_a_network_may_be_varied_over_a_presets(tmp_path: Any) -> None:
    """It was refused as two settings that differ, the second of which nobody had given."""
    network = {"name": "backbone", "options": {"network": "timm:test_resnet", "weights": "w"}}
    training = {"trainable": "lora", "device": "cpu"}
    preset = settings(tmp_path, model=network, training=training)
    for changes, trained in (({"training.trainable": "bias"}, "bias"), ({"training.learning_rate": 0.5}, "lora")):
        point = varied(preset, changes)
        assert (point.training.trainable, point.model.options["trainable"]) == (trained, trained)
    assert preset.model.options["trainable"] == "lora"
    with pytest.raises(EquidpError, match=r"model\.options\.trainable differ"):
        varied(preset, {"training.trainable": "bias", "model.options.trainable": "norm"})


def test_a_box_is_a_grid_of_points_spread_over_it_whatever_the_data(tmp_path: Any, digits: Any) -> None:
    ranges = {"training": {"learning_rate": "0.01+10+log", "batch_size": "128+256"}}
    tune = {"box": ranges, "points": 15, "grid": {"dpsgd": {"options": {"clip_norm": [0.1, 1.0]}}}}
    given = settings(tmp_path, tune=tune)
    tuning = plan_tuning(parts(digits, given).train, given)
    rates = np.array([point.settings.training.learning_rate for point in tuning.points])
    sizes = np.array([point.settings.training.batch_size for point in tuning.points])
    assert len(tuning.points) == 30
    assert list(np.histogram(np.log10(rates), bins=[-2, -1, 0, 1])[0]) == pytest.approx([10, 10, 10], abs=2)
    assert sizes.min() >= 128
    assert sizes.max() <= 256
    assert (sizes > 192).sum() == pytest.approx(15, abs=4)
    assert tuning.points[0].changes["training.batch_size"] == sizes[0]
    assert tuning.epsilon() == pytest.approx(Trials(law="geometric", mean=3).epsilon(tuning.reference, DELTA).value)
    orders = tuning.plan.trials.orders
    assert orders is not None
    for point in tuning.points:
        found = divergences(point.settings.algorithm("dpsgd").events(point.plan), orders)
        assert all(a <= b * (1 + 1e-9) for a, b in zip(found, divergences(tuning.reference, orders), strict=True))


def test_a_box_has_the_same_points_in_every_process_and_all_whole_numbers_of_a_range_as_often(
    tmp_path: Any, digits: Any
) -> None:
    """By hand: halves, quarters, ... of the range. A tuning that goes on makes its grid anew."""

    def drawn(setting: str, ends: str, points: int) -> list[Any]:
        given = settings(tmp_path, tune={"box": {"training": {setting: ends}}, "points": points})
        return [of.changes[f"training.{setting}"] for of in plan_tuning(parts(digits, given).train, given).points]

    assert drawn("learning_rate", "0.01+100+log", 3) == [1.0, 0.1, 10.0]
    assert sorted(drawn("epochs", "1+3", 15)) == [1] * 5 + [2] * 5 + [3] * 5


@pytest.mark.parametrize(
    "trials",
    [
        Trials(law="geometric", mean=7.0),
        Trials(law="geometric", mean=1.5),
        Trials(law="poisson", mean=4.0),
        Trials(law="negative_binomial", mean=5.0, shape=0.0),
        Trials(law="negative_binomial", mean=5.0, shape=0.5),
    ],
)
def test_the_number_of_trials_has_the_declared_mean(trials: Trials) -> None:
    steps = (np.arange(4000) + 0.5) / 4000
    drawn = np.array([trials.draw(one) for one in steps])
    assert drawn.min() == 1
    assert (np.diff(drawn) >= 0).all()
    assert drawn.mean() == pytest.approx(trials.mean, rel=0.01)


def test_the_geometric_law_is_drawn_as_it_is_defined() -> None:
    trials = Trials(law="geometric", mean=4.0)
    for k in range(1, 8):
        reached = 1 - 0.75**k
        assert trials.draw(reached - 1e-9) == k
        assert trials.draw(reached + 1e-9) == k + 1


class Crash(BaseException):
    """Stands for a process that dies."""


@pytest.mark.parametrize(
    "trials",
    [
        Trials(law="poisson", mean=1000.0),
        Trials(law="poisson", mean=1e5),
        Trials(law="negative_binomial", mean=1000.0, shape=1e6),
        Trials(law="negative_binomial", mean=1000.0, shape=1e-3),
        Trials(law="negative_binomial", mean=1 + 1e-10, shape=1e6),
    ],
    ids=str,
)
def test_the_number_of_very_many_trials_is_drawn_by_the_law_too(trials: Trials) -> None:
    """Where the probability of one trial is 0 in floating point, or another law is so near."""
    for uniform in (1e-9, 0.1, 0.5, 0.9, 1 - 1e-9):
        found = trials.draw(uniform)
        assert by_scipy(trials, found - 1) <= uniform + 1e-9
        assert by_scipy(trials, found) >= uniform - 1e-9


def by_scipy(trials: Trials, most: int) -> float:
    """The probability of so many trials at most."""
    if trials.mean is None or trials.mean < 1.001:
        return float(most >= 1)
    if trials.law == "poisson":
        return float(stats.poisson.cdf(most, trials.mean))  # none has a probability of 0
    gamma = brentq(
        lambda one: float(stats.nbinom.mean(trials.eta, one)) / -math.expm1(trials.eta * math.log(one)) - trials.mean,
        1e-9, 1 - 1e-9,
    )  # fmt: skip
    none = math.exp(trials.eta * math.log(gamma))
    return (float(stats.nbinom.cdf(most, trials.eta, gamma)) - none) / (1 - none)


def test_a_tuning_that_was_killed_goes_on_with_the_trials_it_drew(tmp_path: Any, digits: Any, monkeypatch: Any) -> None:
    clip_norms = {"grid": {"dpsgd": {"options": {"clip_norm": [0.1, 1.0]}}}}
    given = settings(tmp_path, seed=3, tune=clip_norms)
    algorithms = {"dpsgd": given.algorithm("dpsgd")}
    whole = nodes.choose_model(digits, tmp_path / "whole", given, algorithms, tmp_path / "ledgers", {})
    count = len(list((tmp_path / "whole").glob("nonprivate_trial-*")))
    assert count > 1  # else this seed tests nothing

    honest = nodes.train_model
    begun = []

    def killed(request: TrainingRequest, parts: Split, **how: Any) -> Any:
        begun.append(request.workplace)
        if len(begun) == 2:
            raise Crash
        return honest(request, parts, **how)

    monkeypatch.setattr(nodes, "train_model", killed)
    place = tmp_path / "killed"
    with pytest.raises(Crash):
        nodes.choose_model(digits, place, given, algorithms, tmp_path / "ledgers", {})
    drawn = (place / nodes.DRAWN).read_bytes()
    with pytest.raises(EquidpError, match="its trials count"):
        nodes.choose_model(digits, place, given, algorithms, tmp_path / "ledgers", {})
    again = settings(tmp_path, seed=3, tune=clip_norms, resume=True)
    with pytest.raises(EquidpError, match="other settings"):
        nodes.choose_model(
            digits,
            place,
            settings(tmp_path, seed=4, tune=clip_norms, resume=True),
            algorithms,
            tmp_path / "ledgers",
            {},
        )
    weights, privacy, choice, *_ = nodes.choose_model(digits, place, again, algorithms, tmp_path / "ledgers", {})
    assert (place / nodes.DRAWN).read_bytes() == drawn
    assert len(begun) == 2 + count - 1  # the finished trial was not trained again
    assert privacy["epsilon"] == whole[1]["epsilon"]
    assert choice == whole[2]
    assert all(torch.equal(weights.tensors[name], tensor) for name, tensor in whole[0].tensors.items())

    told = repr((privacy, choice))
    assert f"nonprivate_trial-{count - 1}" not in told
    orders = choice["trials"]["orders"]
    assert choice["trials"] == privacy["trials"] == {"law": "geometric", "mean": 3, "orders": orders}
    assert privacy["tuning"]["chosen"] == choice["chosen"]
    nodes.forget_trials(place)
    assert not list(place.glob("nonprivate_trial-*"))
    assert not (place / nodes.DRAWN).exists()


def test_what_a_secure_trial_does_again_is_entered_before_it_begins(
    tmp_path: Any, digits: Any, monkeypatch: Any
) -> None:
    privacy = {"noise_multiplier": 2.0, "delta": DELTA, "trials_law": "geometric", "trials_mean": 3, "secure": True}
    kept = {"privacy": privacy, "tune": {"grid": {"dpsgd": {"options": {"clip_norm": [0.1, 1.0]}}}}}
    honest, ledgers = nodes.train_model, tmp_path / "ledgers"

    def killed(*args: Any, **more: Any) -> Any:
        honest(*args, **more)
        raise Crash

    monkeypatch.setattr(nodes, "train_model", killed)
    monkeypatch.setattr(Checkpointer, "save", lambda self, trainer: None)
    counts = []
    for resume in (False, True, True):
        given = settings(tmp_path, resume=resume, **kept)
        with pytest.raises(Crash):
            nodes.choose_model(digits, tmp_path / "killed", given, {"dpsgd": given.algorithm("dpsgd")}, ledgers, {})
        found = [one for one in DatasetLedger(ledgers, "digits").entries() if one.part == "train"]
        counts.append([sum(event.count for event in one.events) for one in found])
    once = counts[0][0]
    again = once + block_of(once)  # one epoch, and what is charged ahead
    assert counts == [[once], [once, once + again], [once, once + again, once + 2 * again]]


def test_what_a_trial_was_charged_beyond_its_plan_is_told(tmp_path: Any, digits: Any) -> None:
    given = settings(tmp_path)
    point = plan_tuning(parts(digits, given).train, given).points[0]
    (event,) = given.algorithm("dpsgd").events(point.plan)
    assert beyond_plan(point.plan, given, "dpsgd", [event]) == ()
    again = Event(event.sampling_rate, event.noise_multiplier, event.count + 2)
    assert beyond_plan(point.plan, given, "dpsgd", [again]) == (Event(event.sampling_rate, event.noise_multiplier, 2),)


def test_a_file_that_a_grid_names_is_told_without_its_folder(tmp_path: Any, digits: Any) -> None:
    """The statement goes out with the model."""
    first, second = (str(tmp_path / name) for name in ("one.safetensors", "other.safetensors"))
    made = {"name": "resnet_finetune", "options": {"weights": first}}
    given = settings(tmp_path, model=made, tune={"grid": {"model": {"options": {"weights": [first, second]}}}})
    planned = plan_tuning(parts(digits, plain := settings(tmp_path)).train, plain)
    chosen = replace(planned.points[0], changes={"model.options.weights": second}, settings=given)
    membership = {"how": "hash", "key": "seed=0"}
    trained = {"epsilon": 1.0, "epsilon_published": {}, "assumptions": [], "notes": [], "unit": "record"}
    told = tuned_statement(trained | {"membership": membership}, replace(planned, points=(chosen,)), given, chosen, [])
    assert told["tuning"]["grid"] == {"model.options.weights": ["one.safetensors", "other.safetensors"]}
    assert told["tuning"]["chosen"] == {"model.options.weights": "other.safetensors"}
    assert str(tmp_path) not in json.dumps(told)


@pytest.mark.parametrize(
    ("option", "place", "told"),
    [
        ("network", "hf:/home/anna/x:y/bert", "hf:bert"),
        ("weights", "/home/anna/run:3/net.safetensors", "net.safetensors"),
        ("network", "timm:resnet18.a1_in1k", "timm:resnet18.a1_in1k"),
    ],
)
def test_a_folder_with_a_colon_is_left_out_too(tmp_path: Any, digits: Any, option: str, place: str, told: str) -> None:
    (point, *_) = plan_tuning(parts(digits, given := settings(tmp_path)).train, given).points
    options = {"network": "timm:resnet18", option: place}
    made = given.model.model_copy(update={"name": "backbone", "options": options})
    assert _published(f"model.options.{option}", place, [replace(point, settings=replace(given, model=made))]) == told


def test_no_statement_tells_whether_the_chosen_trial_was_the_one_that_was_interrupted(
    tmp_path: Any, digits: Any
) -> None:
    """Who knows when a tuning was interrupted would know the trial's number."""
    planned = plan_tuning(parts(digits, given := settings(tmp_path)).train, given)
    (event,), again = planned.reference, Event(0.5, 2.0, 3)
    facts = {"epsilon": 1.0, "epsilon_published": {}, "assumptions": [], "unit": "record"}
    facts |= {"membership": {"how": "hash", "key": "seed=0"}}
    told = [
        tuned_statement(
            facts | {"ledger": [one.to_dict() for one in ledger], **said},
            planned, given, planned.points[0], [again],
        )
        for ledger, said in (
            ([event], {"notes": []}),
            ([event, again], {"steps_repeated": True, "notes": [REPEATED]}),
        )
    ]  # fmt: skip
    assert json.dumps(told[0]) == json.dumps(told[1])  # keys are written in their order
    assert told[0]["ledger"] == [event.to_dict()]
    assert again.to_dict() in told[0]["charged"]
    assert REPEATED in told[0]["notes"]


def test_no_statement_tells_the_settings_of_a_trial_that_was_interrupted(tmp_path: Any, digits: Any) -> None:
    """Of the first trial, say: were its noise not the chosen one's, the chosen one would not be the first."""
    planned = plan_tuning(parts(digits, given := settings(tmp_path)).train, given)
    events = dict.fromkeys(of.settings.algorithm("dpsgd").events(of.plan)[0] for of in planned.points)
    assert len(events) == 2  # two batch sizes
    again = list(events)  # of one epoch, which has more steps of the smaller one
    assert len({event.count for event in again}) == 2
    told = [of_any_trial([[one]], planned, "dpsgd") for one in again]
    assert told[0] == told[1]
    orders = planned.plan.trials.orders
    assert orders is not None
    for one in again:
        assert all(a <= b for a, b in zip(divergences([one], orders), divergences(told[0], orders), strict=True))


def test_no_statement_tells_how_many_trials_were_at_work_when_a_tuning_was_interrupted(
    tmp_path: Any, digits: Any
) -> None:
    """Of four workers all at once, a sum of their repeated steps told the number of trials."""
    planned = plan_tuning(parts(digits, given := settings(tmp_path)).train, given)
    event = replace(planned.reference[0], count=2)
    told = {tuple(of_any_trial([[event]] * trials + [()], planned, "dpsgd")) for trials in (1, 2, 4)}
    assert len(told) == 1
    steps = max(of.plan.steps for of in planned.points)  # of one epoch
    ((one,),) = told
    assert one.count == steps + block_of(steps)
    twice = replace(event, count=one.count + 1)  # two breaks of one trial
    assert of_any_trial([[event], [twice]], planned, "dpsgd")[0].count == 2 * one.count
    assert of_any_trial([(), ()], planned, "dpsgd") == []


def test_no_statement_tells_how_much_of_a_break_an_interrupted_trial_took_again(tmp_path: Any, digits: Any) -> None:
    """Of three epochs with two between checkpoints: one step again is told as two epochs again are."""
    given = settings(tmp_path, training={"epochs": 3, "batch_size": 128, "checkpoint_every": 2, "device": "cpu"})
    planned = plan_tuning(parts(digits, given).train, given)
    (event,) = merged(planned.reference)
    longest = max(sum(of.plan.epoch_lengths()[:2]) + block_of(of.plan.steps) for of in planned.points)
    told = {tuple(of_any_trial([[replace(event, count=count)]], planned, "dpsgd")) for count in (1, longest)}
    assert [one.count for (one,) in told] == [longest]


@pytest.mark.parametrize(
    "again",
    [
        [Event(0.9, 0.5), Event(0.9, 1.0)],  # of one rate
        [Event(0.9, 1.0), Event(0.9, 0.5)],
        [Event(0.01, 0.5), Event(0.9, 2.0)],  # one costs more at order 2, the other at order 60
    ],
)
def test_what_interrupted_trials_are_charged_costs_no_less_than_anything_that_one_repeated(
    tmp_path: Any, digits: Any, again: list[Event]
) -> None:
    planned = plan_tuning(parts(digits, given := settings(tmp_path)).train, given)
    orders = (2.0, 60.0)
    first, *others = planned.points
    first = replace(first, plan=replace(first.plan, trials=replace(first.plan.trials, orders=orders)))
    (told,) = of_any_trial([[event] for event in again], replace(planned, points=(first, *others)), "dpsgd")
    most = divergences([replace(told, count=1)], orders)
    theirs = [divergences([event], orders) for event in again]
    assert all(a <= b for of in theirs for a, b in zip(of, most, strict=True))


@pytest.mark.parametrize("secure", [False, True])
def test_a_trial_of_a_secure_tuning_prints_nothing_as_who_counts_would_know_their_number(
    tmp_path: Any, digits: Any, monkeypatch: Any, caplog: pytest.LogCaptureFixture, secure: bool
) -> None:
    law = {"noise_multiplier": 2.0, "delta": DELTA, "trials_law": "geometric", "trials_mean": 3, "secure": secure}
    given, shown = settings(tmp_path, privacy=law), list[bool]()

    def training(*_: Any, progress: bool) -> Any:
        shown.append(progress)
        logging.getLogger("equidp.training").warning("a trial")
        raise Crash

    monkeypatch.setattr(nodes, "train_model", training)
    with pytest.raises(Crash):
        nodes.choose_model(digits, tmp_path / "run", given, {"dpsgd": given.algorithm("dpsgd")}, tmp_path, {})
    assert (shown, "a trial" in caplog.text) == ([not secure], not secure)


@pytest.mark.parametrize("stopped", [True, False])
def test_what_ends_a_trial_of_a_secure_tuning_does_not_tell_its_number(
    tmp_path: Any, digits: Any, monkeypatch: Any, stopped: bool
) -> None:
    """Whoever stops it twice would know how many trials there were between."""
    law = {"noise_multiplier": 2.0, "delta": DELTA, "trials_law": "geometric", "trials_mean": 3, "secure": True}

    def training(request: TrainingRequest, *_: Any, **__: Any) -> Any:
        text = f"after step 5 of 9; {request.workplace}/journal.jsonl"
        raise StoppedError(text, 15) if stopped else EquidpError(text)

    monkeypatch.setattr(nodes, "train_model", training)
    given = settings(tmp_path, privacy=law)
    with pytest.raises(EquidpError) as told:
        nodes.choose_model(digits, tmp_path / "run", given, {"dpsgd": given.algorithm("dpsgd")}, tmp_path, {})
    assert re.search(r"trial-\d", told.value.message) is None
    if stopped:
        assert (told.value.exit_code, "resume=true" in told.value.message) == (128 + 15, True)
        assert "step" not in told.value.message
    else:
        assert "nonprivate_trial/journal.jsonl" in told.value.message


def test_trials_draw_apart_and_all_that_they_cost_is_told_and_entered(
    tmp_path: Any, digits: Any, monkeypatch: Any
) -> None:
    """Each took a step again, and the ledger's file was lost meanwhile."""
    given, ledgers, again = settings(tmp_path), tmp_path / "ledgers", Event(0.5, 2.0)
    honest, seeds = nodes.train_model, list[int]()

    def training(request: TrainingRequest, split: Any, **how: Any) -> Any:
        seeds.append(request.seed)
        held = parts(digits, given)  # the validation part chooses, and the test part is seen by no trial
        assert torch.equal(split.test.identity, held.test.identity)
        assert torch.equal(split.train.identity, held.train.identity)
        DatasetLedger(ledgers, "digits").path.unlink(missing_ok=True)
        return honest(request, split, **how)

    monkeypatch.setattr(nodes, "train_model", training)
    counted, noises = nodes.noised_histogram, set[float]()

    def scored(scores: Any, labels: Any, *args: Any, **how: Any) -> Noised:
        noises.add(how["noise_multiplier"])
        assert np.array_equal(labels, parts(digits, given).test.labels.numpy())
        return counted(scores, labels, *args, **how)

    monkeypatch.setattr(nodes, "noised_histogram", scored)
    monkeypatch.setattr(nodes, "beyond_plan", lambda *_: (again,))
    _, privacy, *_ = nodes.choose_model(
        digits, tmp_path / "run", given, {"dpsgd": given.algorithm("dpsgd")}, ledgers, {}
    )
    assert len(set(seeds)) == len(seeds) > 1
    (said,) = (text for text in privacy["assumptions"] if "ε holds for tables too" in text)
    assert "into the validation part, which has an ε of its own" in said  # it may be the larger one
    tuning = plan_tuning(parts(digits, given).train, given)
    (told,) = of_any_trial([[again]] * len(seeds), tuning, "dpsgd")
    assert privacy["epsilon"] == tuning.epsilon([told]) >= tuning.epsilon([again]) > tuning.epsilon()
    # whoever has privacy.json alone computes it: at these orders alone the trials were compared
    accountant = RdpAccountant(json.loads(json.dumps(privacy))["trials"]["orders"])
    each = ComposedDpEvent([Event.from_dict(one).as_dp_event() for one in privacy["charged"]])
    accountant.compose(RepeatAndSelectDpEvent(each, privacy["trials"]["mean"], 1.0))
    assert accountant.get_epsilon(privacy["delta"]) == pytest.approx(privacy["epsilon"], rel=1e-6)
    assert tuning.score_event is not None
    assert noises == {tuning.score_event.noise_multiplier}
    assert told.to_dict() in privacy["charged"]
    assert privacy["steps_repeated"]
    assert "taken again, with other noise, and both count" in privacy["notes"][0]
    entries = DatasetLedger(ledgers, "digits").entries()
    most = max(sum(event.count for event in one.events if event == told) for one in entries)
    assert most == told.count
    assert {(one.what, one.part, one.law) for one in entries} == {
        ("tuning", "train", "geometric"),
        ("scores", "validation", "geometric"),
    }


def test_an_exact_choice_is_charged_every_trial_of_the_grid(tmp_path: Path, digits: Any) -> None:
    """Trials of two batch sizes have other events: the first one's alone would state less than all released."""
    grid = {"training": {"batch_size": "128+256"}}
    given = settings(
        tmp_path, privacy={"noise_multiplier": 2.0, "delta": DELTA, "secure": False}, tune={"exact": True, "grid": grid}
    )
    tuning = plan_tuning(parts(digits, given).train, given)
    small, large = (given.algorithm("dpsgd").events(of.plan) for of in tuning.points)
    assert small != large
    assert tuning.reference == merged((*small, *large))
    assert tuning.epsilon() == epsilon((*small, *large), DELTA).value


@pytest.mark.parametrize(("unit", "counted"), [("person", 360.0), ("image", 1797.0)])
def test_a_protected_units_records_count_as_one_in_a_score(
    tmp_path: Any, digits: Any, monkeypatch: Any, unit: str, counted: float
) -> None:
    """Five records are of each of 359 people, and two of the last: in the histogram a person weighs 1 or less."""
    given = settings(tmp_path)
    tuning = replace(plan_tuning(parts(digits, given).train, given), score_event=None)  # without noise
    given = replace(given, privacy=given.privacy.model_copy(update={"unit": unit}))
    monkeypatch.setattr(nodes, "network_of", lambda weights: None)
    monkeypatch.setattr(nodes, "predict", lambda *_, **__: torch.eye(10)[digits.labels])
    held = replace(digits, unit=torch.arange(len(digits)) // 5)
    noised = nodes._scored(None, held, tuning, given, 0)  # type: ignore[arg-type]
    (table,) = noised.counts.values()
    assert table.sum() == pytest.approx(counted)


@pytest.mark.parametrize(
    ("kind", "grouping", "expected"),
    [
        ("accuracy", "sex", 230 / 300),
        ("balanced_accuracy", "sex", (170 / 200 + 60 / 100) / 2),
        ("worst_group", "sex", 100 / 150),
        ("worst_group", "class", 60 / 100),
    ],
)
def test_a_score_is_the_figure_that_it_is_named_after(kind: str, grouping: str, expected: float) -> None:
    women, men = [[90, 10], [10, 40]], [[80, 20], [30, 20]]  # label, predicted
    counts = np.array([women, men], dtype=float)[..., None]
    assert score(Noised({"sex": counts}, {"sex": ("f", "m")}, ("0", "1"), 0.0), kind, grouping) == pytest.approx(
        expected
    )
    hidden = Noised({"sex": counts}, {"sex": ("f", "m")}, ("0", "1"), 1e6)
    assert score(hidden, kind, grouping) == pytest.approx(expected)
    absent = np.zeros((3, 3, 3, 1))  # nobody is of a third class or group
    absent[:2, :2, :2] = counts / 30  # and so few of the others that no group has ten
    few = Noised({"sex": absent}, {"sex": ("f", "m", "x")}, ("0", "1", "2"), 0.0)
    assert score(few, kind, grouping) == pytest.approx(expected)


def test_the_worst_group_is_sought_among_those_that_are_known_to_have_ten_records() -> None:
    """Of nine records one may have none right by chance."""
    counts = np.zeros((2, 2, 2, 1))
    counts[0, 0, :, 0], counts[1, 0, :, 0] = (60, 40), (0, 9)  # group, label, predicted
    assert score(Noised({"sex": counts}, {"sex": ("f", "m")}, ("0", "1"), 0.0), "worst_group", "sex") == 0.6


class Constant:
    """Stands for the noise: whatever it is to protect, this comes out."""

    margin = 0.0

    def perturb(self, values: torch.Tensor, **how: Any) -> torch.Tensor:
        return torch.arange(len(values), dtype=values.dtype)


def score_sees_nothing_but_noised_counts(digits: Any, given: Settings, monkeypatch: Any) -> bool:
    """The score of one model by two validation parts, when all that leaves the histogram is the same."""
    monkeypatch.setattr(nodes, "random_source", lambda privacy, seed: Constant())
    right = torch.eye(10)[digits.labels]
    tuning = plan_tuning(parts(digits, given).train, given)
    monkeypatch.setattr(nodes, "network_of", lambda weights: None)
    found = []
    for scores in (right, right.roll(1, dims=0)):
        monkeypatch.setattr(nodes, "predict", lambda network, features, scores=scores, **how: scores)
        noised = nodes._scored(None, digits, tuning, given, 0)  # type: ignore[arg-type]
        found.append(nodes.score(noised, "accuracy", "class"))
    return found[0] == found[1]


def test_a_score_without_noise_is_caught(tmp_path: Any, digits: Any, monkeypatch: Any) -> None:
    given = settings(tmp_path)
    assert score_sees_nothing_but_noised_counts(digits, given, monkeypatch)
    monkeypatch.setattr(Constant, "perturb", lambda self, values, **how: values)
    assert not score_sees_nothing_but_noised_counts(digits, given, monkeypatch)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"privacy": {"noise_multiplier": 2.0}}, "law of the number of trials"),
        ({"tune": {"grid": {}}}, "tune.grid is empty"),
        ({"tune": {"grid": {"training": {"learning_rate": None}}}}, "training.learning_rate has no values"),
        ({"tune": {"box": {"training": {"learning_rate": True}}}}, "learning_rate=True: give two numbers"),
        ({"tune": {"grid": {"data": {"keep": [1]}}}}, "Unknown block of settings in tune.grid 'data'"),
        ({"tune": {"grid": {"training": {"learning_rat": [1]}}}}, "Did you mean 'training.learning_rate'"),
        (
            {"tune": {"box": {"training": {"learning_rate": "2+0.1"}}}},
            r"tune\.box\.training\.learning_rate=2\+0\.1: give two",
        ),
        ({"tune": {"box": {"training": {"learning_rate": "0+1+log"}}}}, "whose ends are above 0"),
        ({"tune": {"grid": {"training": {"epochs": [1]}}, "sampler": "tpe"}}, "each trial depend on those before it"),
        (
            {"tune": {"grid": {"training": {"epochs": [1]}}, "box": {"training": {"epochs": "1+3"}}}},
            r"both have training\.epochs",
        ),
        ({"data": {"membership": "strata"}}, "data.membership=hash"),
        ({"data": {"evaluate_on": "validation"}}, "holds a validation part of its own"),
        ({"privacy": {"epsilon": 2.0, "epsilon_as": "published"} | LAW}, "states the guaranteed ε"),
        ({"release": {"unprotected": ["audit"]}}, "no exact figures and no audit"),
        ({"training": {"device": "cpu", "devices": 2}}, "leave training.devices out"),
        ({"tune": {"grid": {"training": {"devices": [1, 2]}}}}, "leave training.devices out"),
        (
            {"model": {"name": "scatter_linear"}, "tune": {"grid": {"model": {"options": {"scales": [1, 2]}}}}},
            r"model\.options\.scales=1 a model needs other features than model\.name=scatter_linear as it is set",
        ),
        (
            {"model": {"name": "scatter_linear"}, "tune": {"grid": {"model": {"name": ["logistic", "mlp"]}}}},
            r"model\.name=logistic a model needs other features",
        ),
        ({"tune": {"grid": {"model": {"name": ["logistic", "bilstm"]}}}}, "Model BiLstm takes text features"),
        ({"algorithm": "sa_dpsgd", "sa_dpsgd": {"options": {"energy": "test"}}}, "an energy of test records"),
        ({"algorithm": "sgd", "tune": {"grid": {"training": {"epochs": [1]}}}}, "its events must be fixed before"),
        ({"algorithm": "dpsgd_scatter", "tune": {"grid": {"training": {"epochs": [1]}}}}, "on the records as they are"),
        ({"algorithm": "dpis", "tune": {"grid": {"training": {"epochs": [1]}}}}, "its events must be fixed before"),
        (
            {
                "algorithm": "sa_dpsgd",
                "sa_dpsgd": {"options": {"energy": "private"}},
                "tune": {"grid": {"sa_dpsgd": {"options": {"energy": ["private", "test"]}}}},
            },
            "an energy of test records",
        ),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_any_trial(
    tmp_path: Any, digits: Any, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(EquidpError, match=message):
        plan_tuning(parts(digits, given := settings(tmp_path, **more)).train, given)
