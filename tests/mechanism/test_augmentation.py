"""Random views: what they look like, whose they are, and that a record still adds no more than its bound."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.algorithms.conftest import Laboratory, lab  # noqa: F401 (a fixture)
from torch import Tensor

from equidp.accounting.ledger import Ledger
from equidp.errors import EquidpError
from equidp.mechanism.augmentation import PRIME, Augmentation
from equidp.mechanism.optimizers import Descent
from equidp.mechanism.parts import sensitivity
from equidp.mechanism.sampling import Batch, Examples, Population

IMAGES = torch.randint(0, 256, (9, 2, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
MOVING = Augmentation(3, ("flip", "crop"), key=5, shape=(2, 6, 5), padding=2)
NOISY = Augmentation(2, ("noise",), key=5, shape=(4,), sd=0.5)


def batch(features: Tensor, rows: Tensor | None = None) -> Batch:
    rows = torch.arange(len(features)) if rows is None else rows
    return Batch(rows, features[rows], torch.zeros(len(rows), dtype=torch.int64), None, lambda: rows, rows)


def of(augmentation: Augmentation, features: Tensor, rows: Tensor | None = None, step: int = 0) -> Tensor:
    """`[m, b, …]`."""
    drawn = batch(features, rows)
    return augmentation.of(drawn, drawn.rows, step).features.unflatten(0, (augmentation.views, -1))


def test_a_view_is_a_piece_of_the_image_padded_by_its_mirror_image_and_perhaps_mirrored() -> None:
    padded = F.pad(IMAGES.float(), (2, 2, 2, 2), mode="reflect")
    pieces = torch.stack([p[:, :, y : y + 6, x : x + 5] for p in (padded, padded.flip(3)) for x in range(5)
                          for y in range(5)])  # fmt: skip
    numbers = MOVING._numbers(torch.arange(9), 0) % 50
    expected = torch.stack([pieces[n, torch.arange(9)] for n in numbers])
    assert torch.equal(of(MOVING, IMAGES).float(), expected)
    only = dataclasses.replace(MOVING, kinds=("flip",), views=20)
    flipped = (of(only, IMAGES) == IMAGES.flip(3)).flatten(2).all(2)
    assert ((of(only, IMAGES) == IMAGES).flatten(2).all(2) ^ flipped).all()
    assert 0.3 < flipped.float().mean() < 0.7


def test_all_views_are_as_likely_and_one_step_or_record_tells_nothing_of_another() -> None:
    numbers = dataclasses.replace(MOVING, views=2)._numbers(torch.arange(20_000), 3) % 50
    for view in numbers:
        counts = torch.bincount(view, minlength=50)
        assert 400 * 0.8 < counts.min() <= counts.max() < 400 * 1.2  # sd 20
    assert abs((numbers[0] == numbers[1]).float().mean() - 0.02) < 0.005
    over = torch.cat([MOVING._numbers(torch.tensor([3, 4]), step) for step in range(1000)]) % 5
    assert abs((over[:, 0] == over[:, 1]).float().mean() - 0.2) < 0.03  # sd 0.007
    assert not torch.equal(MOVING._numbers(torch.arange(9), 3), MOVING._numbers(torch.arange(9), 4))
    other = dataclasses.replace(MOVING, key=6)
    assert not torch.equal(MOVING._numbers(torch.arange(9), 3), other._numbers(torch.arange(9), 3))


@pytest.mark.parametrize(("augmentation", "features"), [(MOVING, IMAGES), (NOISY, torch.rand(9, 4))])
def test_nobodys_views_depend_on_who_else_is_in_the_batch(augmentation: Augmentation, features: Tensor) -> None:
    some = torch.tensor([7, 2, 3])
    assert torch.equal(of(augmentation, features, some), of(augmentation, features)[:, some])
    assert torch.equal(of(augmentation, features, some), of(augmentation, features, some))
    assert of(augmentation, features, some[:0]).shape[1:] == (0, *features.shape[1:])


def test_views_follow_the_records_identity_and_else_its_row(lab: Laboratory) -> None:  # noqa: F811
    records = lab.records()
    rows = torch.tensor([4, 1])
    assert torch.equal(Population(records, records.labels).identities(rows), rows)
    assert torch.equal(Population(Examples(records.features, records.labels), records.labels).identities(rows), rows)
    identity = torch.randint(-(2**62), 2**62, (40, 2))
    known = dataclasses.replace(records, identity=identity)
    rest = known.take(torch.arange(1, 40))  # one record fewer in the table: the rows close up
    assert torch.equal(
        Population(rest, rest.labels).identities(rows - 1), Population(known, known.labels).identities(rows)
    )
    seen = NOISY._numbers(identity[:, 0] % PRIME, 0)
    assert 0 <= seen.min() <= seen.max() < PRIME


def test_noise_has_its_size_and_is_no_others() -> None:
    wide = dataclasses.replace(NOISY, shape=(400,))
    noise = of(wide, torch.zeros(20, 400)).flatten(0, 1)
    assert abs(noise.std() - 0.5) < 0.02
    assert abs(noise.mean()) < 0.02
    assert torch.corrcoef(noise).fill_diagonal_(0).abs().max() < 0.3
    assert torch.allclose(of(wide, torch.ones(20, 400)).flatten(0, 1), noise + 1)


@pytest.mark.parametrize(
    ("views", "kinds", "shape", "words"),
    [
        (0, ("noise",), (4,), "1 view or more"),
        (2, (), (4,), r"not \(\)"),
        (2, ("rotate",), (2, 6, 5), r"not \('rotate',\)"),  # silently left the records as they are
        (2, ("noise", "crop"), (2, 6, 5), r"not \('noise', 'crop'\)"),  # silently left the crops out
        (2, ("flip",), (4,), r"images \[c, h, w\], not of \[4\]"),
    ],
)
def test_views_that_there_are_not_are_refused(views: int, kinds: tuple[str, ...], shape, words: str) -> None:
    with pytest.raises(EquidpError, match=words):
        Augmentation(views, kinds, key=5, shape=shape)


@pytest.mark.parametrize("given", [{"padding": -1}, {"head": -2}])
def test_pieces_that_would_reach_into_the_next_record_are_refused(given: dict[str, int]) -> None:
    with pytest.raises(EquidpError, match=r"of an augmentation is 0 or more, not -"):
        dataclasses.replace(MOVING, **given)


def test_leading_columns_stay() -> None:
    numbered = torch.cat([torch.arange(9, dtype=torch.uint8)[:, None], IMAGES.flatten(1)], 1)
    seen = of(dataclasses.replace(MOVING, head=1), numbered)
    assert torch.equal(seen[..., 0], numbered[:, 0].expand(3, 9))
    assert torch.equal(seen[..., 1:], of(MOVING, IMAGES).flatten(2))


def test_more_padding_than_can_be_reflected_is_refused() -> None:
    with pytest.raises(EquidpError, match=r"training.augmentation_padding=5: images of 6×5 have no more than 4 pixels"):
        dataclasses.replace(MOVING, padding=5)


@pytest.mark.parametrize("name", ["dpsgd", "dpsgd_f", "psasc_momentum", "psasc_momentum_gd", "dpis", "auto_s"])
def test_whoever_leaves_moves_the_sum_by_no_more_than_the_sensitivity(lab: Laboratory, name: str) -> None:  # noqa: F811
    """At its own weights, on views; and nobody else's weight or view moves with it."""
    noisy = Augmentation(3, ("noise",), key=1, shape=(6,), sd=2.0)
    trainer = lab.trainer(name, augmentation=noisy, plan=lab.plan(epochs=3))
    trainer.run_steps(2)
    segment = trainer.segments[0]
    public = trainer.public_values(segment) | trainer.given
    public |= {k: torch.ones(()) for k in trainer.algorithm.weights.reads - public.keys()}
    everyone = torch.arange(40)
    whole = trainer.weighted_sum([trainer.batch(everyone)], public)
    for gone in (0, 17, 39):
        rest = trainer.weighted_sum([trainer.batch(everyone[everyone != gone])], public)
        own = trainer.weighted_sum([trainer.batch(everyone[gone : gone + 1])], public)
        torch.testing.assert_close(whole - rest, own, rtol=1e-4, atol=1e-5)
        assert own.norm() <= float(sensitivity(trainer.algorithm.weights, public)) * (1 + 1e-4)


@pytest.mark.parametrize("name", ["dpsgd", "sgd", "psasc_momentum_gd"])
def test_a_records_gradient_is_the_mean_over_its_views(lab: Laboratory, name: str) -> None:  # noqa: F811
    noisy = Augmentation(3, ("noise",), key=1, shape=(6,), sd=2.0)
    trainer = lab.trainer(name, augmentation=noisy)
    seen = trainer.batch(torch.arange(40))
    norms = trainer.contributing.norms(seen)
    alone = []
    for view in seen.features.unflatten(0, (3, 40)):
        trainer.contributing.norms(dataclasses.replace(seen, features=view, views=1))
        alone.append(torch.stack([trainer.contributing.weighted_sum(one) for one in torch.eye(40)]))
    torch.testing.assert_close(norms, torch.stack(alone).mean(0).norm(dim=1), rtol=1e-4, atol=1e-5)
    total = trainer.engine.plain_sum(seen.features, seen.labels, views=3)
    torch.testing.assert_close(total, torch.stack(alone).mean(0).sum(0), rtol=1e-4, atol=1e-4)


def test_a_resumed_run_goes_on_with_average_schedule_and_views(lab: Laboratory) -> None:  # noqa: F811
    more: dict[str, Any] = {
        "plan": lab.plan(epochs=2),
        "augmentation": Augmentation(2, ("noise",), key=1, shape=(6,)),
        "optimizer": Descent("adam", adam_epsilon=1e-3, weight_decay=0.1, schedule="cosine"),
    }
    options = {"released_weights": "average"}
    whole, first = (lab.trainer("custom", options, **more) for _ in range(2))
    whole.run_steps(8)
    first.run_steps(3)
    again = lab.trainer("custom", options, ledger=Ledger(first.ledger.events), **more)
    again.load_state_dict(first.state_dict())
    again.run_steps(5)
    assert torch.equal(again.engine.flatten(), whole.engine.flatten())
    assert torch.equal(again.releasing.weights(), whole.releasing.weights())
