"""The trial of a model before its first use: taken once for each kind, or left out, where it is not what is tested."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from equidp.gradients import engine
from equidp.gradients.bookkeeping import BookKeeping
from equidp.gradients.probe import SEVERAL, probe

KNOWN: dict[Any, int] = {}


@contextmanager
def tried_once() -> Iterator[None]:
    """Within, `probe` is asked once for each kind of model, loss and batch.

    It is half the work of a small training, and the same whichever algorithm trains. A class of a test's own is another
    one each time that the test runs, and so is its model.
    """

    def once(passes: BookKeeping, features: Tensor, labels: Tensor, *, others: bool) -> int:
        layers = tuple((type(layer), layer.training, layer.extra_repr()) for layer in passes.model.modules())
        trained = tuple((tuple(p.shape), p.requires_grad) for p in passes.model.parameters())
        given = tuple((type(of), of.dtype, tuple(of.shape)) for of in (features, labels))
        kind = (layers, trained, given, passes.loss, passes.precision)
        if not KNOWN.get(kind):  # 0: nothing was to be seen
            KNOWN[kind] = probe(passes, features, labels, others=others)
        return KNOWN[kind]

    with mock.patch.object(engine, "probe", once):
        yield


@contextmanager
def untried() -> Iterator[None]:
    """Within, `probe` says that it found nothing: for tests that hold all gradients to autograd's themselves."""
    with mock.patch.object(engine, "probe", lambda passes, features, labels, *, others: min(len(features), SEVERAL)):
        yield
