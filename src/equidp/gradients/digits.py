"""Digits: in secure runs a record's gradient must be the same to the last bit, whatever records are beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from equidp.errors import EquidpError
from equidp.gradients.agreement import nearby
from equidp.gradients.bookkeeping import BookKeeping
from equidp.gradients.drawn import drawn_apart, reseed
from equidp.gradients.picks import refuse_picks
from equidp.gradients.probe import SEVERAL
from equidp.gradients.refusals import same
from equidp.gradients.varied import filled, takes, varied

AGAIN = 3
"""Digits must repeat in so many further passes before a difference is blamed on the other records."""

COPIED = 8
"""Number of records that are tried in a batch of copies of themselves."""


def compare_digits(
    passes: BookKeeping, seen: Callable[[Tensor, Tensor], list[Tensor]], features: Tensor, labels: Tensor
) -> None:
    """Refuse a model or a loss by which other records change a record's last digits.

    For example, a model may cut its batch to the longest text, or repeat a step until all records have converged. It
    computes the same function of a record, but rounds it differently beside other records. The first records of the
    batch are compared in pairs: each beside its neighbour, and each beside a copy of itself. Some are also compared in
    a batch of their own copies. The parameters are moved a little first, because where one is zero digits do not show.

    Args:
        seen: computes `[b, …]` features and labels in passes of a public number of rows, and returns what these
            compute forward and backward, each `[b, …]`.
        features: `[b, …]`.
        labels: `[b, …]`.

    Raises:
        EquidpError: a record's digits change with the other records, each time that it is tried; or they may change,
            because values that a mask picks go through a function that rounds by their place.
    """
    features, labels = features[:SEVERAL], labels[:SEVERAL]
    places = torch.arange(len(features), device=features.device)
    with drawn_apart(passes) as seed, passes.parameters_at(nearby(passes)):

        def now(some: Tensor, theirs: Tensor) -> list[Tensor]:
            reseed(passes, seed)
            return seen(some.clone(), theirs.clone())

        pairs = [places + kept - places % 2 for kept in range(2)]
        copies = [torch.full_like(places, place) for place in range(min(COPIED, len(places)))]
        tried = [features, varied(passes, features, labels)]
        longer = filled(passes.model, features)
        # on a GPU a number that a table does not have ends the process
        if passes.device.type == "cpu" and not same(longer, features) and takes(passes, longer, labels):
            tried.append(longer)
        for some in tried:
            reseed(passes, seed)
            refuse_picks(passes, some, labels)
            together = now(some, labels)
            for taken in (*pairs, *copies):
                taken = taken.clamp(max=len(places) - 1)
                beside = now(some[taken], labels[taken])
                if _alike(together, beside, places[taken == places]):
                    continue
                again = ((now(some, labels), now(some[taken], labels[taken])) for _ in range(AGAIN))
                if not all(_alike(together, of, places) and _alike(beside, its, places) for of, its in again):
                    continue  # the digits differ from pass to pass, as on a GPU that adds in no fixed order
                raise EquidpError(
                    "A record's last digits change with the other records of its batch, as the model or the loss "
                    "computes something else for other batches (one cut to its longest text, steps until all have "
                    "converged, a layer that some records reach, a mask left out where no text is padded). In a secure "
                    "run such a digit may turn a whole gradient, at a kink, by more than ε allows for: compute the "
                    "same for every batch, of records padded to one length; of a model of transformers, try "
                    'attn_implementation="eager".'
                )


def _alike(found: Sequence[Tensor], others: Sequence[Tensor], places: Tensor) -> bool:
    pairs = zip(found, others, strict=False)  # the numbers of calls may differ: the last line compares them
    return len(found) == len(others) and all(same(one[places], other[places]) for one, other in pairs)
