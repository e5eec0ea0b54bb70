"""Models whose records meet only among many, or only among records that differ in some way, are found out too."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import prune

from equidp.errors import EquidpError
from equidp.gradients import engine as engines
from equidp.gradients.engine import GradientEngine
from equidp.gradients.refusals import same

WORDS, PLACES = 20, 8


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none")


def texts(*lengths: int) -> Tensor:
    """Texts of so many words, padded with 0."""
    ids = torch.randint(1, WORDS, (len(lengths), PLACES), generator=torch.Generator().manual_seed(0))
    return ids.masked_fill(torch.arange(PLACES) >= torch.tensor(lengths).unsqueeze(1), 0)


class Sorted(nn.Module):
    """A recurrence over texts in the order of their lengths; its last states are put back into the order of records."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.step, self.out = nn.Embedding(WORDS, 6), nn.Linear(12, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        order = (ids != 0).sum(1).argsort(descending=True, stable=True)
        words, present = self.table(ids)[order], (ids != 0)[order].unsqueeze(2)
        state = words.new_zeros(len(ids), 6)
        for word, here in zip(words.unbind(1), present.unbind(1), strict=True):
            state = torch.where(here, torch.tanh(self.step(torch.cat([word, state], 1))), state)
        return self.out(state[order.argsort()])


class Cut(nn.Module):
    """Texts cut to the longest of the batch; their mean is over padding, too, unless it is masked."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.masked, self.table, self.out = masked, nn.Embedding(WORDS, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        present = (ids != 0).float()
        longest = int(present.sum(1).max())
        words, present = self.table(ids[:, :longest]), present[:, :longest].unsqueeze(2)
        return self.out((words * present).sum(1) / present.sum(1) if self.masked else words.mean(1))


class Tags(nn.Module):
    """A class for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(WORDS, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.table(ids))).transpose(1, 2)


class By(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int = 6) -> None:
        super().__init__()
        self.function, self.first, self.last = function, nn.Linear(width, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


class Before(nn.Module):
    """A function before the only layer."""

    def __init__(self, function: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.function, self.last = function, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(x).flatten(1))


def filled(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), x.nanmean(0), x)


def in_fours(x: Tensor) -> Tensor:
    return torch.cat([some - some.mean(0) if len(some) == 4 else some for some in x.split(4)])


def gaps() -> Tensor:
    features = torch.randn(12, 6)
    features[5, 2] = torch.nan
    return features


def saturated() -> Tensor:
    """Images that all have a pixel of full brightness."""
    images = torch.rand(12, 1, 4, 4)
    images[:, 0, 0, 0] = 1
    return images


LONG = (PLACES,) * 12
MEETING: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "sorted by length": (Sorted, lambda: texts(8, 7, 5, 6, 8, 3, 2, 4)),
    "sorted by length, all alike": (Sorted, lambda: texts(*LONG)),
    "cut to the longest": (lambda: Cut(masked=False), lambda: texts(8, 8, *[5] * 10)),
    "cut to the longest, all alike": (lambda: Cut(masked=False), lambda: texts(*LONG)),
    "gaps filled by the mean": (lambda: Before(filled, 6), gaps),
    "divided by the brightest": (lambda: Before(lambda x: x / x.max(), 16), saturated),
    "in fours": (lambda: By(in_fours), lambda: torch.randn(12, 6)),
    "batch statistics by a function": (
        lambda: By(lambda x: F.batch_norm(x, None, None, training=True)),
        lambda: torch.randn(12, 6),
    ),
}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", MEETING)
def test_records_that_do_not_meet_in_a_batchs_first_two_are_found(name: str, dropout: float) -> None:
    torch.manual_seed(0)
    make, features = MEETING[name]
    seen = features()
    engine = GradientEngine(nn.Sequential(make(), nn.Dropout(dropout)), cross_entropy)
    with pytest.raises(EquidpError, match="mixes records"):
        engine.norms(seen, torch.arange(len(seen)) % 3)


def test_a_loss_over_all_places_of_a_batch_mixes_records() -> None:
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, labels, reduction="none", ignore_index=-1)
        return losses.sum(1) * len(labels) / (labels >= 0).sum()

    ids = texts(8, 8, *[4] * 10)
    with pytest.raises(EquidpError, match="mixes records"):
        GradientEngine(Tags(), loss).norms(ids, (ids % 3).masked_fill(ids == 0, -1))


class FromOne(nn.Module):
    """Reads ids from 1 on, as some tables are coded; there is no row for 0."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(WORDS, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.table(ids - 1).mean(1))


@pytest.mark.parametrize(
    ("model", "features"),
    [
        (Cut(masked=True), texts(8, 8, *[5] * 10)),
        (Cut(masked=True), texts(*LONG)),
        (FromOne(), texts(*LONG)),
        (Before(lambda x: x / x.flatten(1).amax(1).view(-1, 1, 1, 1), 16), saturated()),
        (Before(lambda x: x.nan_to_num(), 6), gaps()),
        (Before(lambda x: x, 6), gaps()),
    ],
    ids=["cut", "cut, all alike", "ids from 1", "scaled by its own", "gaps of 0", "no numbers"],
)
def test_models_that_keep_records_apart_are_not_refused(model: nn.Module, features: Tensor) -> None:
    norms = GradientEngine(model, cross_entropy).norms(features, torch.arange(len(features)) % 3)
    assert norms[[0, 1, 2, 3, 4, 6]].isfinite().all()


class NeverShort(nn.Module):
    """Texts of which the last word must be there: of one without it the model looks for what it does not have."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error, self.table, self.out = error, nn.Embedding(WORDS, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        if not ids[:, -1].all():
            raise self.error
        return self.out(self.table(ids).mean(1))


@pytest.mark.parametrize("error", [RuntimeError, IndexError, KeyError, TypeError, AttributeError])
def test_a_model_that_does_not_take_a_shortened_record_is_tried_without_one(error: type[Exception]) -> None:
    GradientEngine(NeverShort(error), cross_entropy).norms(texts(*[PLACES] * 8), torch.arange(8) % 3)


class Places(nn.Module):
    """One layer at every place of a sequence, whose norms come from Gram matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(40, 40), nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).sum(1))


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("owners", [None, torch.tensor([0, 1, 1, 2])], ids=["records", "units"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(6, 3), (6,)),
        (Places, (3, 40)),
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3)), (1, 8, 8)),
    ],
    ids=["linear", "places", "convolution"],
)
def test_a_record_of_huge_features_and_no_gradient_is_no_fault_of_the_model(
    make: Callable[[], nn.Module], shape: tuple[int, ...], owners: Tensor | None, place: int
) -> None:
    """Its norm is raised by what its features make of squares too small for float32; to refuse it would tell of it."""
    torch.manual_seed(0)
    model, features = make(), torch.randn(4, *shape)
    features[place] *= 1e12
    labels = model(features).argmax(1)
    labels[1 - place] = (labels[1 - place] + 1) % 3
    norms = GradientEngine(model, cross_entropy).norms(features, labels, owners=owners)
    assert norms.isfinite().all()


@pytest.mark.parametrize("place", [0, 1])
def test_a_blank_image_is_no_fault_of_a_model_that_normalises_each_channel(place: int) -> None:
    """The gradient of a bias that a normalisation takes out again is rounding, which a blank image makes large."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(16, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2),
        nn.GroupNorm(16, 16), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3),
    )  # fmt: skip
    features = torch.rand(6, 1, 12, 12)
    features[place] = 0.0
    assert GradientEngine(model, cross_entropy).norms(features, torch.arange(6) % 3).isfinite().all()


@pytest.mark.parametrize("spoilt", ["features", "labels"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_record_that_is_not_finite_hides_no_model_that_mixes_records(place: int, spoilt: str) -> None:
    class Largest(nn.Module):
        """Leaves the records alone, but for those of the largest first number."""

        def forward(self, features: Tensor) -> Tensor:
            return features * (1 + (features[:, :1].nan_to_num() == features[:, :1].nan_to_num().max()))

    def squares(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs.sum(1) - labels).square()

    features, labels = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8.0)
    (features if spoilt == "features" else labels)[place] = torch.nan
    engine = GradientEngine(nn.Sequential(Largest(), nn.Linear(6, 3)), squares)
    with pytest.raises(EquidpError, match="mixes records"):
        engine.norms(features, labels)


def test_a_model_is_tried_again_only_by_a_batch_of_twice_as_many_records(monkeypatch) -> None:
    tried = []

    def probe(passes: object, features: Tensor, labels: Tensor, *, others: bool) -> int:
        tried.append(len(features))
        return min(len(features), engines.SEVERAL)

    monkeypatch.setattr(engines, "probe", probe)
    engine = GradientEngine(nn.Linear(6, 3), cross_entropy)
    for records in (1, 1, 1, 3, 5, 6, 30, 300, 300, 1):
        engine.norms(torch.randn(records, 6), torch.arange(records) % 3)
    assert tried == [1, 3, 6, 30]


def test_what_remembers_slowly_is_found_where_every_batch_has_one_record() -> None:
    class Remembering(nn.Module):
        """A running mean that is no buffer."""

        def __init__(self) -> None:
            super().__init__()
            self.last, self.mean = nn.Linear(6, 3), torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9999 * self.mean + 1e-4 * x.detach().mean(0)
            return self.last(x - self.mean)

    with pytest.raises(EquidpError, match="those before it"):
        GradientEngine(Remembering(), cross_entropy).norms(torch.randn(1, 6), torch.zeros(1, dtype=torch.int64))


class Late(nn.Module):
    """Learns of the records only in every third pass, or only from larger ones than it has seen."""

    def __init__(self, learn: Callable[[Late, Tensor], None]) -> None:
        super().__init__()
        self.learn, self.passes, self.last = learn, list[None](), nn.Linear(6, 3)  # a number that counts is refused
        self.table = nn.Embedding(4, 2).requires_grad_(False)
        self.register_buffer("seen", torch.ones(()))
        self.register_buffer("constant", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes.append(None)
        self.constant = torch.ones(())  # another tensor, and nothing learnt
        with torch.no_grad():
            self.learn(self, x)
        return self.last(x)


def learn_largest(model: Late, x: Tensor) -> None:
    model.seen = torch.maximum(model.seen, x.max())


def learn_largest_in_place(model: Late, x: Tensor) -> None:
    if x.max() > model.seen:
        model.seen.copy_(x.max())


def learn_seldom(model: Late, x: Tensor) -> None:
    if len(model.passes) % 100 == 0:
        model.seen.lerp_(x.mean(), 0.1)


def learn_a_row(model: Late, x: Tensor) -> None:
    if len(model.passes) % 100 == 0:
        model.table.weight[0] = x[0, :2]


def learn_whether_any_was_large(model: Late, x: Tensor) -> None:
    """No number before the first, 0 since: a place that the records fill."""
    model.seen = torch.zeros(()) if x.max() > 1 or model.seen == 0 else torch.full((), math.nan)


@pytest.mark.parametrize(
    "learn", [learn_largest, learn_largest_in_place, learn_seldom, learn_a_row, learn_whether_any_was_large]
)
def test_what_learns_of_the_records_only_later_is_found_then(learn: Callable[[Late, Tensor], None]) -> None:
    model = Late(learn)
    if learn is learn_whether_any_was_large:
        model.seen.fill_(math.nan)
    engine = GradientEngine(model, cross_entropy)

    def passes(count: int, features: Tensor) -> None:
        for _ in range(count):
            engine.norms(features, torch.arange(8) % 3)

    passes(1, torch.randn(8, 6).clamp(max=1))
    with pytest.raises(EquidpError, match=r"'seen'.* of the model or its loss changes in a forward pass"):
        passes(100, 2 + torch.randn(8, 6))


class SetByTheFirst(nn.Module):
    """A layer that its first records set, a buffer or a trained parameter, as ActNorm does; then nothing changes it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.line = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.name, self.fresh = name, True

    def forward(self, features: Tensor) -> Tensor:
        if self.fresh:
            self.state_dict()[self.name].add_(features.mean())
            self.fresh = False
        return self.line(features - self.mean)


@pytest.mark.parametrize("name", ["mean", "line.bias"])
def test_what_the_very_first_pass_sets_is_found(name: str) -> None:
    """The exact mean of up to 32 records left with the model: an earlier pass than the compared one had set it."""
    engine = GradientEngine(SetByTheFirst(name), cross_entropy)
    with pytest.raises(EquidpError, match=f"'{name}' of the model or its loss changes in a forward pass"):
        engine.norms(torch.randn(40, 6), torch.arange(40) % 3)


class ByTheFirst(nn.Module):
    """A layer that subtracts the mean of its first records ever after, and keeps it beside its buffers."""

    def __init__(self, kind: type[dict[str, Tensor]] | type[list[Tensor]]) -> None:
        super().__init__()
        self.line, self.kept = nn.Linear(6, 3), kind()

    def forward(self, features: Tensor) -> Tensor:
        if isinstance(self.kept, dict):
            return self.line(features - self.kept.setdefault("mean", features.mean(0)))
        self.kept = self.kept or [features.mean(0)]
        return self.line(features - self.kept[0])


class WeighedByTheFirst(nn.Module):
    """A loss whose classes have weights by their numbers in the first batch that it sees."""

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        if not hasattr(self, "weights"):
            self.weights = 1 / torch.bincount(labels, minlength=3).clamp(min=1).float()
        return nn.functional.cross_entropy(outputs, labels, self.weights, reduction="none")


@pytest.mark.parametrize("records", [1, 40])
@pytest.mark.parametrize("kind", [list, dict])
def test_what_the_first_records_leave_beside_buffers_is_found(
    kind: type[dict[str, Tensor]] | type[list[Tensor]], records: int
) -> None:
    """One record of the first batch moved every later gradient: the mean was the same in all that was compared."""
    engine = GradientEngine(ByTheFirst(kind), cross_entropy)
    with pytest.raises(EquidpError, match=r"or with those before it"):
        engine.norms(2 + torch.randn(records, 6), torch.arange(records) % 3)


class ScaledByTheLargest(nn.Module):
    """Divides records by the largest number of all that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.line = 0.0, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.largest = max(self.largest, float(x.max()))
        return self.line(x / self.largest)


@pytest.mark.parametrize("place", [0, 1, 31])
def test_the_largest_number_seen_is_found_though_no_later_pass_changes_it(place: int) -> None:
    """One record of the first batch moved everybody's gradients, by 9 times its bound."""
    features = torch.rand(32, 4, generator=torch.Generator().manual_seed(0)) + 1
    features[place] *= 3
    with pytest.raises(EquidpError, match=r"or with those before it"):
        GradientEngine(ScaledByTheLargest(), cross_entropy).norms(features, torch.arange(32) % 3)


def test_weights_of_classes_that_a_loss_takes_from_the_first_batch_are_found() -> None:
    engine = GradientEngine(nn.Linear(6, 3), WeighedByTheFirst())
    with pytest.raises(EquidpError, match=r"or with those before it"):
        engine.norms(torch.randn(40, 6), (torch.arange(40) % 5).clamp(max=2))


def _weighed(outputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels, weights, reduction="none")


def _rarer(labels: Tensor) -> Tensor:
    return 1 / torch.bincount(labels, minlength=3).clamp(min=1).float()


def _in_a_closure() -> Callable[[Tensor, Tensor], Tensor]:
    weights: Tensor | None = None

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        nonlocal weights
        weights = _rarer(labels) if weights is None else weights
        return _weighed(outputs, labels, weights)

    return loss


def _in_a_variable_without_a_value() -> Callable[[Tensor, Tensor], Tensor]:
    first, weights = True, torch.ones(3)
    del weights

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        nonlocal first, weights
        if first:
            first, weights = False, _rarer(labels)
        return _weighed(outputs, labels, weights)

    return loss


WEIGHTS, KEPT = None, dict[str, Tensor]()


def _in_a_global(outputs: Tensor, labels: Tensor) -> Tensor:
    global WEIGHTS
    WEIGHTS = _rarer(labels) if WEIGHTS is None else WEIGHTS
    return _weighed(outputs, labels, WEIGHTS)


def _in_a_global_dict(outputs: Tensor, labels: Tensor) -> Tensor:
    return _weighed(outputs, labels, KEPT.setdefault("weights", _rarer(labels)))


def _in_its_own_attribute(outputs: Tensor, labels: Tensor) -> Tensor:
    if not hasattr(_in_its_own_attribute, "weights"):
        _in_its_own_attribute.weights = _rarer(labels)
    return _weighed(outputs, labels, _in_its_own_attribute.weights)


def _in_a_tensor() -> Callable[[Tensor, Tensor], Tensor]:
    weights = torch.zeros(3)

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        if not weights.any():
            weights.copy_(_rarer(labels))
        return _weighed(outputs, labels, weights)

    return loss


@pytest.mark.parametrize(
    "loss",
    [
        _in_a_closure(),
        _in_a_variable_without_a_value(),
        _in_a_global,
        _in_a_global_dict,
        _in_its_own_attribute,
        _in_a_tensor(),
    ],
)
def test_what_a_function_keeps_of_the_first_batch_is_found(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    engine = GradientEngine(nn.Linear(6, 3), loss)
    with pytest.raises(EquidpError, match=r"or with those before it"):
        engine.norms(torch.randn(40, 6), (torch.arange(40) % 5).clamp(max=2))


def test_what_is_set_back_stays_the_same_object() -> None:
    """A user's own log of sizes is still the user's after the model was tried."""
    sizes = list[int]()

    class Telling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.sizes = nn.Linear(6, 3), sizes

        def forward(self, features: Tensor) -> Tensor:
            self.sizes.append(len(features))
            return self.line(features)

    model = Telling()
    GradientEngine(model, cross_entropy).norms(torch.randn(40, 6), torch.arange(40) % 3)
    assert model.sizes is sizes
    assert sizes[-1] == 40


def test_what_a_layer_keeps_of_sizes_alone_is_no_fault() -> None:
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.places = nn.Linear(6, 3), dict[int, Tensor]()

        def forward(self, features: Tensor) -> Tensor:
            return self.line(features + self.places.setdefault(features.shape[1], torch.arange(features.shape[1]) / 6))

    GradientEngine(Places(), cross_entropy).norms(torch.randn(40, 6), torch.arange(40) % 3)


def test_what_is_changed_between_passes_is_its_owners_business() -> None:
    model = Late(lambda model, x: None)
    engine = GradientEngine(model, cross_entropy)
    for step in range(3):
        engine.norms(torch.randn(8, 6), torch.arange(8) % 3)
        model.seen.fill_(step)
        model.table.weight.mul_(0.9)


@pytest.mark.parametrize("entry", [0.37, pytest.param(0.74, marks=pytest.mark.slow)])
def test_a_model_of_millions_of_parameters_is_held_to_norms_of_all_digits(entry: float) -> None:
    """torch's float32 norm of five million equal numbers is 0.3 % too large."""
    engine = GradientEngine(nn.Linear(2000, 2500, bias=False), lambda outputs, labels: outputs.sum(1))
    norms = engine.norms(torch.tensor([[entry], [2 * entry]]).expand(2, 2000), torch.zeros(2))
    torch.testing.assert_close(norms, entry * 5e6**0.5 * torch.tensor([1.0, 2.0]), rtol=1e-5, atol=0)


def test_a_loss_that_depends_on_no_parameter_is_refused_by_the_reason() -> None:
    engine = GradientEngine(nn.Linear(6, 3), lambda outputs, labels: cross_entropy(outputs.detach(), labels))
    with pytest.raises(EquidpError, match=r"Parameter 'weight' and 1 more .* gets no gradient"):
        engine.norms(torch.randn(5, 6), torch.arange(5) % 3)


class Skipping(nn.Module):
    """Leaves its layer out in half of the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x if self.training and torch.rand(()) < 0.5 else torch.tanh(self.inner(x)))


@pytest.mark.parametrize("seed", range(4))
def test_a_layer_that_is_left_out_by_chance_is_not_idle(seed: int) -> None:
    torch.manual_seed(seed)
    assert GradientEngine(Skipping(), cross_entropy).norms(torch.randn(5, 6), torch.arange(5) % 3).isfinite().all()


class Listed(nn.Module):
    """Parameters in a list, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(1, 6, 6)), nn.Parameter(torch.randn(6))])
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(x @ self.weights[0][0]) * self.weights[1])


def test_parameters_in_a_list_belong_to_who_holds_it() -> None:
    features, labels = torch.randn(5, 6), torch.arange(5) % 3
    with pytest.warns(UserWarning, match=r"'0' \(Listed\) has no gradient rule for weights\.0, weights\.1"):
        engine = GradientEngine(nn.Sequential(Listed()), cross_entropy)
    norms = engine.norms(features, labels)
    expected = [engine.plain_sum(features[i : i + 1], labels[i : i + 1]).norm() for i in range(5)]
    torch.testing.assert_close(norms, torch.stack(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("hook", [nn.utils.weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_weight_that_a_hook_makes_of_others_is_refused_by_the_reason(hook: Callable[[nn.Linear], nn.Module]) -> None:
    engine = GradientEngine(nn.Sequential(hook(nn.Linear(6, 6)), nn.Linear(6, 3)), cross_entropy)
    with pytest.raises(EquidpError, match=r"Parameter '0\.weight_.* reaches the loss, but not by a call of the layer"):
        engine.norms(torch.randn(5, 6), torch.arange(5) % 3)


class Rare(By):
    """Mixes records in one draw of five, whose gradients are finite only where the last layer's bias is zero."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if torch.rand([]) >= 0.2:
            return self.last(hidden)
        return self.last(hidden - hidden.mean(0)) + (torch.nan if self.last.bias.any() else 0)


def test_draws_without_a_finite_gradient_nearby_are_tried_at_the_models_own_parameters() -> None:
    torch.manual_seed(0)
    model = Rare(torch.tanh)
    nn.init.zeros_(model.last.bias)
    with pytest.raises(EquidpError, match="changes with the other records of its batch"):
        GradientEngine(model, cross_entropy).norms(torch.randn(8, 6), torch.arange(8) % 3)


def test_records_without_a_finite_gradient_hide_no_model_that_mixes_records() -> None:
    """Sorted by class, say, they come first in every batch, and no model was ever tried."""

    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    def broken(outputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(outputs, labels).where(labels > 0, torch.nan) * outputs[:, 0]

    features = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    engine = GradientEngine(nn.Sequential(Centred(), nn.Linear(6, 3)), broken)
    with pytest.raises(EquidpError, match="mixes records"):
        engine.norms(features, (torch.arange(8) > 4).long())


def test_equal_numbers_are_compared_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen table of words, 16 million numbers, took as long as 140 steps of what was trained behind it."""
    table = torch.randn(4, 4)
    with monkeypatch.context() as watched:
        watched.setattr(Tensor, "isnan", None)
        assert same(table, table.clone())
    table[0, 0] = torch.nan
    assert same(table, table.clone())
    assert not same(table, table.nan_to_num())


class Pool(nn.Module):
    """A mean of words, of a layer without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, how: tuple[Any, ...] = (1.0,)) -> Tensor:
        words = torch.tanh(self.inner(x) * how[0]) * self.scale
        mask = how[1] if len(how) > 1 else mask
        return (words if mask is None else words * mask.unsqueeze(2)).sum(1)


class Masked(nn.Module):
    """How the mask is given: by `name`, in a tuple by name, by position with another number by name, or not at all."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name, self.table, self.pool, self.out = name, nn.Embedding(30, 8), Pool(), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        words, mask = self.table(ids), (ids != 0).float()
        if self.name in ("mask", "nothing"):
            return self.out(self.pool(words, mask=mask) if self.name == "mask" else self.pool(words, None))
        return self.out(self.pool(words, how=(1.0, mask)) if self.name else self.pool(words, mask, how=(3.0,)))


@pytest.mark.filterwarnings("ignore:Layer 'pool'")
def test_a_mask_of_a_layer_without_a_rule_is_in_its_gradients_or_refused() -> None:
    """It was left out of the gradients: where no text of the first batch is padded, nothing showed it."""
    whole, labels = torch.randint(1, 30, (32, 12), generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3
    shorter = whole.clone()
    shorter[:, 3:] = 0
    with pytest.raises(EquidpError, match="given one by one"):
        GradientEngine(Masked("how"), cross_entropy).norms(whole, labels)
    for name in ("mask", "", "nothing"):
        engine = GradientEngine(Masked(name), cross_entropy)
        engine.norms(whole, labels)
        norms = engine.norms(shorter, labels)
        alone = [engine.plain_sum(shorter[i : i + 1], labels[i : i + 1]).norm() for i in range(32)]
        assert torch.allclose(norms, torch.stack(alone), rtol=1e-4)


class Annealed(nn.Module):
    """Has another temperature from its thousandth pass on; what it counts by, and where."""

    def __init__(self, count: Callable[[Annealed], float]) -> None:
        super().__init__()
        self.count, self.n, self.last = count, 0, nn.Linear(6, 3)
        self.tensor, self.listed = torch.zeros(()), [0, 0.0]
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) * (1.0 if self.count(self) < 1000 else 2.0)


REPLACED: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "another tensor": (torch.zeros(()), lambda kept: kept + 1),
    "a tensor of two": (torch.zeros(2), lambda kept: kept + 1),
    "an array": (np.zeros((2, 1)), lambda kept: kept + 1),
    "a tuple": (("passes", 0), lambda kept: ("passes", kept[1] + 1)),
    "another list": ([0], lambda kept: [kept[0] + 1]),
    "another dict": ({"passes": 0}, lambda kept: {"passes": kept["passes"] + 1}),
    "a fraction": (Fraction(0), lambda kept: kept + 1),
}
"""Counts that are no int or float, or stand in what is another object after every pass."""


def counting(where: str) -> Callable[[Annealed], float]:
    shared = 0

    def count(model: Annealed) -> float:
        nonlocal shared
        if where == "attribute":
            model.n += 1
            return model.n
        if where == "tensor":
            return float(model.tensor.add_(1))
        if where == "list":
            model.listed[1] += 1.0
            return model.listed[1]
        if where in REPLACED:
            start, after = REPLACED[where]
            model.kept = after(start if model.kept is None else model.kept)
            return 0.0
        shared += 1
        return shared

    return count


@pytest.mark.parametrize("where", ["attribute", "tensor", "list", "shared", *REPLACED])
def test_what_counts_its_passes_is_refused_as_a_large_batch_has_several(where: str) -> None:
    """One record more made another chunk, and from then on everybody's gradients were others, by up to a half."""
    engine = GradientEngine(Annealed(counting(where)), cross_entropy)
    with pytest.raises(EquidpError, match=r"after one more pass of the same records.*trainer\.steps_done"):
        engine.norms(torch.randn(8, 6), torch.arange(8) % 3)


def test_what_is_set_once_or_follows_from_the_records_is_no_count() -> None:
    def last(model: Annealed) -> float:
        model.n = 3
        model.listed[1] = float(model.last.weight.detach().sum())
        return 0.0

    GradientEngine(Annealed(last), cross_entropy).norms(torch.randn(8, 6), torch.arange(8) % 3)


class Converging(nn.Module):
    """A state that is stepped until all records' have come to rest, or so many times."""

    def __init__(self, *, together: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.together, self.inward, self.outward = together, nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        given = 10 * self.inward(x)
        state = torch.zeros_like(given)
        for _ in range(60):
            after = torch.tanh(given - 0.8 * state.roll(1, 1))
            if self.together and bool(((after - state).abs() < 1e-5).all()):
                break
            state = after
        return self.outward(after)


class MeanOfWords(nn.Module):
    """What is behind a text's end adds 0."""

    def __init__(self, *, together: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.together, self.table, self.out = together, nn.Embedding(WORDS, 24), nn.Linear(24, 3)


class CutToLongest(MeanOfWords):
    """Of texts that may be cut to the longest of the batch."""

    def forward(self, ids: Tensor) -> Tensor:
        if self.together:
            ids = ids[:, : int((ids != 0).sum(1).max())]
        present = (ids != 0).float().unsqueeze(2)
        words = (self.table(ids) * present).transpose(1, 2).contiguous()  # summed in vectors: in which depends on them
        return self.out(words.sum(2) / present.sum(1).clamp(min=1))


def long_texts(shortest: int = 6, longest: int = 37) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, WORDS, (24, 37), generator=generator)
    return ids.masked_fill(torch.arange(37) >= torch.randint(shortest, longest + 1, (24, 1), generator=generator), 0)


COMPUTING: dict[str, tuple[Callable[..., nn.Module], Callable[[], Tensor]]] = {
    "until all have converged": (Converging, lambda: torch.randn(24, 6, generator=torch.Generator().manual_seed(2))),
    "cut to the longest": (CutToLongest, long_texts),
}


@pytest.mark.parametrize("name", COMPUTING)
def test_what_is_computed_otherwise_for_other_batches_is_refused_where_every_bit_counts(name: str) -> None:
    """In passes of a public number of rows: one record less gave all others another last bit, and at a kink 128·Δ."""
    make, features = COMPUTING[name]
    seen, labels = features(), torch.arange(24) % 3
    with pytest.raises(EquidpError, match="last digits"):
        GradientEngine(make(together=True), cross_entropy, rows=32, exact=True).norms(seen, labels)
    for together in (True, False):
        engine = GradientEngine(make(together=together), cross_entropy, rows=32, exact=not together)
        norms = engine.norms(seen, labels)
        assert (norms > 0).all()


class Masking(MeanOfWords):
    """Leaves its mask out where no text is padded: outputs are the same, and gradients are rounded otherwise."""

    def forward(self, ids: Tensor) -> Tensor:
        present = (ids != 0).float().unsqueeze(2)
        words = self.table(ids) * present
        if self.together and bool((ids != 0).all()) and words.requires_grad:
            words.register_hook(lambda gradient: gradient * 0.3 / 0.3)
        return self.out(words.mean(1))


@pytest.mark.parametrize("padded", [True, False])
def test_gradients_that_are_rounded_otherwise_for_other_batches_are_refused_where_every_bit_counts(
    padded: bool,
) -> None:
    """As Llama's are in transformers: of 24 records one that is padded moved a sum by 23·Δ, where a rule drops some.

    Most batches have a padded text, or none has: neither shows what a text without padding among others does.
    """
    ids, labels = long_texts(longest=36) if padded else long_texts(shortest=37), torch.arange(24) % 3
    with pytest.raises(EquidpError, match=r"last digits.*eager"):
        GradientEngine(Masking(together=True), cross_entropy, rows=32, exact=True).norms(ids, labels)
    assert (GradientEngine(Masking(together=False), cross_entropy, rows=32, exact=True).norms(ids, labels) > 0).all()


def test_a_loss_that_is_computed_otherwise_for_other_batches_is_refused_where_every_bit_counts() -> None:
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        labels = labels[:, : int((labels >= 0).sum(1).max())]
        each = F.cross_entropy(outputs[:, :, : labels.shape[1]], labels, reduction="none", ignore_index=-1)
        return each.sum(1) / (labels >= 0).sum(1)

    ids = long_texts()
    labels = (ids % 3).masked_fill(ids == 0, -1)
    assert (GradientEngine(Tags(), loss).norms(ids, labels) > 0).all()
    with pytest.raises(EquidpError, match="last digits"):
        GradientEngine(Tags(), loss, rows=32, exact=True).norms(ids, labels)


def test_a_digit_that_is_another_one_each_time_is_not_the_other_records_doing() -> None:
    numbers = np.random.default_rng(0)

    def shaken(outputs: Tensor) -> Tensor:
        return outputs * (1 + 5e-6 * float(numbers.random()))

    engine = GradientEngine(By(shaken), cross_entropy, rows=32, exact=True)
    assert (engine.norms(torch.randn(24, 6), torch.arange(24) % 3) > 0).all()


def test_masks_of_numpys_generator_are_told_to_be_drawn_from_torchs() -> None:
    """As Wav2Vec2's apply_spec_augment draws them: a record's gradient is another one each time."""
    numbers = np.random.default_rng(0)

    def masked(outputs: Tensor) -> Tensor:
        return outputs * torch.from_numpy(numbers.random(outputs.shape) > 0.2)

    with pytest.raises(EquidpError, match="another generator than torch's"):
        GradientEngine(By(masked), cross_entropy).norms(torch.randn(24, 6), torch.arange(24) % 3)


class NoNumberBesideItself(nn.Module):
    """As a division by how far records lie apart."""

    def forward(self, features: Tensor) -> Tensor:
        return features * torch.where((features == features[:1]).all(), math.nan, 1.0)


def test_a_record_whose_gradient_is_a_number_by_others_alone_is_found() -> None:
    """One without a finite gradient is left out of the sum: whether it is, another one would decide."""
    with pytest.raises(EquidpError, match="changes with the other records of its batch"):
        GradientEngine(nn.Sequential(NoNumberBesideItself(), nn.Linear(6, 3)), cross_entropy).norms(
            torch.randn(4, 6), torch.arange(4) % 3
        )


def _dropped_layer(outputs: Tensor, chance: float) -> Tensor:
    """As layerdrop of transformers does it."""
    return 0 * outputs if torch.rand([]) < chance else outputs


SHARED: list[Callable[[Tensor], Tensor]] = [
    lambda outputs: outputs * torch.empty(1, 1).bernoulli_(0.5),  # as StochasticDepth(0.5, "batch")
    lambda outputs: _dropped_layer(outputs, 0.1),
    lambda outputs: _dropped_layer(F.dropout(outputs, 0.1), 0.1),
    lambda outputs: outputs + F.dropout(torch.ones(6), 0.1),
    lambda outputs: outputs @ (torch.eye(6) + 0.1 * torch.randn(6, 6)),
    lambda outputs: outputs[:, torch.randperm(6)],
    lambda outputs: outputs.roll(int(torch.randint(6, ())), 1),
    lambda outputs: outputs.roll(int(torch.empty(1).uniform_(2, 5).item()), 1),  # as torchvision's transforms draw
    lambda outputs: outputs * torch.distributions.Beta(1.0, 1.0).sample(),
    torch.vmap(partial(F.dropout, p=0.1), randomness="same"),
]


@pytest.mark.parametrize("drawing", SHARED)
def test_a_coin_that_records_share_is_found_as_passes_have_other_coins(drawing: Callable[[Tensor], Tensor]) -> None:
    """A record less moves one record of every further pass under another coin.

    However one couples the coins of both runs, 16 records in passes of two then moved the sum by 2.8 times its bound.
    """
    torch.manual_seed(0)
    engine = GradientEngine(By(drawing), cross_entropy)
    engine.in_pieces = True
    with pytest.raises(EquidpError, match="numbers that all records of a pass share"):
        engine.norms(torch.randn(8, 6), torch.arange(8) % 3)


def _kept_half(outputs: Tensor) -> Tensor:
    """As DINOv2 leaves a layer out: for a part of the batch, by a permutation."""
    chosen = torch.randperm(len(outputs))[: len(outputs) // 2]
    return outputs.index_add(0, chosen, outputs[chosen].tanh())


@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_part_of_the_batch_that_a_permutation_chooses_is_found(in_pieces: bool) -> None:
    """One record less has another choose: even given the random numbers, others' gradients are others."""
    torch.manual_seed(0)
    engine = GradientEngine(By(_kept_half), cross_entropy)
    engine.in_pieces = in_pieces
    with pytest.raises(EquidpError, match="a permutation of the records of a batch"):
        engine.norms(torch.randn(8, 6), torch.arange(8) % 3)


def _mirrored(outputs: Tensor) -> Tensor:
    """As the diffusion models of DDIM draw their steps."""
    steps = torch.randint(0, 9, (len(outputs) // 2 + 1,))
    return outputs * (torch.cat([steps, 8 - steps])[: len(outputs)].unsqueeze(1) - 3.5)


def _antithetic(outputs: Tensor) -> Tensor:
    drawn = torch.rand(len(outputs) // 2 + 1)
    return outputs * torch.cat([drawn, 1 - drawn])[: len(outputs)].unsqueeze(1)


def _centred(outputs: Tensor) -> Tensor:
    noise = torch.randn_like(outputs)
    return outputs + noise - noise.mean(0)


def _above_the_mean(outputs: Tensor) -> Tensor:
    drawn = torch.rand(len(outputs), 1)
    return outputs * (drawn > drawn.mean())


def _every_second(outputs: Tensor) -> Tensor:
    first = torch.randint(len(outputs), (1,))
    return outputs * ((torch.arange(len(outputs)) + first) % 2).unsqueeze(1)


def _in_pairs(outputs: Tensor) -> Tensor:
    return outputs * torch.rand(len(outputs), 1)[torch.arange(len(outputs)) // 2 * 2]


def _of_the_record_before(outputs: Tensor) -> Tensor:
    drawn = torch.distributions.Categorical(torch.ones(50)).sample((len(outputs),))  # in one row
    return outputs * (drawn + drawn.roll(1)).unsqueeze(1)


SEVERAL_RECORDS = [
    _mirrored, _antithetic, _centred, _above_the_mean, _every_second, _in_pairs, _of_the_record_before,
]  # fmt: skip


@pytest.mark.parametrize("drawing", SEVERAL_RECORDS)
def test_a_random_number_that_reaches_several_records_is_found(drawing: Callable[[Tensor], Tensor]) -> None:
    """One record less makes other pairs, or another mean: given the random numbers, others' gradients are others."""
    torch.manual_seed(0)
    with pytest.raises(EquidpError, match=r"one reaches several records|changes with the other records of its batch"):
        GradientEngine(By(drawing), cross_entropy).norms(torch.randn(8, 6), torch.arange(8) % 3)


def _paired(outputs: Tensor, labels: Tensor) -> Tensor:
    drawn = torch.randn((len(outputs) + 1) // 2, outputs.shape[1])
    return cross_entropy(outputs + torch.cat([drawn, -drawn])[: len(outputs)], labels)


def test_pairs_are_found_that_draw_as_many_numbers_as_there_are_records() -> None:
    """Half as many rows of two columns: these numbers were taken for one of each record. And a softmax
    does not show one number in the place of all."""
    torch.manual_seed(0)
    with pytest.raises(EquidpError, match="one reaches several records"):
        GradientEngine(nn.Linear(6, 2), _paired).norms(torch.randn(24, 6), torch.arange(24) % 2)


def test_a_model_that_seeds_what_it_draws_is_refused() -> None:
    """By masks that all know, and that follow the places, one record of 16 moved a sum by 3.3 times its bound."""

    def dropped(outputs: Tensor) -> Tensor:
        torch.manual_seed(0)
        return F.dropout(outputs, 0.5)

    with pytest.raises(EquidpError, match=r"seeds torch's generator in every pass"):
        GradientEngine(By(dropped), cross_entropy).norms(torch.randn(8, 6), torch.arange(8) % 3)


def _some_changed(outputs: Tensor) -> Tensor:
    """As augmentations of kornia, which draw numbers for those records alone that a coin has chosen."""
    chosen, changed = torch.rand(len(outputs)) < 0.5, outputs.clone()
    changed[chosen] = outputs[chosen] * torch.rand(int(chosen.sum()), 1)
    return changed


OF_EACH: list[Callable[[Tensor], Tensor]] = [
    lambda outputs: outputs * torch.randint(1, 9, (len(outputs), 1)),
    lambda outputs: outputs + torch.randn(2 * len(outputs), 6).view(2, -1, 6).sum(0),
    lambda outputs: outputs.gather(1, torch.rand_like(outputs).argsort(1)),  # as a masked autoencoder's patches
    lambda outputs: outputs * torch.empty(len(outputs), 1).bernoulli_(0.5),
    lambda outputs: _dropped_layer(outputs, 0.0),  # drawn, and never below 0: as in BART as it comes
    lambda outputs: F.dropout(outputs.T, 0.5).T,
    lambda outputs: F.dropout(outputs.clone(), 0.5, True, True),
    lambda outputs: torch.stack([row * torch.rand([]) for row in outputs]),
    lambda outputs: torch.distributions.Normal(outputs, 1.0).rsample(),
    F.gumbel_softmax,
    _some_changed,
    lambda outputs: torch.stack([row * torch.rand([]) if torch.rand([]) < 0.5 else row for row in outputs]),
    torch.vmap(partial(F.dropout, p=0.5), randomness="different"),
    torch.vmap(lambda row: row * torch.rand(1), randomness="different"),
    torch.vmap(lambda row: row + F.dropout(torch.ones(6)) * torch.randint(1, 3, ()), randomness="different"),
]


@pytest.mark.parametrize("drawing", OF_EACH)
def test_numbers_that_are_drawn_for_each_record_are_accepted(drawing: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    engine = GradientEngine(By(drawing), cross_entropy)
    engine.in_pieces = True
    assert engine.norms(torch.randn(8, 6), torch.arange(8) % 3).shape == (8,)


def test_draws_that_move_a_norm_as_little_by_chance_as_none_are_no_mixing_of_records() -> None:
    torch.manual_seed(2)  # with which the norms of both records are close in two draws, and not in a third
    engine = GradientEngine(By(lambda outputs: outputs + 0.02 * F.gumbel_softmax(outputs)), cross_entropy)
    assert engine.norms(torch.randn(8, 6), torch.arange(8) % 3).shape == (8,)


@pytest.mark.parametrize("drawing", [lambda x: x + torch.randn_like(x), lambda x: F.dropout(x, 0.5)])
def test_a_division_by_the_size_of_the_batch_is_found_behind_numbers_that_are_always_drawn(
    drawing: Callable[[Tensor], Tensor],
) -> None:
    """As a VAE's that also draws in evaluation mode: one record less lengthens all gradients."""
    torch.manual_seed(0)
    with pytest.raises(EquidpError, match="changes with the other records of its batch"):
        GradientEngine(By(drawing), lambda *given: cross_entropy(*given) / len(given[0])).norms(
            torch.randn(8, 6), torch.arange(8) % 3
        )


class Shortened(nn.Module):
    """Divides by the number of records, in training alone."""

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs / len(outputs) if self.training else outputs


def test_a_division_in_training_alone_is_found_behind_dropout() -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5), Shortened())
    with pytest.raises(EquidpError, match="changes with the other records of its batch"):
        GradientEngine(model, cross_entropy).norms(torch.randn(8, 6), torch.arange(8) % 3)
