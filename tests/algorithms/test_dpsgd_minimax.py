"""A loss steered by counted errors: what is counted, at which weights, and what a record can move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equidp.algorithms import algorithm_settings
from equidp.algorithms.dpsgd_minimax import ErrorCounts, ShiftedByGroup, Steered
from equidp.errors import EquidpError
from equidp.gradients.losses import CrossEntropy
from equidp.mechanism.parts import ExponentialAverage
from equidp.mechanism.sampling import Examples, Population
from equidp.training import partition

CLASSES = 3


def shifts(lab: Any, released: Tensor, steps: int, classes: int = 0, **options: Any) -> Tensor:
    """`[T, M]`: the shift after each of the released counts `[T, 2M]`, of a run of so many steps."""
    release, public = algorithm_settings("dpsgd_minimax", options).build().side_release, dict[str, Tensor]()
    plan = lab.plan(epochs=max(1, steps // 4), groups=released.shape[1] // 2, classes=classes)
    found = []
    for noised in released:
        public |= release.later(noised, public, lab.facts(plan))
        found.append(public["shift"])
    return torch.stack(found)


def crossed(lab: Any, groups: Tensor, labels: Tensor, features: Tensor) -> tuple[Any, dict[str, Any]]:
    """A plan and arguments for records of classes within groups: cell a·K + y."""
    cells = groups * CLASSES + labels
    plan = lab.plan(records=len(labels), groups=2 * CLASSES, classes=CLASSES)
    return plan, {"population": Population(Examples(features, labels), cells), "plan": plan}


def test_a_class_that_stays_wrong_is_pulled_on_and_on_and_no_farther_than_the_limit(lab: Any) -> None:
    counts = torch.tensor([[9.0, 1.0, 1.0, 1.0, 9.0, 9.0]]).expand(40, 6)
    found = shifts(lab, counts, 40, count_noise_multiplier=0.01, margin=0.0)
    behind = (found - found[0])[:, 0]
    assert (behind.diff()[:5] < 0).all()
    assert behind[-1] == pytest.approx(-6.0 + 40 / 40 * 0.8 * 4 / 9, abs=1e-3)  # from its first pull to the limit
    assert torch.equal(found[-1][1], found[-1][2])


def test_a_class_that_has_always_been_wrong_is_allowed_for_by_the_margin_times_its_errors(lab: Any) -> None:
    """Nothing is pulled; of classes of one size the first is wrong 9 times in 10, the others once."""
    counts = torch.tensor([[9.0, 1.0, 1.0, 1.0, 9.0, 9.0]]).expand(8, 6)
    found = shifts(lab, counts, 8, count_noise_multiplier=0.01, margin=3.0, pull=0.0)[-1]
    assert float(found[1] - found[0]) == pytest.approx(3.0 * (0.9 - 0.1), rel=1e-4)


def test_errors_beyond_what_there_can_be_are_allowed_for_by_no_more_than_the_margin(lab: Any) -> None:
    """As noise makes them: of 10 records of class 0 30 are wrong, of class 1 fewer than none."""
    counts = torch.tensor([[30.0, -20.0, 5.0, -20.0, 30.0, 5.0]]).expand(8, 6)
    found = shifts(lab, counts, 8, count_noise_multiplier=0.01, margin=3.0, pull=0.0)[-1]
    assert float(found[1] - found[0]) == pytest.approx(3.0, rel=1e-4)


def test_in_a_run_as_short_as_the_window_the_recent_errors_are_the_latest(lab: Any) -> None:
    """Class 0, behind at first and ahead then, is pulled back by as much."""
    early = [9.0, 1.0, 5.0, 1.0, 9.0, 5.0]
    late = [1.0, 9.0, 5.0, 9.0, 1.0, 5.0]
    found = shifts(lab, torch.tensor([early, late]), 8, count_noise_multiplier=0.01, margin=0.0, adjustment=0.0)
    assert found[0][0] < 0 < found[0][1]
    assert float(found[1][0]) == pytest.approx(float(found[1][1]), abs=1e-5)


def test_classes_with_equal_errors_are_left_alone(lab: Any) -> None:
    counts = torch.tensor([[3.0, 3.0, 3.0, 7.0, 7.0, 7.0]]).expand(20, 6)
    found = shifts(lab, counts, 20, count_noise_multiplier=0.01)
    assert torch.allclose(found, found[0].expand_as(found))


@pytest.mark.parametrize("lead", [None, 1.0])
def test_classes_that_look_alike_swing_unless_the_steering_is_led(lab: Any, lead: float | None) -> None:
    """A model that follows the shifts late, and errors that pass from class to class within a small shift."""
    plan = lab.plan(records=20_000, batch_size=256, epochs=20, groups=2, noise_multiplier=1.0)
    release, public = ErrorCounts(lead=lead), {}
    sizes, follows, wrong = torch.tensor([40.0, 40.0]), 0.0, []
    for _ in range(plan.steps):
        shift = public.get("shift", torch.zeros(2))
        follows += (float(shift[1] - shift[0]) - follows) / 100  # of the averaged model
        first = torch.sigmoid(torch.tensor(-8.0 * (follows - 0.3)))
        wrong.append(float(first))
        errors = sizes * torch.stack([first, 1 - first])
        public |= release.later(torch.cat([errors, sizes - errors]), public, lab.facts(plan))
    late = wrong[-plan.steps // 3 :]
    swing = max(late) - min(late)
    assert swing < 0.1 if lead else swing > 0.5
    if lead:
        assert sum(late) / len(late) == pytest.approx(0.5, abs=0.05)


def test_led_steering_stays_within_its_limits(lab: Any) -> None:
    counts = torch.tensor([[9.0, 1.0, 1.0, 1.0, 9.0, 9.0]]).expand(40, 6)
    found = shifts(lab, counts, 40, count_noise_multiplier=0.01, margin=0.0, lead=1.0)
    behind = (found - found[0])[:, 0]
    pulled = 40 / 40 * 0.8 * 4 / 9
    assert behind[-1] == pytest.approx(-6.0 + pulled * (1 + 40 / 15), abs=1e-3)  # from its first pull to the limit


def test_classes_are_compared_within_their_own_group(lab: Any) -> None:
    """All of group 1 is hard: no class of it is harder than the other, so nothing of it is pulled."""
    counts = torch.tensor([[1.0, 5.0, 9.0, 9.0, 9.0, 5.0, 1.0, 1.0]]).expand(8, 8)
    found = shifts(lab, counts, 8, classes=2, count_noise_multiplier=0.01, margin=0.0, adjustment=0.0)[-1]
    assert found[0] > 0 > found[1]
    assert found[2] == pytest.approx(found[3])


@pytest.mark.slow
def test_counts_that_are_all_noise_steer_a_shift_by_half_on_average(lab: Any) -> None:
    """Of 400 steps of pure noise around cells of 20 records, as wrong as each other."""
    steps, noise = 400, 50.0
    stream = torch.Generator().manual_seed(0)
    ends = []
    for _ in range(20):
        counts = torch.full((steps, 20), 10.0) + noise * torch.randn(steps, 20, generator=stream)
        found = shifts(lab, counts, steps, count_noise_multiplier=noise, margin=0.0, adjustment=0.0, pull=1000.0)
        ends.append(found[-1])
    assert 0.1 < float(torch.stack(ends).std()) < 0.6


@pytest.mark.parametrize("sizes", [[2000.0, 0.0], [400.0] * 9 + [0.0], [500.0] * 7 + [0.0] * 3])
def test_a_cell_without_records_hardly_moves_the_others(lab: Any, sizes: list[float]) -> None:
    """It seems wrong half of the time: in the plain mean it moved them by 1.1, 0.8 and 2.2 on average."""
    steps, noise, each = 75, 12.0, torch.tensor(sizes)
    stream, ends = torch.Generator().manual_seed(0), []
    for _ in range(20):
        exact = torch.cat([0.2 * each, 0.8 * each]).expand(steps, 2 * len(sizes))
        counts = exact + noise * torch.randn(exact.shape, generator=stream)
        found = shifts(lab, counts, steps, count_noise_multiplier=noise, margin=0.0, adjustment=0.0)
        ends.append(found[-1])
    assert float(torch.stack(ends).mean(0).abs().max()) < 0.25


def test_a_record_is_trained_at_the_shifts_of_its_own_group() -> None:
    loss = ShiftedByGroup(CrossEntropy(), torch.tensor([[0.0, 1.0, 2.0], [3.0, -4.0, 5.0]]))
    outputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    groups, labels = torch.tensor([0, 1, 1, 0]), torch.tensor([2, 0, 1, 1])
    found = loss(outputs, groups * 3 + labels)
    by_hand = torch.nn.functional.cross_entropy(outputs + loss.rows[groups], labels, reduction="none")
    assert torch.equal(found, by_hand)
    (slope,) = torch.autograd.grad(found.sum(), outputs)
    known = loss.gradient(outputs.detach(), groups * 3 + labels)
    assert known is not None
    assert torch.equal(known, slope)


def test_a_record_is_wrong_by_the_outputs_without_shift_and_columns_of_an_audit_count_for_nothing() -> None:
    loss = ShiftedByGroup(CrossEntropy(), torch.tensor([[0.0, 0.0, 9.0], [9.0, 0.0, 0.0]]))
    outputs = torch.tensor([[0.0, 1.0, 0.0, 7.0, 7.0], [0.0, 1.0, 0.0, 7.0, 7.0]])
    assert loss.wrong(outputs, torch.tensor([1, 3 + 0])).tolist() == [False, True]


def test_errors_are_counted_at_the_weights_that_would_leave_the_run(lab: Any) -> None:
    averaged = replace(algorithm_settings("dpsgd_minimax").build(), released_weights=ExponentialAverage(decay=0.9))
    trainer = lab.trainer("dpsgd_minimax", algorithm=averaged, learning_rate=5.0)
    trainer.train(progress=False)
    trained = trainer.engine.flatten()
    batch = trainer.batch(torch.arange(40))
    found = trainer.errors(batch)
    assert torch.equal(trainer.engine.flatten(), trained)  # to the last bit
    records = lab.records()
    by_hand = (trainer.released_model()(records.features).argmax(1) != records.labels).float()
    assert torch.equal(found, by_hand)
    assert not torch.equal(found, (trainer.model(records.features).argmax(1) != records.labels).float())


@pytest.mark.parametrize("average", [None, 0.9])
@pytest.mark.parametrize("kind", ["soft", "kept"])
def test_errors_that_are_no_bool_for_each_record_are_refused(lab: Any, kind: str, average: float | None) -> None:
    """The probability of the other classes is no number where features are none, and a column meets every record."""
    trainer = lab.trainer("dpsgd_minimax", algorithm=algorithm_settings("dpsgd_minimax").build().averaged(average))
    soft = {
        "soft": lambda z, y: 1 - z.softmax(1).gather(1, y[:, None] % CLASSES)[:, 0],
        "kept": lambda z, y: z.argmax(1, keepdim=True) != y[:, None],
    }
    trainer.pursuing.wrong = soft[kind]
    with pytest.raises(EquidpError, match="one bool for each record"):
        trainer.run_steps(1)
    assert len(trainer.ledger.done) == 1


def test_parameters_are_the_trained_ones_again_where_the_model_fails(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    averaged = replace(algorithm_settings("dpsgd_minimax").build(), released_weights=ExponentialAverage(decay=0.9))
    trainer = lab.trainer("dpsgd_minimax", algorithm=averaged, learning_rate=5.0)
    trainer.train(progress=False)
    trained, batch = trainer.engine.flatten(), trainer.batch(torch.arange(40))
    trainer.errors(batch)

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr(trainer.engine.passes, "outputs", fail)  # a hook would be tried first
    with pytest.raises(ValueError, match="on purpose"):
        trainer.errors(batch)
    assert torch.equal(trainer.engine.flatten(), trained)


def test_a_unit_moves_the_counts_by_the_shares_of_its_records(lab: Any) -> None:
    features, labels = torch.eye(6)[:5], torch.tensor([0, 1, 2, 0, 1])
    unit = torch.tensor([0, 0, 0, 1, 1])
    population = Population(Examples(features, labels, unit), labels, by_unit=True)
    plan = lab.plan(records=2, batch_size=1)
    trainer = lab.trainer("dpsgd_minimax", plan=plan, population=population, model=nn.Linear(6, CLASSES))
    with torch.no_grad():
        trainer.model.weight.zero_()
        trainer.model.bias.copy_(torch.tensor([1.0, 0.0, 0.0]))  # all are taken for class 0
    batch = trainer.batch(torch.arange(2))
    shares = trainer.errors(batch)
    assert shares.tolist() == pytest.approx([2 / 3, 1 / 2])
    release = trainer.algorithm.side_release
    exact = release.statistic(shares, batch.groups, trainer.public, plan)
    assert exact.tolist() == pytest.approx([2 / 3 + 1 / 2, 0, 0, 1 / 3 + 1 / 2, 0, 0])
    for k in range(2):
        others = torch.arange(2) != k
        without = release.statistic(shares[others], batch.groups[others], trainer.public, plan)
        assert float((exact - without).norm()) <= release.sensitivity()


@pytest.mark.parametrize("given", [torch.inf, 7.0, -3.0])
def test_whatever_the_statistic_is_given_a_record_moves_it_by_no_more_than_one(lab: Any, given: float) -> None:
    seen, groups = torch.tensor([given, 1.0, 0.0]), torch.tensor([0, 1, 2])
    exact = ErrorCounts().statistic(seen, groups, {}, lab.plan())
    without = ErrorCounts().statistic(seen[1:], groups[1:], {}, lab.plan())
    assert float((exact - without).norm()) <= 1.0


def test_classes_within_groups_are_trained_in_chunks_as_at_once(lab: Any) -> None:
    records = lab.records()
    groups = torch.arange(40) % 2
    plan, given = crossed(lab, groups, records.labels, records.features)
    whole = lab.trained("dpsgd_minimax", **given)
    chunked = lab.trained("dpsgd_minimax", physical_batch_size=3, **given)
    assert torch.allclose(whole.parameters, chunked.parameters, atol=1e-6)
    assert whole.trainer.public["shift"].shape == (plan.groups,)
    rows = whole.trainer.pursuing.rows
    assert torch.equal(rows.flatten(), whole.trainer.public["shift"])
    assert not torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("by_unit", [False, True])
def test_one_forward_pass_serves_errors_and_norms_at_the_weights_that_are_trained(
    lab: Any, averaged: bool, by_unit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = algorithm_settings("dpsgd_minimax").build()
    if averaged:
        algorithm = replace(algorithm, released_weights=ExponentialAverage(decay=0.9))
    records = lab.records()
    examples = Examples(records.features, records.labels, torch.arange(40) // 2 if by_unit else None)
    given = {"population": Population(examples, records.labels, by_unit=by_unit), "learning_rate": 5.0}
    if by_unit:
        given["plan"] = lab.plan(records=20, batch_size=5)
    passes = []

    def counted(features: Tensor) -> Tensor:
        passes.append(1)
        return outputs(features)

    trainer = lab.trainer("dpsgd_minimax", algorithm=algorithm, **given)
    trainer.run_steps(1)
    outputs = trainer.engine.passes.outputs
    monkeypatch.setattr(trainer.engine.passes, "outputs", counted)  # a hook of the model would be tried
    trainer.run_steps(2)
    assert len(passes) == (4 if averaged else 2)
    apart = lab.trainer("dpsgd_minimax", algorithm=algorithm, **given)
    monkeypatch.setattr(apart, "norms_and_errors", lambda batches, _: (None, [apart.errors(b) for b in batches]))
    apart.run_steps(3)
    assert torch.equal(apart.engine.flatten(), trainer.engine.flatten())
    assert all(torch.equal(apart.public[name], value) for name, value in trainer.public.items())


@pytest.mark.parametrize(
    ("grouping", "told"),
    [
        ("class", "class"), ("sex", "class"), ("sex*race", "class"), ("sex*class", "sex*class"),
        ("class * sex", "sex*class"), ("sex*class*race", "sex*race*class"),
    ],
)  # fmt: skip
def test_its_partition_is_the_classes_or_a_product_that_ends_in_them(grouping: str, told: str) -> None:
    assert partition(algorithm_settings("dpsgd_minimax").build(), grouping) == told
    assert partition(algorithm_settings("dpsgd_level").build(), grouping) == "class"
    assert partition(algorithm_settings("dpsgd_f").build(), grouping) == grouping


def test_a_partition_that_the_classes_do_not_divide_is_refused(lab: Any) -> None:
    plan = lab.plan(groups=4, classes=3)
    with pytest.raises(EquidpError, match="partition has 4 groups, which are not all 3 classes of every group"):
        Steered().start(CrossEntropy(), plan, torch.device("cpu"))


@pytest.mark.parametrize("name", ["dpsgd_minimax", "dpsgd_level"])
def test_groups_that_are_not_the_classes_are_refused(lab: Any, name: str) -> None:
    """With one group for everybody nothing would ever be wrong, and the loss would allow for nothing."""
    records = lab.records()
    population = Population(records, torch.zeros_like(records.labels))
    with pytest.raises(EquidpError, match="labels are from 0 to 2, and the groups of the plan stand for 1 classes"):
        lab.trainer(name, plan=lab.plan(groups=1), population=population)


def test_a_label_below_zero_is_refused(lab: Any) -> None:
    """Coded with its group it would be a class of the group before."""
    records, groups = lab.records(), torch.arange(40) % 2
    plan, given = crossed(lab, groups, records.labels, records.features)
    spoilt = records.labels.index_fill(0, torch.tensor([5]), -1)
    population = Population(Examples(records.features, spoilt), given["population"].groups)
    with pytest.raises(EquidpError, match="labels are from -1 to 2, and the groups of the plan stand for 3 classes"):
        lab.trainer("dpsgd_minimax", plan=plan, population=population)


@pytest.mark.parametrize("name", ["dpsgd_minimax", "dpsgd_level"])
def test_groups_that_stand_for_more_classes_than_there_are_outputs_are_refused(lab: Any, name: str) -> None:
    """As where a plan of classes within groups is not told the classes: all would train at the first group's shifts."""
    records, groups = lab.records(), torch.arange(40) % 2
    plan, given = crossed(lab, groups, records.labels, records.features)
    trainer = lab.trainer(name, **{**given, "plan": replace(plan, classes=0)})
    with pytest.raises(EquidpError, match="model has 3 outputs, and the groups of the plan stand for 6 classes"):
        trainer.train(progress=False)


@pytest.mark.parametrize("energy", ["public", "test"])
def test_an_acceptance_that_looks_at_records_without_a_group_is_refused(energy: str) -> None:
    options = {
        "objective": "steered", "weights": "flat", "side_release": "error_counts",
        "acceptance": {"name": "annealing", "energy": energy},
        "initial": {"clip_norm": 1.0},
    }  # fmt: skip
    with pytest.raises(EquidpError, match="asks for the loss of records whose group is not known"):
        algorithm_settings("custom", options).build()


def test_custom_of_its_parts_is_it(lab: Any) -> None:
    options = {
        "objective": "steered", "weights": "flat", "side_release": "error_counts",
        "initial": {"clip_norm": 1.0},
    }  # fmt: skip
    assert torch.equal(lab.trained("custom", options).parameters, lab.trained("dpsgd_minimax").parameters)
