"""What a model or a loss does not take is told in a sentence that says which of them, on what, and what to give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from equidp.errors import EquidpError
from equidp.gradients import probe
from equidp.gradients.engine import GradientEngine
from equidp.gradients.misfit import raise_told, refuse_odd_records
from equidp.gradients.rewriting import rewritten

FEATURES = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 1, 0, 1, 0])
LOSS = nn.CrossEntropyLoss(reduction="none")


class As(nn.Module):
    """A line whose outputs come in another wrapping, or from more than the features."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.line, self.wrapped = nn.Linear(4, 2), forward

    def forward(self, x: Tensor) -> Any:
        return self.wrapped(self.line, x)


class Logits:
    """As transformers' models give them."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Transformer(As):
    """As these name what they take first."""

    main_input_name = "pixel_values"


def masked(line: nn.Linear, x: Tensor, mask: Tensor) -> Tensor:
    return line(x * mask)


@pytest.mark.parametrize(
    ("model", "loss", "features", "labels", "words"),
    [
        (nn.Linear(4, 2), LOSS, (255 * FEATURES).byte(), LABELS, r"features, uint8 \[b, 4\]: .*give features.float"),
        (nn.Linear(4, 2), LOSS, FEATURES.half(), LABELS, r"features, float16 \[b, 4\]: .*give features.float"),
        (nn.Linear(3, 2), LOSS, FEATURES, LABELS, r"model fails on the features, float32 \[b, 4\]: .*first layer's"),
        (As(masked), LOSS, FEATURES, LABELS, "model fails .*missing .*'mask'.*called with the features alone"),
        (As(lambda line, x: {"y": line(x)}), LOSS, FEATURES, LABELS, "gives a dict, .*return that alone"),
        (As(lambda line, x: Logits(line(x))), LOSS, FEATURES, LABELS, "gives a Logits, .*outputs.logits\\.$"),
        (
            Transformer(lambda line, x: Logits(line(x))),
            LOSS,
            FEATURES,
            LABELS,
            r"return outputs.logits, or give the features by name, \{'pixel_values': features\}",
        ),
        (nn.Linear(4, 1), lambda o, y: (o - y).square(), FEATURES, LABELS, r"\(1, 1\) .*squeeze\(1\) them"),
        (
            nn.Linear(4, 2),
            LOSS,
            FEATURES,
            LABELS.float(),
            r"loss fails .*labels, float32 \[b\]: .*Classes are \[b\]",
        ),
        (nn.Linear(4, 2), LOSS, FEATURES, LABELS + 1, "loss fails .*Target 2 is out of bounds.*int64 from 0"),
        (
            nn.Linear(4, 2),
            lambda o, y, w: LOSS(o, y) * w,
            FEATURES,
            LABELS,
            "loss fails .*'w'.*with outputs",
        ),
        (nn.Linear(4, 2), lambda o, y: LOSS(o, y).mean().item(), FEATURES, LABELS, "loss gives a float"),
    ],
)
def test_what_does_not_fit_is_told(model: nn.Module, loss: Any, features: Tensor, labels: Tensor, words: str) -> None:
    with pytest.raises(EquidpError, match=words):
        GradientEngine(model, loss).norms(features, labels)


def test_it_is_told_of_a_later_batch_too() -> None:
    engine = GradientEngine(nn.Linear(4, 2), LOSS)
    engine.norms(FEATURES, LABELS)
    with pytest.raises(EquidpError, match="Target 2 is out of bounds"):
        engine.norms(FEATURES[:3], LABELS[:3] + 1)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("not deterministic")])
def test_what_is_no_fault_of_the_records_stays_as_it_is(error: RuntimeError) -> None:
    def fails(line: nn.Linear, x: Tensor) -> Tensor:
        raise error

    with pytest.raises(RuntimeError) as raised:
        GradientEngine(As(fails), LOSS).norms(FEATURES, LABELS)
    assert raised.value is error


def test_a_fault_that_a_second_look_does_not_show_stays_as_it_is() -> None:
    tried = []

    def once(line: nn.Linear, x: Tensor) -> Tensor:
        tried.append(x)
        if len(tried) == 1:
            raise ValueError("by chance")
        return line(x)

    with pytest.raises(ValueError, match="by chance"):
        GradientEngine(As(once), LOSS).norms(FEATURES, LABELS)


def halved(line: nn.Linear, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return line(x).float()


@pytest.mark.usefixtures("half_on_cpu")
def test_autocast_in_a_models_own_forward_is_named(monkeypatch) -> None:
    with pytest.raises(EquidpError, match=r"turns torch.autocast on in its own forward: in a CPU's.*leave it out"):
        GradientEngine(As(halved), LOSS).norms(FEATURES, LABELS)
    GradientEngine(As(halved), LOSS, precision="bf16").norms(FEATURES, LABELS)
    asked = iter([False, True])  # before its gradients are compared, as on a GPU, and after
    monkeypatch.setattr(probe, "halved_by_itself", lambda *_: next(asked))
    with pytest.raises(EquidpError, match=r'turns torch.autocast on in its own forward, where.*precision="bf16"'):
        GradientEngine(As(halved), LOSS).norms(FEATURES, LABELS)


def test_autocast_around_frozen_layers_is_refused_on_a_cpu() -> None:
    """Their gradients are not asked for, and the trained layers' are right."""

    class Halved(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                found = self[0](x)
            return self[1](found.float())

    width = FEATURES.shape[1]
    model = Halved(nn.Linear(width, width).requires_grad_(False), nn.Linear(width, 3))
    with pytest.raises(EquidpError, match=r"turns torch.autocast on in its own forward.*leave it out there"):
        GradientEngine(model, LOSS).norms(FEATURES, LABELS)


class Short(nn.Module):
    """Texts cut to the longest of the batch, with dropout: how many numbers are drawn follows from it."""

    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        self.words, self.dropout, self.out = nn.Embedding(9, 4, padding_idx=0), nn.Dropout(dropout), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        there = ids != 0
        longest = int(there.sum(1).max())
        words = self.dropout(self.words(ids[:, :longest])) * there[:, :longest].unsqueeze(2)
        return self.out(F.normalize(words.sum(1)))


def test_texts_that_are_cut_to_the_longest_may_not_be_dropped_out() -> None:
    torch.manual_seed(0)
    ids = torch.randint(1, 9, (6, 8)) * (torch.arange(8) < torch.tensor([[8], [3], [5], [2], [7], [4]]))
    GradientEngine(Short(dropout=0.0), LOSS).norms(ids, LABELS)
    with pytest.raises(EquidpError, match=r"random numbers that the model draws.*Pad all records to one length"):
        GradientEngine(Short(dropout=0.5), LOSS).norms(ids, LABELS)


def test_a_layer_that_changes_what_its_class_computes_is_told_of_its_forward() -> None:
    class Centred(nn.Conv1d):
        def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super()._conv_forward(x, weight - weight.mean((1, 2), keepdim=True), bias)

    engine = GradientEngine(nn.Sequential(Centred(2, 3, 2), nn.Flatten()), nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(EquidpError, match=r"'0\.weight' are not those of the loss.*a `forward` of its own"):
        engine.norms(torch.randn(4, 2, 2), torch.arange(4) % 3)


def test_a_first_state_that_is_learnt_is_told_which_dimension_is_for_the_records() -> None:
    class Begun(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.first, self.state = first, nn.Parameter(torch.ones(1, 1, 4))
            self.layer, self.out = rewritten(nn.GRU(3, 4, batch_first=True)), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            wide = self.state.expand(len(x), 1, -1).transpose(0, 1) if self.first else self.state.expand(-1, len(x), -1)
            found: Tensor = self.out(self.layer(x, wide)[0][:, -1])
            return found

    features, labels = torch.randn(4, 5, 3), torch.arange(4) % 2
    GradientEngine(Begun(first=True), nn.CrossEntropyLoss(reduction="none")).norms(features, labels)
    with pytest.raises(EquidpError, match=r"parameter 'state' are not.*along its first dimension.*transpose behind"):
        GradientEngine(Begun(first=False), nn.CrossEntropyLoss(reduction="none")).norms(features, labels)


def test_records_are_tried_as_copies_of_them() -> None:
    """A model may write into them, and which one has the largest number depends on all the others."""

    class Doubling(nn.Module):
        def forward(self, features: Tensor) -> Tensor:
            return features.mul_(2)

    features, labels = torch.arange(12.0).view(4, 3), torch.zeros(4, 3)

    def written(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - labels.add_(1)).square().sum(1)

    refuse_odd_records(Doubling(), written, features, labels)
    assert torch.equal(features, torch.arange(12.0).view(4, 3))
    assert not labels.any()


def test_a_model_that_keeps_what_it_computed_is_told_so() -> None:
    """As timm's attention does that caches its biases in evaluation mode: torch has freed what led to them."""
    weight = torch.ones(3, requires_grad=True)
    kept = weight.exp().sum()
    torch.autograd.grad(kept, weight)
    engine = GradientEngine(nn.Linear(4, 2), LOSS)
    with pytest.raises(RuntimeError) as error:
        torch.autograd.grad(kept, weight)
    with pytest.raises(EquidpError, match=r"keep what they computed .* model\.train\(\)"):
        raise_told(error.value, engine.passes, FEATURES, LABELS)


def test_a_penalty_on_gradients_is_told_what_is_not_seen() -> None:
    """It was torch's own error of the trial without gradients, and the advice was on types and sizes."""

    def steep(line: nn.Linear, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(line(x).exp().sum(), x, create_graph=True)[0]

    with pytest.raises(EquidpError, match=r"takes gradients of its own .* of frozen layers alone"):
        GradientEngine(As(steep), LOSS).norms(torch.rand(6, 4), LABELS)


def test_a_trained_layer_within_vmap_is_told_to_take_rows() -> None:
    """Windows of a record come so, too; it was torch's own error."""
    features = torch.rand(6, 3, 4)
    with pytest.raises(EquidpError, match=r"within torch\.vmap .*x\.flatten\(0, 1\)"):
        GradientEngine(As(lambda line, x: torch.vmap(line)(x).mean(1)), LOSS).norms(features, LABELS)
    rows = As(lambda line, x: line(x.flatten(0, 1)).unflatten(0, (-1, 3)).mean(1))
    assert GradientEngine(rows, LOSS).norms(features, LABELS).isfinite().all()
