"""Shared: refuses a model in which the records of one pass share random numbers, where a batch may take several passes.

Such is the coin that leaves a layer out for a whole batch (layerdrop, StochasticDepth(mode="batch")), or dropout of a
table that all records read. If every pass has all records, no harm is done: given all numbers, a record moves the sum
by no more than its bound. But if a batch is cut, one record less moves a record of each further pass to the numbers of
the pass before. However the numbers of both runs are coupled, 16 records in passes of two, with a coin each, then moved
the sum by 2.8 times the bound, and in passes of eight by 1.4 times.
"""

from __future__ import annotations

from torch import Tensor

from equidp.errors import EquidpError
from equidp.gradients.bookkeeping import BookKeeping
from equidp.gradients.drawn import Drawing, drawn_apart, draws, seeded_norms
from equidp.gradients.precision import as_precise_as_norms
from equidp.gradients.probe import close, nearby

OTHERS = 0.0, 1 - 2.0**-20, None
"""Numbers in the place of those drawn. A coin is compared with a chance, and the first two lie on its two sides. None:
numbers that are drawn anew, as others show more of an angle or a place.
"""


def refuse_shared_draws(passes: BookKeeping, features: Tensor, labels: Tensor) -> None:
    """Refuse a model in which records of one pass share random numbers, such as the coin that leaves out a layer.

    Args:
        passes: the forward and backward passes of the model.
        features: `[b, …]`, of at least two records.
        labels: `[b, …]`.

    Raises:
        EquidpError: it says what to draw instead.
    """
    with drawn_apart(passes) as seed, as_precise_as_norms(), passes.parameters_at(nearby(passes)):
        if not draws(passes, features, labels, seed):
            return
        first, *others = _by_others(passes, features, labels, seed)
        if not all(close(passes, first, norms) for norms in others):
            raise EquidpError(
                "The model or its loss draws random numbers that all records of a pass share: one coin for the whole "
                "batch, say, or dropout of what all records read. This run's batches may take several passes, so one "
                "record less gives others another pass's numbers: draw them for each record "
                "(StochasticDepth(mode='row')), or leave them out (layerdrop=0)."
            )


def _by_others(passes: BookKeeping, features: Tensor, labels: Tensor, seed: int) -> list[Tensor]:
    """Return norms `[b]` for each of `OTHERS` in the place of the random numbers that all records of a pass share.

    Numbers are shared if as many are drawn for one record as for all of them. All others remain as drawn.

    Args:
        passes: the forward and backward passes of the model.
        features: `[b, …]`, of at least two records.
        labels: `[b, …]`.
        seed: of the generators.
    """
    sizes = []
    for records in (1, len(features)):
        with Drawing(passes) as drawing:
            seeded_norms(passes, features[:records], labels[:records], seed)
        sizes.append(drawing.sizes)
    of_one, of_all = sizes
    shared = {place for place, (one, every) in enumerate(zip(of_one, of_all, strict=False)) if one == every}
    if len(of_one) != len(of_all):  # so many calls for each record
        shared = set()
    found = []
    for by in OTHERS:
        with Drawing(passes, by, shared):
            found.append(seeded_norms(passes, features, labels, seed))
    return found
