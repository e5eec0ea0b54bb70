"""Per-group metrics equal those of masks made by hand; undefined values are None; costs are plain differences."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from fairlearn import metrics as fairness
from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_metric_name
from sklearn import metrics as sk

from equidp.evaluation.metrics import (
    METRICS,
    calibration_error,
    cost_of_privacy,
    evaluate,
    flat_metrics,
    metrics_document,
    slug,
    unique_slugs,
)
from equidp.tasks.classification import Classification

diverged, guessing, hardly = Classification.diverged, Classification.guessing, Classification.hardly

SEXES = ("Female", "Male", "Single", "Absent")
CLASSES = ("no", "yes")


@pytest.fixture
def binary():
    """200 records; group 2 has a single member, group 3 none."""
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 2, 200)
    ids = rng.integers(0, 2, 200)
    ids[17] = 2
    chance = np.clip(0.5 + 0.25 * (2 * labels - 1) * (ids == 0) + rng.normal(0, 0.2, 200), 0.01, 0.99)
    return np.stack([1 - chance, chance], axis=1), labels, ids


def by_hand(scores: np.ndarray, labels: np.ndarray) -> dict:
    """The same figures from one mask's records, for two classes."""
    predicted = (scores[:, 1] > scores[:, 0]).astype(int)
    both = len(np.unique(labels)) == 2
    recalls = [np.mean(predicted[labels == k] == k) for k in np.unique(labels)]
    return {
        "count": len(labels),
        "accuracy": np.mean(predicted == labels),
        "balanced_accuracy": np.mean(recalls) if both else None,
        "macro_f1": sk.f1_score(labels, predicted, average="macro") if both else None,
        "mcc": sk.matthews_corrcoef(labels, predicted) if both else None,
        "auroc": sk.roc_auc_score(labels, scores[:, 1]) if both else None,
        "loss": -np.mean(np.log(scores[np.arange(len(labels)), labels])),
        "calibration_error": calibration_error(labels, scores),
    }


def assert_same(measured: dict, expected: dict) -> None:
    assert set(measured) == set(expected)
    for name, value in expected.items():
        assert measured[name] == (None if value is None else pytest.approx(value, rel=1e-9)), name


def test_every_group_equals_its_mask_and_the_empty_group_is_listed(binary):
    scores, labels, ids = binary
    result = evaluate(scores, labels, {"sex": (ids, SEXES)}, classes=CLASSES)
    assert_same(result["overall"], by_hand(scores, labels))
    for k, name in enumerate(SEXES[:3]):
        assert_same(result["groups"]["sex"][name], by_hand(scores[ids == k], labels[ids == k]))
    assert result["groups"]["sex"]["Single"]["count"] == 1
    assert result["groups"]["sex"]["Absent"] == {"count": 0, **dict.fromkeys(METRICS)}


def test_in_the_class_grouping_accuracy_is_recall_and_comparisons_of_classes_are_undefined(binary):
    scores, labels, _ = binary
    result = evaluate(scores, labels, {"class": (labels, CLASSES)}, classes=CLASSES)
    recalls = sk.recall_score(labels, scores.argmax(1), average=None)
    for k, name in enumerate(CLASSES):
        figures = result["groups"]["class"][name]
        assert figures["accuracy"] == pytest.approx(recalls[k])
        assert {figures[name] for name in ("auroc", "mcc", "macro_f1", "balanced_accuracy")} == {None}
    assert result["disparity"] == {}
    worst = int(np.argmin(recalls))
    assert result["worst"]["class"] == {"group": CLASSES[worst], "accuracy": pytest.approx(recalls[worst])}


def test_multiclass_auroc_is_one_versus_rest_over_the_classes_that_occur():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 90)
    scores = rng.dirichlet(np.ones(3), 90) + 0.3 * np.eye(3)[labels]
    scores /= scores.sum(axis=1, keepdims=True)
    ids = (labels == 2).astype(int)  # group 0 lacks class 2, group 1 has nothing else
    result = evaluate(scores.astype(np.float32), labels, {"part": (ids, ("a", "b"))}, classes=("0", "1", "2"))
    assert result["overall"]["auroc"] == pytest.approx(sk.roc_auc_score(labels, scores, multi_class="ovr"), abs=1e-6)
    mask = ids == 0
    expected = np.mean([sk.roc_auc_score(labels[mask] == k, scores[mask, k]) for k in (0, 1)])
    assert result["groups"]["part"]["a"]["auroc"] == pytest.approx(expected, abs=1e-6)
    assert result["groups"]["part"]["b"]["auroc"] is None


def test_records_without_finite_scores_count_as_wrong_and_spoil_only_their_group(binary):
    scores, labels, ids = binary
    spoilt = scores.copy()
    first = int(np.flatnonzero((ids == 0) & (scores.argmax(1) == labels))[0])
    spoilt[first] = np.nan
    clean = evaluate(scores, labels, {"sex": (ids, SEXES)}, classes=CLASSES)["groups"]["sex"]
    result = evaluate(spoilt, labels, {"sex": (ids, SEXES)}, classes=CLASSES)["groups"]["sex"]
    size = clean["Female"]["count"]
    assert result["Female"]["accuracy"] == pytest.approx(clean["Female"]["accuracy"] - 1 / size)
    assert (result["Female"]["loss"], result["Female"]["auroc"], result["Female"]["calibration_error"]) == (None,) * 3
    assert result["Male"] == clean["Male"]
    # no prediction is no class of its own, whose F1 of 0 would bring the mean down by a third
    assert result["Female"]["macro_f1"] == pytest.approx(clean["Female"]["macro_f1"], abs=2 / size)


def test_no_test_record_at_all():
    result = evaluate(np.empty((0, 2)), np.empty(0, int), {"sex": (np.empty(0, int), SEXES)}, classes=CLASSES)
    assert result["overall"] == {"count": 0, **dict.fromkeys(METRICS)}
    assert result["worst"]["sex"] == {"group": None, "accuracy": None}
    assert set(result["disparity"]["sex"].values()) == {None}


def test_a_single_test_record():
    groups = {"sex": (np.array([1]), ("f", "m")), "class": (np.array([0]), ("a", "b"))}
    result = evaluate(np.array([[0.75, 0.25]]), np.array([0]), groups, classes=("a", "b"))
    assert result["overall"] == result["groups"]["sex"]["m"] == result["groups"]["class"]["a"]
    assert (result["overall"]["count"], result["overall"]["accuracy"]) == (1, 1.0)
    assert result["groups"]["sex"]["f"]["count"] == 0
    assert set(result["disparity"]["sex"].values()) == {None}


def test_disparity_is_fairlearns_record_by_record():
    draw = np.random.default_rng(0)
    scores, labels, ids = draw.random((200, 2)), draw.integers(0, 2, 200), draw.integers(0, 3, 200)
    found = evaluate(scores, labels, {"age": (ids, ("a", "b", "c"))}, classes=("n", "y"))["disparity"]["age"]
    predicted = scores.argmax(1)
    assert found == {
        name: getattr(fairness, name)(labels, predicted, sensitive_features=ids)
        for name in ("demographic_parity_difference", "demographic_parity_ratio", "equalized_odds_difference")
    }


def test_disparity_equals_rates_counted_by_hand():
    # group a: 4 records, group b: 4 records; predictions chosen so that rates are quarters and halves
    labels = np.array([1, 1, 0, 0, 1, 1, 0, 0])
    predicted = np.array([1, 1, 1, 0, 1, 0, 0, 0])
    ids = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    scores = np.where(np.eye(2)[predicted] == 1, 0.9, 0.1)
    disparity = evaluate(scores, labels, {"sex": (ids, ("a", "b"))}, classes=CLASSES)["disparity"]["sex"]
    # selected: a 3/4, b 1/4. True positive rates 1 and 1/2; false positive rates 1/2 and 0
    assert disparity == {
        "demographic_parity_difference": pytest.approx(0.5),
        "demographic_parity_ratio": pytest.approx(1 / 3),
        "equalized_odds_difference": pytest.approx(0.5),
    }


def test_equalised_odds_are_undefined_where_a_group_lacks_a_class():
    labels, ids = np.array([1, 0, 0, 0]), np.array([0, 0, 1, 1])
    scores = np.where(np.eye(2)[[1, 0, 0, 1]] == 1, 0.9, 0.1)
    disparity = evaluate(scores, labels, {"sex": (ids, ("a", "b"))}, classes=CLASSES)["disparity"]["sex"]
    assert disparity["equalized_odds_difference"] is None
    assert disparity["demographic_parity_difference"] == 0.0


def test_multiclass_disparity_is_the_mean_over_one_versus_rest():
    rng = np.random.default_rng(5)
    labels, ids = rng.integers(0, 3, 300), rng.integers(0, 2, 300)
    scores = rng.dirichlet(np.ones(3), 300)
    predicted = scores.argmax(1)
    disparity = evaluate(scores, labels, {"sex": (ids, ("a", "b"))}, classes=("0", "1", "2"))["disparity"]["sex"]
    parity, odds = [], []
    for k in range(3):
        given, true = predicted == k, labels == k
        parity.append(abs(given[ids == 0].mean() - given[ids == 1].mean()))
        rates = [abs(given[(ids == 0) & (true == t)].mean() - given[(ids == 1) & (true == t)].mean()) for t in (0, 1)]
        odds.append(max(rates))
    assert disparity["demographic_parity_difference"] == pytest.approx(np.mean(parity))
    assert disparity["equalized_odds_difference"] == pytest.approx(np.mean(odds))


def test_calibration_error_by_hand():
    # confidences .9 .9 .6 .6 (bins of width .1): right 1 of 2 and 2 of 2 → (2·|.5 − .9| + 2·|1 − .6|)/4 = .4
    scores = np.array([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]])
    assert calibration_error(np.array([0, 1, 1, 1]), scores, bins=10) == pytest.approx(0.4)
    assert calibration_error(np.array([0, 1]), np.array([[1.0, 0.0], [0.0, 1.0]])) == 0.0


def figures(accuracy: float | None, loss: float | None = 1.0) -> dict:
    return {"count": 4, **dict.fromkeys(METRICS), "accuracy": accuracy, "loss": loss}


def result(overall: float, **groups: float | None) -> dict:
    by_group = {name: figures(value) for name, value in groups.items()}
    return {"overall": figures(overall), "groups": {"sex": by_group}, "worst": {}, "disparity": {}}


def test_cost_is_what_is_lost_and_the_gap_its_spread():
    private, baseline = result(0.7, F=0.8, M=0.5, X=None), result(0.9, F=0.9, M=0.9, X=0.4)
    private["groups"]["sex"]["F"] |= {"loss": 1.5, "calibration_error": 0.3}
    baseline["groups"]["sex"]["F"]["calibration_error"] = 0.1
    cost = cost_of_privacy(private, baseline)
    assert cost["overall"]["accuracy"] == pytest.approx(0.2)
    by_sex = cost["groups"]["sex"]
    assert by_sex["F"]["accuracy"] == pytest.approx(0.1)
    assert by_sex["F"]["excess_loss"] == pytest.approx(0.5)
    assert by_sex["F"]["calibration_error"] == pytest.approx(0.2)
    assert by_sex["M"]["accuracy"] == pytest.approx(0.4)
    assert by_sex["X"]["accuracy"] is None
    assert cost["gap"]["sex"]["accuracy"] == pytest.approx(0.3)
    assert cost["gap"]["sex"]["mcc"] is None
    assert "count" not in by_sex["F"]
    assert "loss" not in by_sex["F"]


def test_beside_a_baseline_that_guesses_nothing_has_a_cost(binary):
    """Privacy would seem to be free beside a model that puts everybody into one class."""
    scores, labels, ids = binary
    groups = {"sex": (ids, SEXES)}
    private, flat = (evaluate(of, labels, groups, classes=CLASSES) for of in (scores, np.full_like(scores, [0.9, 0.1])))
    cost = cost_of_privacy(private, flat)
    assert set(cost["overall"].values()) == {None}
    assert set(cost["gap"]["sex"].values()) == {None}


def test_beside_a_baseline_that_diverged_nothing_has_a_cost(binary):
    scores, labels, ids = binary
    private = evaluate(scores, labels, {"sex": (ids, SEXES)}, classes=CLASSES)
    lost = evaluate(np.full_like(scores, np.nan), labels, {"sex": (ids, SEXES)}, classes=CLASSES)
    assert diverged(lost)
    assert not diverged(private)
    cost = cost_of_privacy(private, lost)
    assert set(cost["overall"].values()) == {None}
    assert {value for sex in cost["groups"]["sex"].values() for value in sex.values()} == {None}
    assert not [name for name in flat_metrics(metrics_document(private, lost)) if name.startswith("cost_of_privacy")]


def test_a_model_that_puts_all_into_one_class_has_learnt_nothing_however_accurate(binary):
    scores, labels, _ = binary
    frequent = np.eye(2)[np.full(len(labels), np.bincount(labels).argmax())]
    assert "has learnt nothing" in (guessing(evaluate(frequent, labels, {}, classes=CLASSES)) or "")
    assert guessing(evaluate(np.eye(2)[labels], labels, {}, classes=CLASSES)) is None
    assert guessing(evaluate(np.full_like(scores, np.nan), labels, {}, classes=CLASSES)) is None  # it has diverged


def test_a_model_of_one_class_whose_scores_rank_has_learnt(binary):
    _, labels, _ = binary
    ranking = np.stack([np.full(len(labels), 0.9), 0.1 + 0.1 * labels], axis=1)  # always class 0, higher for class 1
    said = guessing(evaluate(ranking, labels, {}, classes=CLASSES)) or ""
    assert "ranks the records (AUROC 1.00)" in said
    assert "learnt nothing" not in said


def test_a_model_barely_better_than_guesses_is_told_of_if_chance_explains_it():
    labels = np.repeat((0, 1), 100)
    few = np.eye(2)[np.r_[[0] * 95, [1] * 5, [0] * 90, [1] * 10]]  # φ = 0.094, below 1.645/√200 = 0.116
    said = hardly(evaluate(few, labels, {}, classes=CLASSES)) or ""
    assert "may be no better than guesses: MCC 0.09 and AUROC 0.52 on 200 records" in said
    assert guessing(evaluate(few, labels, {}, classes=CLASSES)) is None
    assert hardly(evaluate(np.tile(few, (2, 1)), np.tile(labels, 2), {}, classes=CLASSES)) is None  # of 400 it is not
    ranking = few * 0.2 + np.stack([1 - labels, labels], axis=1) * 0.1
    ranked = evaluate(ranking / ranking.sum(axis=1, keepdims=True), labels, {}, classes=CLASSES)
    assert ranked["overall"]["mcc"] == pytest.approx(0.094, abs=1e-3)
    assert hardly(ranked) is None


def test_of_guessing_models_one_in_twenty_has_a_larger_mcc():
    generator = np.random.default_rng(0)
    for share in (0.5, 0.1):
        labels = generator.random((4000, 300)) < share
        predicted = generator.random((4000, 300)) < 0.3
        # of two classes the MCC is Pearson's correlation
        above = [np.corrcoef(*pair)[0, 1] > 1.645 / math.sqrt(300) for pair in zip(labels, predicted, strict=True)]
        assert np.mean(above) == pytest.approx(0.05, abs=0.01)


def test_a_gap_needs_two_groups():
    assert cost_of_privacy(result(0.5, F=0.5), result(0.6, F=0.6))["gap"]["sex"]["accuracy"] is None


def test_document_is_strict_json_and_the_baseline_has_no_cost(binary):
    scores, labels, ids = binary
    evaluated = evaluate(scores, labels, {"sex": (ids, SEXES)}, classes=CLASSES)
    text = json.dumps(metrics_document(evaluated, evaluated), allow_nan=False)
    document = json.loads(text)
    figures = {"overall", "groups", "worst", "spread", "disparity", "rates", "positive_class", "intervals"}
    assert set(document) == figures | {"baseline", "cost_of_privacy"}
    assert document["cost_of_privacy"]["gap"]["sex"]["accuracy"] == 0
    assert "cost_of_privacy" not in metrics_document(evaluated, None)


def test_flat_names_are_the_contract_and_mlflow_takes_them(binary):
    scores, labels, ids = binary
    odd = ("Fe/male", "<30", "≥30 & more", "*")
    evaluated = evaluate(scores, labels, {"sex*age": (ids, odd), "class": (labels, CLASSES)}, classes=CLASSES)
    flat = flat_metrics(metrics_document(evaluated, evaluated))
    assert {
        "test/accuracy",
        "test/accuracy/class:yes",
        "baseline/accuracy",
        "cost_of_privacy/accuracy/class:no",
        "cost_of_privacy/gap/class",
        "test/worst_group_accuracy/class",
        "test/accuracy/sex x age:lt 30",
    } <= set(flat)
    assert all(re.fullmatch(r"[A-Za-z0-9_\-.:/ ]{1,250}", name) for name in flat)
    assert all(isinstance(v, float) and math.isfinite(v) for v in flat.values())
    assert not any(name.endswith("auroc/class:yes") for name in flat)


def test_a_group_of_a_few_records_decides_nothing(binary):
    scores, labels, ids = binary
    scores[17] = scores[17, ::-1] if scores[17].argmax() == labels[17] else scores[17]  # the single one is wrong
    names = ("a", "b", "single", "nobody")
    private = evaluate(scores, labels, {"site": (ids, names)}, classes=CLASSES)
    others = evaluate(scores[ids < 2], labels[ids < 2], {"site": (ids[ids < 2], names)}, classes=CLASSES)
    assert private["groups"]["site"]["single"]["accuracy"] == 0
    assert private["worst"] == others["worst"]
    assert private["disparity"] == others["disparity"]
    right = np.eye(2)[labels]
    baseline = evaluate(right, labels, {"site": (ids, names)}, classes=CLASSES)
    costs = cost_of_privacy(private, baseline)
    assert costs["groups"]["site"]["single"]["accuracy"] == 1
    assert costs["gap"]["site"]["accuracy"] == pytest.approx(
        abs(costs["groups"]["site"]["a"]["accuracy"] - costs["groups"]["site"]["b"]["accuracy"])
    )
    # where none has ten, all are told: it is the reader who must doubt them
    few = evaluate(scores[:6], labels[:6], {"site": (ids[:6], names)}, classes=CLASSES)
    assert few["worst"]["site"]["accuracy"] is not None


def test_no_two_groupings_share_a_name(binary):
    scores, labels, ids = binary
    names = tuple(f"g{k}" for k in range(4))
    groups = {"性別": (ids, names), "年齢": (np.zeros_like(ids), ("all",))}
    evaluated = evaluate(scores, labels, groups, classes=CLASSES)
    flat = flat_metrics(metrics_document(evaluated, evaluated))
    worst = {name: value for name, value in flat.items() if name.startswith("test/worst_group_accuracy/")}
    assert len(worst) == 2
    assert sorted(worst.values()) == sorted(one["accuracy"] for one in evaluated["worst"].values())


def test_no_two_groups_share_a_slug():
    names = ("<30", "a/b", "a|b", "a:b", "a_b_2")
    slugs = unique_slugs(names)
    assert slugs["<30"] == "lt 30"
    assert len(set(slugs.values())) == len(names)
    assert slug("///") == "___"


@pytest.mark.parametrize("name", [".", "..", "How often did you see a doctor? " * 20])
def test_mlflow_takes_the_metrics_of_any_group(name):
    slugs = unique_slugs([name, name + "?"])
    for one in slugs.values():
        for metric in (
            f"cost_of_privacy/demographic_parity_difference/{slugs[name]}:{one}",
            f"test/worst_group_accuracy/{one}",
        ):
            _validate_metric_name(metric)
            assert len(metric) <= MAX_ENTITY_KEY_LENGTH


@pytest.mark.parametrize(
    ("labels", "ids", "message"),
    [
        (np.zeros(3, int), np.zeros(2, int), "labels have shape"),
        (np.zeros(2, int), np.zeros(3, int), "groups"),
        (np.zeros(2, int), np.array([0, 7]), "outside 0..3"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(labels, ids, message):
    with pytest.raises(ValueError, match=message):
        evaluate(np.full((2, 2), 0.5), labels, {"sex": (ids, SEXES)}, classes=CLASSES)
    with pytest.raises(ValueError, match="scores have shape"):
        evaluate(np.full((2, 3), 0.3), np.zeros(2, int), {}, classes=CLASSES)


def test_outputs_that_are_no_probabilities_are_refused():
    """Each row was divided by its sum: of log_softmax that is below 0, and every right answer was a wrong one."""
    labels = np.array([0, 1])
    with pytest.raises(ValueError, match="no probabilities: give softmax"):
        evaluate(np.log([[0.9, 0.1], [0.2, 0.8]]), labels, {}, classes=CLASSES)
    rounded = np.array([[1 + 1e-9, -1e-9], [0.0, 1.0]])  # what is left of 1
    assert evaluate(rounded, labels, {}, classes=CLASSES)["overall"]["accuracy"] == 1.0
    diverged = np.array([[np.nan, -1.0], [0.0, 1.0]])  # a wrong prediction, as before
    assert evaluate(diverged, labels, {}, classes=CLASSES)["overall"]["accuracy"] == 0.5
