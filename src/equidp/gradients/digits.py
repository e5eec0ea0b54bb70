"""Digits: where every bit counts, records are compared to the last bit, beside others and beside their copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from equidp.errors import EquidpError
from equidp.gradients.bookkeeping import BookKeeping
from equidp.gradients.picks import refuse_picks
from equidp.gradients.probe import SEVERAL, drawn_apart, nearby, reseed
from equidp.gradients.refusals import same
from equidp.gradients.varied import filled, takes, varied

AGAIN = 3
"""So many times digits must repeat themselves before others are said to change them."""

COPIED = 8
"""So many records are tried among copies of themselves."""


def compare_digits(
    passes: BookKeeping, seen: Callable[[Tensor, Tensor], list[Tensor]], features: Tensor, labels: Tensor
) -> None:
    """Of the first records of a batch, in pairs: is each one the same to the last bit beside others and beside itself?

    What cuts its batch to the longest text, or repeats a step until all have converged, computes the same for a record,
    but rounds it by the others. Some are tried among copies of themselves. Near the parameters, as no digit of a zero
    shows.

    Args:
        seen: what passes of a public number of rows compute of `[b, …]` features and labels, forward and backward,
            `[b, …]` each.

    Raises:
        EquidpError: for a record that is another one beside others, and not so from time to time, or that may be, as
            a function rounds by place what a mask picks.
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
                    continue  # another one each time, as where a GPU adds in no fixed order
                raise EquidpError(
                    "A record's last digits change with the other records of its batch, as the model or the loss "
                    "computes something else for other batches (one cut to its longest text, steps until all have "
                    "converged, a layer that some records reach, a mask left out where no text is padded). In a secure "
                    "run such a digit may turn a whole gradient, at a kink, by more than ε allows for: compute the "
                    "same for every batch, of records padded to one length; of a model of transformers, try "
                    'attn_implementation="eager".'
                )


def _alike(found: Sequence[Tensor], others: Sequence[Tensor], places: Tensor) -> bool:
    pairs = zip(found, others, strict=False)  # of another number of calls the later ones are others, too
    return len(found) == len(others) and all(same(one[places], other[places]) for one, other in pairs)
