"""Shared: refuses a model in which the records of one pass share random numbers, where a batch may take several passes.

Such is the coin that leaves a layer out for a whole batch (layerdrop, StochasticDepth(mode="batch")), or dropout of a
table that all records read. If every pass has all records, no harm is done: given all numbers, a record moves the sum
by no more than its bound. But if a batch is cut, one record less moves a record of each further pass to the numbers of
the pass before. However the numbers of both runs are coupled, 16 records in passes of two, with a coin each, then moved
the sum by 2.8 times the bound, and in passes of eight by 1.4 times.

Even in one pass no permutation of the records may decide: `torch.randperm(len(x))[: len(x) // 2]`, say, as the records
that keep a layer. One record less is another permutation, which moves others.

Nor may a number reach several records, as in antithetic pairs (`torch.cat([t, T - 1 - t])`), or through the mean of the
batch's noise. One record less makes other pairs, and another mean. For example, gradients that cancel within each pair,
whatever is drawn, cancel no longer.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor

from equidp.errors import EquidpError
from equidp.gradients.agreement import close, nearby
from equidp.gradients.bookkeeping import BookKeeping
from equidp.gradients.drawn import Drawing, Kept, drawn_apart, draws, generators, seeded_norms
from equidp.gradients.precision import as_precise_as_norms

OTHERS = 0.0, 1 - 2.0**-20, None
"""Numbers in the place of those drawn. A coin is compared with a chance, and the first two lie on its two sides. None:
numbers that are drawn anew, as others show more of an angle or a place.
"""

ODD = 31
"""At most so many records are tried with other numbers for some: columns that look like records are seldom so many.

The number of records is odd: of an even one, two numbers for each pair are as many as one for each record.
"""


def refuse_shared_draws(passes: BookKeeping, features: Tensor, labels: Tensor, *, in_pieces: bool) -> None:
    """Refuse a model in which records of one pass share random numbers, such as the coin that leaves out a layer.

    Args:
        passes: the forward and backward passes of the model.
        features: `[b, …]`, of at least two records.
        labels: `[b, …]`.
        in_pieces: whether a batch may take several passes; if not, numbers that all records share are allowed.

    Raises:
        EquidpError: it says what to draw instead.
    """
    with drawn_apart(passes) as seed, as_precise_as_norms(), passes.parameters_at(nearby(passes)):
        if not draws(passes, features, labels, seed):
            return
        after = generators(passes)
        if draws(passes, features, labels, seed + 1) and generators(passes).equal(after):
            raise EquidpError(
                "The model or its loss seeds torch's generator in every pass (torch.manual_seed), so everybody knows "
                "what it draws, and one record less gives others the known numbers of another place: leave it out."
            )
        permuted, shared = _of_all(passes, features, labels, seed)
        if permuted and not _the_same(passes, features, labels, seed, permuted):
            raise EquidpError(
                "The model or its loss draws a permutation of the records of a batch, which decides what happens to "
                "each: one record less gives others another place. Draw for each record (torch.rand(len(x)) < p)."
            )
        odd = (min(len(features), ODD) - 1) | 1
        if _reach_others(passes, features[:odd], labels[:odd], seed, shared | permuted):
            raise EquidpError(
                "The model or its loss draws random numbers of which one reaches several records, as in antithetic "
                "pairs of a batch, or in noise from which the batch's mean is taken: one record less changes those of "
                "others. Draw for each record alone (torch.rand(len(x)))."
            )
        if in_pieces and shared and not _the_same(passes, features, labels, seed, shared):
            raise EquidpError(
                "The model or its loss draws random numbers that all records of a pass share: one coin for the whole "
                "batch, say, or dropout of what all records read. This run's batches may take several passes, so one "
                "record less gives others another pass's numbers: draw them for each record "
                "(StochasticDepth(mode='row')), or leave them out (layerdrop=0)."
            )


def _of_all(passes: BookKeeping, features: Tensor, labels: Tensor, seed: int) -> tuple[set[int], set[int]]:
    """Return which calls draw a permutation of the records, and which draw numbers that all records share.

    Numbers are shared if as many are drawn for few records as for all of them.
    """
    sizes, permutations = [], set[int]()
    for records in (min(2, len(features) - 1), len(features)):  # torch draws nothing to permute one record
        with Drawing(passes) as drawing:
            seeded_norms(passes, features[:records], labels[:records], seed)
        sizes.append(drawing.sizes)
        permutations = drawing.permutations
    few, every = sizes
    if len(few) != len(every):  # so many calls for each record
        return set(), set()
    shared = {place for place, (one, other) in enumerate(zip(few, every, strict=True)) if one == other}
    return {place for place in permutations - shared if few[place] < every[place]}, shared


def _reach_others(passes: BookKeeping, features: Tensor, labels: Tensor, seed: int, but: set[int]) -> bool:
    """Whether a number that one of the calls draws, beside those of `but`, changes the norms of several records."""
    records = len(features)
    if records < 3:
        return False
    middle = records // 2 | 1  # odd, so that it parts neighbours of which each second one has the number of the first
    second_half = partial(_of_later, records, middle)
    with Drawing(passes, None, ()) as drawing:
        norms = seeded_norms(passes, features, labels, seed)

    def moved(by: float | None, only: Collection[int], kept: Kept) -> Tensor | None:
        """Return the norms with other numbers; None if these decide how many are drawn later, which shifts all."""
        with Drawing(passes, by, only, kept) as again:
            found = seeded_norms(passes, features, labels, seed)
        return found if again.sizes == drawing.sizes else None

    calls = [call for call, size in enumerate(drawing.sizes) if call not in but and math.isfinite(size)]
    for by in OTHERS[1:]:  # no 0, which switches dropout off
        together = moved(by, calls, second_half)
        singly = [moved(by, [call], second_half) for call in calls] if together is None else [together]
        if any(found is not None and not close(passes, norms[middle:], found[middle:]) for found in singly):
            return True
    for call in calls:
        if drawing.sizes[call] % records == 0 or (found := moved(None, [call], _all_but_one)) is None:
            continue
        apart = [not close(passes, *pair) for pair in zip(norms.split(1), found.split(1), strict=True)]
        if sum(apart) > 1:
            return True
    return False


def _of_later(records: int, first: int, drawn: Tensor, _: Tensor) -> Tensor:
    """Mark the numbers of the records from the `first` on; all numbers, if there is none for each record."""
    at = 1 if drawn.shape[:1] == (1,) else 0  # torch's laws of classes (Categorical) are sampled in one row
    if drawn.shape[at : at + 1] != (records,):
        return torch.ones_like(drawn, dtype=torch.bool)
    kept = torch.arange(records, device=drawn.device) >= first
    return kept.view(-1, *[1] * (drawn.dim() - at - 1)).expand_as(drawn)


def _all_but_one(drawn: Tensor, anew: Tensor) -> Tensor:
    """Mark all numbers but the first of those that are others anew."""
    changed = (drawn != anew).flatten()
    return ~(changed & (changed.cumsum(0) == 1)).view(drawn.shape)


def _the_same(passes: BookKeeping, features: Tensor, labels: Tensor, seed: int, calls: set[int]) -> bool:
    """Whether norms `[b]` are the same for each of `OTHERS` in the place of what these calls have drawn."""
    found = []
    for by in OTHERS:
        with Drawing(passes, by, calls):
            found.append(seeded_norms(passes, features, labels, seed))
    return all(close(passes, found[0], norms) for norms in found[1:])
