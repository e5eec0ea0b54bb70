"""With a public number of rows, a record's gradient is the same to the last bit whoever else is in the batch."""

from __future__ import annotations

import pytest
import torch
from tests.models.conftest import PRETRAINED, SCHEMAS, batch
from tests.models.test_models import TRAINED, cross_entropy
from tests.thorough import first
from torch import Tensor, nn

from equidp.errors import EquidpError
from equidp.gradients.engine import GradientEngine
from equidp.gradients.shape import public_rows
from equidp.mechanism.looking import packed
from equidp.models import MODELS, build_model

ROWS = 16
QUICK = ("logistic", "mlp", "cnn4", "resnet9", "bilstm")
SMALL = {"wrn16_4": {"depth": 10, "width": 1}, "resnet9": {"width": 16}}


class ByBatchSize(nn.Module):
    """What a GPU's library does: another kernel for another number of rows, here one that cuts off bits."""

    def forward(self, x: Tensor) -> Tensor:
        return x if len(x) % ROWS == 0 else x + ((4 * x).floor() / 4 - x).detach()


def engine(network: nn.Module, rows: int | None, precision="float32") -> GradientEngine:
    return GradientEngine(network.train(), cross_entropy, rows=rows, precision=precision)


def clipped_sum(used: GradientEngine, features: Tensor, labels: Tensor) -> Tensor:
    """Σ w_i g_i with each w_i g_i at the bound 1, over chunks of the public number of rows."""
    size = used.rows or max(len(features), 1)
    total = torch.zeros(used.dimension)
    for some, of in zip(features.split(size), labels.split(size), strict=True):
        norms = used.norms(some, of)
        total += used.weighted_sum(1 / norms.clamp(min=1e-9))
    return total


def data(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(size, 40, generator=generator), torch.randint(0, 10, (size,), generator=generator)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), ByBatchSize(), nn.Tanh(), nn.Linear(30, 10))


@pytest.mark.usefixtures("half_on_cpu")
@pytest.mark.parametrize("size", [1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_removing_a_record_moves_the_sum_by_its_bound(size: int, precision) -> None:
    used = engine(network(), ROWS, precision)
    features, labels = data(size)
    whole, without = clipped_sum(used, features, labels), clipped_sum(used, features[:-1], labels[:-1])
    assert (whole - without).norm() <= 1 + 1e-6 * size


def test_without_a_public_number_of_rows_it_would_move_it_further(monkeypatch: pytest.MonkeyPatch) -> None:
    used = engine(network(), None)
    features, labels = data(ROWS)
    with pytest.raises(EquidpError, match="changes with the other records of its batch"):
        used.norms(features, labels)
    monkeypatch.setattr("equidp.gradients.engine.look_again", lambda *_, **__: None)  # which sees it
    moved = clipped_sum(used, features, labels) - clipped_sum(used, features[:-1], labels[:-1])
    assert moved.norm() > 1.001


@pytest.mark.parametrize("model", first([n for n in MODELS if n not in PRETRAINED], QUICK))
def test_norms_do_not_depend_on_the_batch(model: str) -> None:
    schema = SCHEMAS[TRAINED[model]]
    padded, plain = (
        engine(build_model(model, schema, options=SMALL.get(model, {}), seed=1), rows) for rows in (8, None)
    )
    features, labels = batch(schema, 7), torch.arange(7) % len(schema.classes)
    norms = padded.norms(features, labels)
    assert torch.equal(padded.norms(features[:3], labels[:3]), norms[:3])
    torch.testing.assert_close(norms, plain.norms(features, labels), rtol=1e-4, atol=1e-6)
    weights = torch.linspace(0.1, 1, 7)
    padded.norms(features, labels)
    total, expected = padded.weighted_sum(weights), plain.weighted_sum(weights)
    assert (total - expected).norm() <= 1e-5 * expected.norm()


def test_units_are_as_without_rows() -> None:
    features, labels = data(ROWS - 3)
    owners = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 5])
    padded, plain = engine(network()[:1], ROWS), engine(network()[:1], None)
    norms = padded.norms(features, labels, owners=owners)
    torch.testing.assert_close(norms, plain.norms(features, labels, owners=owners))
    weights = torch.linspace(0.1, 1, 6)
    torch.testing.assert_close(padded.weighted_sum(weights), plain.weighted_sum(weights))
    full = torch.arange(ROWS) // 2
    assert len(padded.norms(*data(ROWS), owners=full)) == ROWS // 2
    assert padded.weighted_sum(torch.ones(ROWS // 2)).isfinite().all()


def test_rows_that_stand_for_nobody_add_nothing_even_where_they_are_no_numbers() -> None:
    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 1 / x

    features, labels = data(5)
    features[4] = 0
    used = engine(nn.Sequential(Inverse(), nn.Linear(40, 10)), ROWS)
    assert used.norms(features, labels).isfinite().tolist() == [True] * 4 + [False]  # as those after it
    assert used.weighted_sum(torch.tensor([1.0, 1, 1, 1, 0])).isfinite().all()
    assert len(used.norms(features[:0], labels[:0])) == 0
    assert used.weighted_sum(torch.ones(0)).norm() == 0


def test_no_model_or_loss_sees_what_no_record_has() -> None:
    """Rows of zeros would be a text without a word, and a class that is not there."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(8, 6), nn.Linear(6, 3)

        def forward(self, words: Tensor) -> Tensor:
            if (words == 0).all(1).any():
                raise ValueError("a text without a word")
            return self.out(self.embedding(words - 1).mean(1))

    def from_one(outputs: Tensor, classes: Tensor) -> Tensor:
        return cross_entropy(outputs, classes - 1)

    words, classes = torch.arange(20).view(5, 4) % 8 + 1, torch.tensor([1, 2, 3, 1, 2])
    model = Words()
    padded, plain = (GradientEngine(model.requires_grad_(True), from_one, rows=rows) for rows in (ROWS, None))
    torch.testing.assert_close(padded.norms(words, classes), plain.norms(words, classes))
    weights = torch.linspace(0.1, 1, 5)
    torch.testing.assert_close(padded.weighted_sum(weights), plain.weighted_sum(weights))
    torch.testing.assert_close(padded.outputs(words), plain.outputs(words))


def test_the_number_of_rows_follows_from_public_numbers() -> None:
    assert public_rows(512, None) == 576  # 512 + 2.5·22.6, in eights
    assert public_rows(512, 64) == 64
    assert public_rows(4, 64) == 16
    assert public_rows(512, 60) == 60
    for physical, rows in ((None, 576), (1000, 576), (100, 96), (60, 32), (31, 32), (1, 32)):
        assert public_rows(512, physical, on_cpu=True) == rows  # of whole vectors and blocks
    assert public_rows(10**6, None) == 65_528  # a kernel has one program a record, and CUDA 65,535 on that axis


def test_a_unit_with_more_records_than_rows_has_a_chunk_to_itself() -> None:
    assert packed([3, 3, 3, 20, 1, 7, 1], 8) == [2, 1, 1, 2, 1]
    assert packed([], 8) == []
