"""DPSGD-F with logit adjustment: the loss allows for the remembered shares, and for nothing that was not released."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from equidp.algorithms import algorithm_settings
from equidp.engine.losses import CrossEntropy, Shifted
from equidp.errors import EquidpError
from equidp.training import groups_of

SHARES = torch.tensor([0.7, 0.25, 0.05])


def test_without_adjustment_it_is_dpsgd_f_smooth(lab: Any) -> None:
    found, expected = lab.trained("dpsgd_f_adjusted", {"adjustment": 0.0}), lab.trained("dpsgd_f_smooth")
    assert torch.equal(found.trainer.engine.flatten(), expected.trainer.engine.flatten())


def test_shares_are_the_remembered_sizes(lab: Any) -> None:
    """Noise of ±30 around sizes 4, 9 and 2 averages out."""
    release, plan = algorithm_settings("dpsgd_f_adjusted", {"memory": 0.9999}).build().side_release, lab.plan()
    stream, public = torch.Generator().manual_seed(0), {}
    for _ in range(20_000):
        noised = torch.tensor([1.0, 9.0, 0.5, 3.0, 0.0, 1.5]) + 30 * torch.randn(6, generator=stream)
        public |= release.later(noised, public, plan)
    assert public["group_shares"].tolist() == pytest.approx([4 / 15, 9 / 15, 2 / 15], rel=0.2)


def test_a_class_that_is_never_counted_keeps_a_share(lab: Any) -> None:
    release = algorithm_settings("dpsgd_f_adjusted").build().side_release
    shares = release.later(torch.tensor([5.0, 3.0, -90.0, 4.0, 0.0, -9.0]), {}, lab.plan())["group_shares"]
    assert shares.tolist() == pytest.approx([9 / 13, 3 / 13, 1 / 13])


def test_a_steps_loss_is_that_of_the_counts_of_earlier_steps(lab: Any) -> None:
    trainer = lab.trainer("dpsgd_f_adjusted", {"adjustment": 2.0})
    outputs, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 2, 0])
    assert torch.equal(trainer.engine.loss(outputs, labels), F.cross_entropy(outputs, labels, reduction="none"))
    seen, told = [], trainer.contributing.norms
    trainer.contributing.norms = lambda batch: seen.append(trainer.engine.loss.shift.clone()) or told(batch)
    for step in range(3):
        before = trainer.public["group_shares"]
        trainer.run_steps(1)
        assert torch.equal(seen[step], 2.0 * before.log().expand(3))
        assert not torch.equal(trainer.public["group_shares"], before)
    expected = F.cross_entropy(outputs + 2.0 * trainer.public["group_shares"].log(), labels, reduction="none")
    assert torch.equal(trainer.engine.loss(outputs, labels), expected)


def test_a_resumed_run_goes_on_with_the_same_loss(lab: Any) -> None:
    whole, first, second = (lab.trainer("dpsgd_f_adjusted") for _ in range(3))
    whole.run_steps(4)
    first.run_steps(2)
    second.load_state_dict(first.state_dict())
    second.run_steps(2)
    assert torch.equal(second.engine.flatten(), whole.engine.flatten())


def test_it_costs_what_dpsgd_f_costs(lab: Any) -> None:
    events = [algorithm_settings(name).build().events(lab.plan()) for name in ("dpsgd_f", "dpsgd_f_adjusted")]
    assert events[0] == events[1]


def test_shares_are_in_the_history(lab: Any) -> None:
    last = lab.trained("dpsgd_f_adjusted").history[-1]
    assert {"clip_norm/2", "group_shares/2"} <= set(last)
    assert not [name for name in last if "remembered" in name]


def test_groups_that_are_not_the_classes_are_refused(lab: Any) -> None:
    plain = lab.records()
    records = dataclasses.replace(
        plain,
        groups={**plain.groups, "sex": plain.labels % 2},
        schema=dataclasses.replace(plain.schema, groupings={**plain.schema.groupings, "sex": ("f", "m")}),
    )
    adjusted, smooth = (algorithm_settings(name).build() for name in ("dpsgd_f_adjusted", "dpsgd_f_smooth"))
    assert groups_of(adjusted, records, "class")[1] == records.schema.classes
    assert groups_of(smooth, records, "sex")[1] == ("f", "m")
    with pytest.raises(EquidpError, match="put class first in data"):
        groups_of(adjusted, records, "sex")


def test_an_adjusted_loss_without_shares_is_refused() -> None:
    with pytest.raises(EquidpError, match="needs group_shares, which GroupClipCounts does not release"):
        algorithm_settings("custom", {"objective": "logit_adjusted", "side_release": "group_clip_counts"}).build()


class TestShifted:
    def test_it_is_the_loss_of_the_sum_and_knows_its_gradient(self) -> None:
        outputs, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 2])
        loss, leaf = Shifted(CrossEntropy(), SHARES.log()), (outputs + SHARES.log()).requires_grad_()
        values = F.cross_entropy(leaf, labels, reduction="none")
        assert torch.equal(loss(outputs, labels), values)
        assert torch.equal(loss.gradient(outputs, labels), *torch.autograd.grad(values.sum(), [leaf]))

    def test_of_a_loss_that_does_not_know_its_gradient_nor_does_it(self) -> None:
        assert Shifted(lambda z, y: z.sum(1), SHARES).gradient(torch.zeros(4, 3), torch.zeros(4)) is None

    def test_columns_beyond_the_classes_stay_as_they_are(self) -> None:
        seen = Shifted(lambda z, y: z, SHARES)(torch.zeros(2, 5), torch.zeros(2))
        assert seen.tolist() == torch.tensor([[*SHARES, 0, 0]] * 2).tolist()
