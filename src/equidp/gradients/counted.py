"""Counted: refuses a model or a loss that counts its own passes.

A batch takes one pass for each chunk, and each look at the model takes some more. So the number of passes depends on
how many records a batch has. If the model computes with that count, one record more changes the gradients of all
records in all later steps. Example: a temperature that falls with each call of its layer moved them by half their
length.
"""

from __future__ import annotations

from torch import Tensor

from equidp.errors import EquidpError
from equidp.gradients.bookkeeping import BookKeeping
from equidp.gradients.drawn import drawn_apart, reseed
from equidp.gradients.precision import as_precise_as_norms
from equidp.gradients.remembered import numbers_in


def refuse_counted(passes: BookKeeping, features: Tensor, labels: Tensor) -> None:
    """Refuse a model or a loss in which a number changes by one more pass of the same records.

    The numbers are those that `remembered` can set back: attributes, variables that functions share, and numbers in
    lists, dicts, tuples, tensors and arrays found there. A list that is changed counts, and so does a new list in its
    place. Both passes draw the same random numbers.

    Args:
        features: `[b, …]`.
        labels: `[b, …]`.

    Raises:
        EquidpError: it names the first number that changed.
    """
    with drawn_apart(passes) as seed, as_precise_as_norms():

        def once() -> None:
            reseed(passes, seed)
            passes.norms(features.clone(), labels.clone())

        once()  # what only the first pass of this shape sets is no count
        numbers = numbers_in(passes.model, passes.loss)
        once()
        for name, now, before in numbers:
            after = now()
            if _is_other(after, before):
                changed = "has other numbers" if isinstance(after, tuple) else f"was {before} and is {after}"
                raise EquidpError(
                    f"{name} {changed} after one more pass of the same records. A large batch takes several passes, so "
                    "what counts them lets one record change everybody's gradients from then on: leave it out, or set "
                    "it between steps, from trainer.steps_done."
                )


def _is_other(after: object, before: object) -> bool:
    """Whether a number changed, or one in a list of unchanged length. A list that grows is not taken as a count."""
    if after is None or before is None:
        return False
    if isinstance(after, tuple) and isinstance(before, tuple):
        return len(after) == len(before) and any(map(_is_other, after, before))
    return after != before and not (after != after and before != before)
