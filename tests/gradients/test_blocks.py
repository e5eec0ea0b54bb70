"""Layers that see several rows of each record along the first dimension: windows, frames, instances of a bag."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from equidp.errors import EquidpError
from equidp.gradients.blocks import Blocks
from equidp.gradients.engine import GradientEngine
from equidp.gradients.sites import sites
from equidp.system.threads import GLOBAL_RANDOM
from equidp.training import make_private

ROWS = 6

pytestmark = pytest.mark.filterwarnings("ignore:Layer .* goes through torch.func")


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


class Gated(nn.Module):
    """Without a rule; a record's rows meet in it, by a table that all records share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.inner = nn.Parameter(torch.randn(width)), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        rows = (self.inner(x) * self.gate).unflatten(0, (-1, ROWS))
        rows = rows - rows.mean(1, keepdim=True)
        return (rows if mask is None else rows * mask.unsqueeze(1)).flatten(0, 1)


class Bag(nn.Module):
    """Images `[b, 6, 1, 6, 6]`, one row each; `order`: whose rows follow one another."""

    def __init__(self, order: str = "record") -> None:
        super().__init__()
        self.order = order
        self.image = nn.Sequential(
            *(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.PReLU(4), nn.Conv2d(4, 4, 3, groups=4)),
            *(nn.BatchNorm2d(4).eval(), nn.ConvTranspose2d(4, 4, 2)),
        )
        self.norm, self.gated, self.table = nn.LayerNorm(4), Gated(4), nn.Embedding(5, 4)
        self.inner, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.register_buffer("mask", torch.rand(ROWS))

    def forward(self, x: Tensor) -> Tensor:
        by_row = self.order == "window"
        h = self.image((x.transpose(0, 1) if by_row else x).flatten(0, 1))
        h = self.norm(h.mean((2, 3))) + self.table((h.detach().sum((1, 2, 3)).abs() * 9).long() % 5)
        h = h + self.gated(h, mask=self.mask)
        h = torch.tanh(self.inner(h)).unflatten(0, (ROWS, -1) if by_row else (-1, ROWS))
        return self.last(h.mean(0 if by_row else 1))


def records(b: int) -> tuple[Tensor, Tensor]:
    return torch.randn(b, ROWS, 1, 6, 6), torch.arange(b) % 3


@pytest.mark.parametrize("rows", [None, 32])
@pytest.mark.parametrize("b", [1, 3, 7, *(pytest.param(b, marks=pytest.mark.slow) for b in (2, 6))])
def test_a_records_gradient_is_the_sum_over_its_rows(
    materialise: Callable[..., Tensor], b: int, rows: int | None
) -> None:
    model, (features, labels) = Bag(), records(b)
    expected = materialise(model, features, labels, cross_entropy)
    engine = GradientEngine(model, cross_entropy, rows=rows, exact=rows is not None)
    for some in (slice(None), slice(0, 1), slice(0, max(b - 1, 1))):  # later batches are of other numbers of records
        norms = engine.norms(features[some], labels[some])
        torch.testing.assert_close(norms, expected[some].norm(dim=1), rtol=1e-4, atol=1e-6)
        weights = torch.linspace(0.5, 2, len(norms))
        torch.testing.assert_close(engine.weighted_sum(weights), weights @ expected[some], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [None, 32])
def test_units_and_views_of_records_with_several_rows(materialise: Callable[..., Tensor], rows: int | None) -> None:
    model, (features, labels) = Bag(), records(4)
    original, owners = copy.deepcopy(model), torch.tensor([0, 0, 0, 1])
    expected = materialise(original, features, labels, cross_entropy)
    engine = GradientEngine(model, cross_entropy, rows=rows)
    norms = engine.norms(features, labels, owners=owners)
    means = torch.stack([expected[owners == unit].mean(0) for unit in range(2)])
    torch.testing.assert_close(norms, means.norm(dim=1), rtol=1e-4, atol=1e-6)
    weights = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(engine.weighted_sum(weights), weights @ means, rtol=1e-4, atol=1e-5)
    both = materialise(original, features, labels[:2].repeat(2), cross_entropy).unflatten(0, (2, 2)).mean(0)
    norms = engine.norms(features, labels[:2], views=2)
    torch.testing.assert_close(norms, both.norm(dim=1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(engine.weighted_sum(weights), weights @ both, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [None, 32])
@pytest.mark.parametrize("b", [1, 2, 3, 6])
def test_rows_in_another_order_are_refused(b: int, rows: int | None) -> None:
    """Also in a batch of one record, which is filled up by its copies."""
    with pytest.raises(EquidpError, match="not one record's after another's"):
        GradientEngine(Bag("window"), cross_entropy, rows=rows).norms(*records(b))


class Chosen(nn.Module):
    """A layer sees the places that are not zero, all of a first batch; as `how` finds them."""

    def __init__(self, how: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.how, self.inner, self.last = how, nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        known = self.how(x[:, :, 0] != 0)
        found = torch.zeros_like(x)
        found[known] = torch.tanh(self.inner(x[known]))
        return self.last(found.mean(1))


@pytest.mark.parametrize(
    "how", [lambda known: known, lambda known: known.nonzero(as_tuple=True)], ids=["a mask", "places"]
)
def test_rows_that_records_choose_are_refused_where_they_are_as_many_of_each(how: Callable[[Tensor], Any]) -> None:
    """Of records with 5 and 3, and 4 each, a layer sees as many: the rows would be counted to others."""
    with pytest.raises(EquidpError, match=r"sees \(\d+, 4\) for \d+ records; .* no x\[mask\]"):
        GradientEngine(Chosen(how), cross_entropy).norms(torch.randn(4, 5, 4), torch.arange(4) % 3)


def test_rows_that_a_rare_record_would_choose_are_refused_before_it_comes() -> None:
    """All records that are tried have one row each more and less: with the rare one, its row is counted to another."""

    class Rare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            rare = (x[:, 0, 0] > 1e6).long()
            rows = torch.repeat_interleave(x, 5 + rare - rare.roll(1), dim=0)
            return self.last(torch.tanh(self.inner(rows[:, 0])).unflatten(0, (-1, 5)).mean(1))

    with pytest.raises(EquidpError, match=r"sees \(\d+, 4\) for \d records; .*whatever its numbers"):
        GradientEngine(Rare(), cross_entropy).norms(torch.randn(4, 5, 4), torch.arange(4) % 3)


def test_rows_that_are_not_as_many_of_each_record_belong_to_none() -> None:
    """Eight of three records: two each would be a fourth record's, too."""
    blocks, site = Blocks(), sites(nn.Linear(2, 2))[0]
    blocks.trying = True
    assert [blocks.fit(site, rows, 3, "a call") for rows in (2, 8, 6, 9)] == [0, 0, 2, 0]
    blocks.trying = False  # what no trial has seen was compared with no gradient of autograd's
    assert [blocks.fit(site, 6, 3, call) for call in ("a call", "another")] == [2, 0]
    blocks.forget()
    assert blocks.fit(site, 6, 3, "a call") == 0


def test_a_layer_that_sees_other_numbers_of_rows_later_is_refused() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept, self.inner, self.last = 4, nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            rows = self.inner(x[:, : self.kept].flatten(0, 1)).tanh()
            return self.last(rows.unflatten(0, (len(x), -1)).mean(1))

    model = Cut()
    engine = GradientEngine(model, cross_entropy)
    features, labels = torch.randn(4, 6, 4), torch.arange(4) % 3
    engine.norms(features, labels)
    engine.norms(torch.randn(4, 8, 4), labels)  # records of another shape are tried anew
    engine.norms(features, labels)
    model.kept = 2
    with pytest.raises(EquidpError, match=r"sees \(8, 4\) for 4 records; .*each with as many rows"):
        engine.passes.norms(features, labels)


def test_a_number_that_is_read_before_such_a_layer_is_named() -> None:
    """Its rows are as many of each record, so nothing else in the sentence says what is wrong."""

    class Logged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.mean = self.kept(x.detach().mean())
            return self.last(self.inner(x.flatten(0, 1)).tanh().unflatten(0, (len(x), -1)).mean(1))

        def kept(self, mean: Tensor) -> object:
            return mean.item()

    class AsTensor(Logged):
        def kept(self, mean: Tensor) -> object:
            return mean

    features, labels = torch.randn(4, 5, 4), torch.arange(4) % 3
    with pytest.raises(EquidpError, match=r"Torch's 'item' comes before that layer: .* stays a tensor"):
        GradientEngine(Logged(), cross_entropy).norms(features, labels)
    GradientEngine(AsTensor(), cross_entropy).norms(features, labels)


class Siamese(nn.Module):
    """Two pictures of each record; their rows are passed eight at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.cat([self.inner(some).tanh() for some in x.flatten(0, 1).split(8)])
        return self.last(rows.unflatten(0, (-1, 2)).diff(dim=1).squeeze(1).abs())


def test_rows_in_pieces_as_large_as_the_batch_are_not_taken_for_a_row_of_each_record() -> None:
    """Of four records one piece has two rows each; of eight, two pieces have eight, the first all of four records."""
    features, labels = torch.randn(8, 2, 4), torch.arange(8) % 3
    engine = GradientEngine(Siamese(), cross_entropy)
    engine.norms(features[:4], labels[:4])
    with pytest.raises(EquidpError, match=r"sees \(8, 4\) for 8 records; .*in every pass .*one call, not in pieces"):
        engine.passes.norms(features, labels)


class Pooled(nn.Module):
    """One layer sees six rows of each record, then three, then one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.inner(x.flatten(0, 1)).tanh().unflatten(0, (-1, 2)).mean(1)
        rows = self.inner(rows).tanh().unflatten(0, (-1, 3)).mean(1)
        return self.last(self.inner(rows).tanh())


@pytest.mark.parametrize("b", [1, 2, 3, 7])
def test_a_layer_may_see_other_numbers_of_rows_in_each_of_its_calls(materialise: Callable[..., Tensor], b: int) -> None:
    model, features, labels = Pooled(), torch.randn(b, 6, 4), torch.arange(b) % 3
    expected = materialise(model, features, labels, cross_entropy)
    engine = GradientEngine(model, cross_entropy)
    torch.testing.assert_close(engine.norms(features, labels), expected.norm(dim=1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(engine.weighted_sum(torch.ones(b)), expected.sum(0), rtol=1e-4, atol=1e-5)


class Placed(nn.Module):
    """Positions are added to words of texts `[b, windows, 5]`, whose windows are rows; as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.words, self.last = how, nn.Embedding(9, 4), nn.Linear(4, 3)
        if how.startswith("parameter"):
            self.places = nn.Parameter(torch.randn(1, 5, 4))
        else:
            self.table = nn.Embedding(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        words, places = self.words(x), torch.arange(5)
        if self.how == "parameter before":
            rows = (words + self.places.unsqueeze(1)).flatten(0, 1)
        elif self.how == "parameter":
            rows = words.flatten(0, 1) + self.places
        else:
            rows = words.flatten(0, 1)
            rows = rows + self.table(places.expand(len(rows), -1) if self.how == "table of rows" else places[None])
        return self.last(torch.tanh(rows).mean(1).unflatten(0, (len(x), -1)).mean(1))


@pytest.mark.parametrize(
    ("how", "advised", "words"),
    [
        ("parameter", "parameter before", r"given 'places' as its own.* before they are rows, .*unsqueeze\(1\)"),
        ("table", "table of rows", r"given what is read once for all in 'table' as its own.* Read it for every row"),
    ],
)
def test_what_all_share_is_added_to_windows_as_the_sentence_says(
    materialise: Callable[..., Tensor], how: str, advised: str, words: str
) -> None:
    """Of a table it was torch's own error."""
    features, labels = torch.randint(0, 9, (4, 3, 5)), torch.arange(4) % 3
    with pytest.raises(EquidpError, match=words):
        GradientEngine(Placed(how), cross_entropy).norms(features, labels)
    model = Placed(advised)
    expected = materialise(model, features, labels, cross_entropy)
    norms = GradientEngine(model, cross_entropy).norms(features, labels)
    torch.testing.assert_close(norms, expected.norm(dim=1), rtol=1e-4, atol=1e-6)


class OthersAmongMany(nn.Module):
    """Of more than forty records, rows follow one another by window."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 40:
            return self.last(self.inner(x.transpose(0, 1).flatten(0, 1)).tanh().unflatten(0, (5, -1)).mean(0))
        return self.last(self.inner(x.flatten(0, 1)).tanh().unflatten(0, (-1, 5)).mean(1))


def test_a_batch_with_more_records_than_any_before_is_looked_at() -> None:
    features, labels = torch.randn(41, 5, 4), torch.arange(41) % 3
    engine = GradientEngine(OthersAmongMany(), cross_entropy)
    for _ in range(8):  # looks are some passes apart by then
        engine.norms(features[:20], labels[:20])
    with pytest.raises(EquidpError, match="changes with the other records of its batch"):
        engine.norms(features, labels)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), None])
def test_a_loop_of_ones_own_trains_such_a_model(seed: int | None) -> None:
    features, labels = records(40)
    model = Bag()
    with GLOBAL_RANDOM:
        trainer = make_private(
            model, (features, labels), cross_entropy, noise_multiplier=1.0, delta=1e-3, epochs=2, batch_size=10,
            learning_rate=0.1, seed=seed, device="cpu", physical_batch_size=32,
        )  # fmt: skip
        before = trainer.engine.flatten()
        trainer.run_steps(4)
    assert not torch.equal(trainer.engine.flatten(), before)
