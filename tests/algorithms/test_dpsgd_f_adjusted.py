"""DPSGD-F with logit adjustment: the loss allows for the remembered shares, and for nothing that was not released."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from equidp.algorithms import algorithm_settings
from equidp.errors import EquidpError
from equidp.gradients.losses import CrossEntropy, Shifted
from equidp.training import groups_of

SHARES = torch.tensor([0.7, 0.25, 0.05])


def shares(lab: Any, released: Tensor, **options: Any) -> Tensor:
    """π̂^k after the last of the released counts `[T, 2K]`; the noise multiplier is 1."""
    release, public = algorithm_settings("dpsgd_f_adjusted", options).build().side_release, dict[str, Tensor]()
    for noised in released:
        public |= release.later(noised, public, lab.facts())
    return public["group_shares"]


def test_without_adjustment_it_is_dpsgd_f_smooth(lab: Any) -> None:
    found = lab.trained("dpsgd_f_adjusted", {"adjustment": 0.0, "count_noise_multiplier": "10x"})
    assert torch.equal(found.parameters, lab.trained("dpsgd_f_smooth").parameters)


@pytest.mark.slow
def test_shares_are_those_of_all_counts_so_far(lab: Any) -> None:
    """Noise of ±30 around sizes 4, 9 and 2 averages out, however short the memory of the bounds."""
    sizes = torch.tensor([1.0, 9.0, 0.5, 3.0, 0.0, 1.5])
    noise = 30 * torch.randn(20_000, 6, generator=torch.Generator().manual_seed(0))
    found = shares(lab, sizes + noise, count_noise_multiplier=30.0, memory=0.5)
    assert found.tolist() == pytest.approx([4 / 15, 9 / 15, 2 / 15], rel=0.2)


def test_counts_that_are_all_noise_tell_nothing(lab: Any) -> None:
    released = torch.tensor([[30.0, 2.0, -90.0, 4.0, 0.0, -9.0]])
    assert shares(lab, released, count_noise_multiplier=100.0).tolist() == pytest.approx([1 / 3] * 3)


def test_a_class_that_is_never_counted_keeps_the_share_of_one_record(lab: Any) -> None:
    """B/N = 1/4 of a record in a batch, where the noise is less than that."""
    released = torch.tensor([[5.0, 3.0, -90.0, 4.0, 0.0, -9.0]])
    found = shares(lab, released, count_noise_multiplier=0.01)
    assert found.tolist() == pytest.approx([9 / 12.25, 3 / 12.25, 0.25 / 12.25])


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


def test_dpsgd_f_adjusted_costs_what_dpsgd_f_costs_with_the_same_counts(lab: Any) -> None:
    options = {"count_noise_multiplier": "5x"}
    plain, adjusted = algorithm_settings("dpsgd_f", options), algorithm_settings("dpsgd_f_adjusted")
    assert plain.build().events(lab.plan()) == adjusted.build().events(lab.plan())


def test_shares_are_in_the_history(lab: Any) -> None:
    last = lab.trained("dpsgd_f_adjusted").history[-1]
    assert {"clip_norm/2", "group_shares/2"} <= set(last)
    assert not [name for name in last if "remembered" in name or "counted" in name]


def test_its_groups_are_the_classes_whatever_is_named(lab: Any) -> None:
    plain = lab.records()
    records = dataclasses.replace(
        plain,
        groups={**plain.groups, "sex": plain.labels % 2},
        schema=dataclasses.replace(plain.schema, groupings={**plain.schema.groupings, "sex": ("f", "m")}),
    )
    adjusted, smooth = (algorithm_settings(name).build() for name in ("dpsgd_f_adjusted", "dpsgd_f_smooth"))
    assert groups_of(adjusted, records, "class")[1] == records.schema.classes
    assert groups_of(smooth, records, "sex")[1] == ("f", "m")
    ids, names = groups_of(adjusted, records, "sex")
    assert names == records.schema.classes
    assert torch.equal(ids, plain.labels)


def test_an_adjusted_loss_without_shares_is_refused() -> None:
    with pytest.raises(EquidpError, match="needs group_shares, which GroupClipCounts does not release"):
        algorithm_settings("custom", {"objective": "logit_adjusted", "side_release": "group_clip_counts"}).build()
    with pytest.raises(EquidpError, match="needs group_shares, and there is no side_release to tell it"):
        algorithm_settings("custom", {"objective": "logit_adjusted"}).build()


class TestShifted:
    def test_a_shifted_loss_is_the_loss_of_the_sum_and_knows_its_gradient(self) -> None:
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
