"""What records pick is computed by functions alone that give a value the same digits at any place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equidp.errors import EquidpError
from equidp.gradients.engine import GradientEngine
from equidp.gradients.losses import Loss
from equidp.gradients.picks import EXACT, SUMS, Picks

ROWS, WORDS, LABELS = 24, 20, 4
Function = Callable[[Tensor, Tensor], Tensor]


def bce(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs, labels, reduction="none")


def of_known(function: Function) -> Loss:
    """A function of the known labels' outputs, put back to their places."""

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        known, found = labels >= 0, torch.zeros_like(outputs)
        found[known] = function(outputs[known], labels[known])
        return found.sum(1)

    return loss


def of_known_places(outputs: Tensor, labels: Tensor) -> Tensor:
    places = (labels[:, 0] >= 0).nonzero().squeeze(1)
    values = F.softplus(outputs.index_select(0, places))
    return torch.zeros_like(outputs).index_copy(0, places, values).sum(1)


def weighed(outputs: Tensor, labels: Tensor) -> Tensor:
    return (bce(outputs, labels.clamp(min=0)) * (labels >= 0)).sum(1)


def of_classes(outputs: Tensor, labels: Tensor) -> Tensor:
    known, found = labels[:, 0] >= 0, outputs.new_zeros(len(outputs))
    found[known] = F.cross_entropy(outputs[known], labels[known, 0].long(), reduction="none")
    return found


def several(missing: float) -> tuple[Tensor, Tensor]:
    """Features, and labels of 0 or 1 of which some are missing."""
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (ROWS, LABELS), generator=draws).float()
    gone = torch.rand(ROWS, LABELS, generator=draws) < missing
    return torch.randn(ROWS, 6, generator=draws), labels.masked_fill(gone, -1.0)


def tried(loss: Loss, *, exact: bool = True, missing: float = 0.2) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, LABELS))
    return GradientEngine(model, loss, rows=32, exact=exact).norms(*several(missing))


REFUSED: dict[str, tuple[str, Loss]] = {
    "BCE": ("binary_cross_entropy_with_logits", of_known(bce)),
    "a sigmoid": ("sigmoid", of_known(lambda x, y: torch.sigmoid(x) - y)),
    "in place": ("exp", of_known(lambda x, y: x.clone().exp_())),
    "in a list": ("tanh", of_known(lambda x, y: torch.stack([x.tanh(), y])[0])),
    "a power": ("pow", of_known(lambda x, y: (x - y) ** 4)),
    "a sum over columns": ("sum", of_known(lambda x, y: torch.stack([x, y, x, x, y]).sum(0))),
    "a product": ("linear", of_known(lambda x, y: F.linear(x.unsqueeze(1), x.new_ones(1, 1)).squeeze(1))),
    "by places": ("softplus", of_known_places),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_rounds_what_a_mask_picks_by_its_place_is_refused_where_every_bit_counts(name: str) -> None:
    """Nine of ten such losses were accepted: one record less gave others another last bit."""
    function, loss = REFUSED[name]
    with pytest.raises(EquidpError, match=f"'{function}', which may round a value by its place"):
        tried(loss)
    assert tried(loss, exact=False).isfinite().all()


def test_what_picks_all_in_the_first_batch_may_pick_fewer_later() -> None:
    with pytest.raises(EquidpError, match="by its place"):
        tried(of_known_places, missing=0.0)


@pytest.mark.parametrize(
    "loss", [weighed, of_classes, of_known(lambda x, y: (x - y) ** 2), of_known(lambda x, y: (x - y).abs())]
)
def test_weighed_losses_and_exact_functions_of_what_a_mask_picks_are_not_refused(loss: Loss) -> None:
    assert (tried(loss) > 0).any()


class ByWords(nn.Module):
    """A function of words that are there, or of some of them."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.table, self.out = function, nn.Embedding(WORDS, 8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.function(self.table(ids), ids))


def picked_words(function: Callable[[Tensor], Tensor]) -> Function:
    def pooled(words: Tensor, ids: Tensor) -> Tensor:
        present, found = ids != 0, torch.zeros_like(words)
        found[present] = function(words[present])
        return found.sum(1)

    return pooled


def at_the_end(words: Tensor, ids: Tensor) -> Tensor:
    """As Bart: each text has one end, and so there are as many as texts."""
    return torch.tanh(words[ids == WORDS - 1].view(len(ids), -1, words.shape[2])[:, -1])


def longest_at_most(words: Tensor, ids: Tensor) -> Tensor:
    """As Longformer and DeBERTa: sizes of no record are tensors."""
    size = torch.tensor(8) // 2
    return torch.tanh(words.view(len(ids), -1, 2, size)).flatten(2).sum(1)


def constant_columns(words: Tensor, ids: Tensor) -> Tensor:
    """The mask is no record's."""
    return torch.tanh(words * F.pad(torch.ones(8)[torch.arange(8) % 3 > 0].exp(), (0, 3))).sum(1)


def texts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, WORDS - 1, (ROWS, 9), generator=torch.Generator().manual_seed(0))
    ids[::3, 5:] = 0
    ids[:, 3] = WORDS - 1
    return ids, torch.arange(ROWS) % 3


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none")


def test_a_model_that_gives_picked_words_to_a_sigmoid_is_refused_where_every_bit_counts() -> None:
    model = ByWords(picked_words(torch.sigmoid))
    with pytest.raises(EquidpError, match=r"'sigmoid', .*by 0 or 1"):
        GradientEngine(model, cross_entropy, rows=32, exact=True).norms(*texts())


@pytest.mark.parametrize("function", [picked_words(F.relu), at_the_end, longest_at_most, constant_columns])
def test_a_model_whose_picks_are_exact_or_of_fixed_number_is_not_refused(function: Function) -> None:
    assert (GradientEngine(ByWords(function), cross_entropy, rows=32, exact=True).norms(*texts()) > 0).all()


def test_an_experts_products_have_as_many_rows_as_records_pick() -> None:
    tokens, ends = torch.zeros(8, 16), torch.tensor([3, 8], dtype=torch.int32)
    with Picks(tokens) as picks:
        F.grouped_mm(tokens, torch.zeros(2, 16, 16), offs=ends)
    assert picks.inexact == "grouped_mm"


WIDTH = 7
CLASSES = torch.arange(64) % WIDTH
COMPUTED: dict[str, Function] = {
    "add": lambda x, y: torch.add(x, y, alpha=0.3),
    "sub": lambda x, y: torch.sub(x, y, alpha=0.3),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=0.3),
    "mul": torch.mul,
    "div": torch.div,
    "rdiv": lambda x, y: 1.7 / x,
    "abs": lambda x, y: x.abs(),
    "square": lambda x, y: x.square(),
    "sqrt": lambda x, y: x.abs().sqrt(),
    "clamp": lambda x, y: x.clamp(-1, 1),
    "maximum": torch.maximum,
    "amax": lambda x, y: x.amax(1),
    "l1_loss": lambda x, y: F.l1_loss(x, y, reduction="none"),
    "mse_loss": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "cross_entropy": lambda x, y: F.cross_entropy(x, CLASSES[: len(x)], reduction="none", label_smoothing=0.1),
    "nll_loss": lambda x, y: F.nll_loss(x, CLASSES[: len(x)], reduction="none"),
    "log_softmax": lambda x, y: x.log_softmax(1),
    "softmax": lambda x, y: x.softmax(1),
    "layer_norm": lambda x, y: F.layer_norm(x, (WIDTH,)),
    "sum": lambda x, y: x.sum(1),
    "mean": lambda x, y: x.mean(1),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_allowed_gives_a_value_the_same_digits_at_any_place_forward_and_back(name: str) -> None:
    assert name in EXACT | SUMS
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 64, WIDTH, generator=draws)
    weight = torch.randn(64, WIDTH, generator=draws)

    def found(start: int, end: int) -> list[Tensor]:
        some, others = x[start:end].clone().requires_grad_(), y[start:end].clone().requires_grad_()
        given = COMPUTED[name](some, others)
        by = weight[start:end] if given.dim() == 2 else weight[start:end, 0]
        ways = torch.autograd.grad(given, [some, others], by, allow_unused=True)
        return [given.detach(), *(way for way in ways if way is not None)]

    whole = found(0, 64)
    for start in range(0, 42, WIDTH):  # classes follow from the place
        for end in range(start + 1, 64, 3):
            assert all(a[start:end].equal(b) for a, b in zip(whole, found(start, end), strict=True))
