"""Training from plain tensors: the loss of a record, and the code that a run depends on."""

from __future__ import annotations

import pytest
import torch

from equidp import training
from equidp.errors import EquidpError
from equidp.training import record_loss

CPU = torch.device("cpu")


def test_a_records_loss_is_weighed_by_its_own_class_alone() -> None:
    outputs, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 1.0]]), torch.tensor([0, 1, 1])
    plain = record_loss(None, ("ill", "well"), CPU)(outputs, labels)
    weighted = record_loss((2.0, 0.5), ("ill", "well"), CPU)(outputs, labels)
    torch.testing.assert_close(weighted, plain * torch.tensor([2.0, 0.5, 0.5]))


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0, 3.0)])
def test_weights_that_are_not_one_per_class_are_refused(weights: tuple[float, ...]) -> None:
    words = rf"class_weights has {len(weights)} numbers; give one for each of the 2 classes, in this order: ill, well\."
    with pytest.raises(EquidpError, match=words):
        record_loss(weights, ("ill", "well"), CPU)


@pytest.mark.parametrize("library", ["kymatio", "numpy", "opacus", "scipy", "torchvision"])
def test_another_version_of_what_sets_sums_and_noise_is_other_code(
    monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    known = training.version
    monkeypatch.setattr(training, "version", lambda name: "another" if name == library else known(name))
    assert training._code_digest() != training.CODE_DIGEST
