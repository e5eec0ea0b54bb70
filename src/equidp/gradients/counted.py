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
from equidp.gradients.remembered import NUMBERS, numbers_in


def refuse_counted(passes: BookKeeping, features: Tensor, labels: Tensor) -> None:
    """Refuse numbers that are others after one more pass of the same records `[b, …]`, with the same random numbers.

    Numbers that are looked at are those that `remembered` would set back: attributes, and what functions share.

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
            if isinstance(after, NUMBERS) and after != before and not (after != after and before != before):
                raise EquidpError(
                    f"{name} was {before} and is {after} after one more pass of the same records. A large batch takes "
                    "several passes, so what counts them lets one record change everybody's gradients from then on: "
                    "leave it out, or set it between steps, from trainer.steps_done."
                )
