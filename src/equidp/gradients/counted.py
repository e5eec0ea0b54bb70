"""Counted: a model or a loss that changes a number of its own with every pass, and so computes something else later.

A batch takes a pass for each chunk, and a look at the model takes some more. So a count of passes follows from how many
records a batch has, and one record more moves the gradients of everybody in all later steps: a temperature that falls
with the calls of its layer moved them by half their length.
"""

from __future__ import annotations

from torch import Tensor

from equidp.errors import EquidpError
from equidp.gradients.bookkeeping import BookKeeping
from equidp.gradients.precision import as_precise_as_norms
from equidp.gradients.probe import drawn_apart, reseed
from equidp.gradients.remembered import numbers_in


def refuse_counted(passes: BookKeeping, features: Tensor, labels: Tensor) -> None:
    """Refuse numbers that are others after one more pass of the same records `[b, …]`, with the same random numbers.

    Numbers that are looked at are those that `remembered` would set back: attributes, what functions share, and those
    in lists, dicts, tuples, tensors and arrays there, whether these are changed or others take their place.

    Raises:
        EquidpError: naming the first of them.
    """
    with drawn_apart(passes) as seed, as_precise_as_norms():

        def once() -> None:
            reseed(passes, seed)
            passes.norms(features.clone(), labels.clone())

        once()  # what the first pass of so many records sets stays
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
    """Whether a number is another one, or one of as many in a list: a list that grows is no count of its own."""
    if after is None or before is None:
        return False
    if isinstance(after, tuple) and isinstance(before, tuple):
        return len(after) == len(before) and any(map(_is_other, after, before))
    return after != before and not (after != after and before != before)
