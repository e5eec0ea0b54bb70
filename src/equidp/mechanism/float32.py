"""Bounds, noises and weights that float32 does not hold are refused before the first step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from equidp.accounting.plan import Plan, Segment
from equidp.errors import EquidpError
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import TINY, StepFacts, known_sensitivity, per_record, scheduled, sensitivity, tensors

SMALLEST, LARGEST = 1e-37, 1e37
"""Limits of the noise's standard deviation: within them float32 holds it with all its digits. A bound must be from
`SHORTEST` to `LARGEST`."""

SHORTEST = 1e-16
"""The least bound on what a record adds. The longest finite gradients have a norm of 2e19. To shorten one below this
bound takes weights and products for which float32 has too few digits. Their rounding, up to 1e-26, would leave it
longer than its bound."""


def refuse_vanishing(algorithm: Algorithm, plan: Plan, segments: Sequence[Segment], dimension: int) -> None:
    """Refuse bounds, noises and weights that float32 takes for 0 or infinite: noise would vanish, or the sum be NaN.

    Close to 0, where float32 loses digits, a weighted gradient may even be rounded to more than its bound. Values that
    a side release leads from step to step (`steers`) are checked at their start and at their least. Values that it
    gives are checked for the fewest and the most units that it may count.

    Raises:
        EquidpError: with the bound, the noise or the weight that float32 does not hold.
    """
    rule, side, public = algorithm.weights, algorithm.side_release, tensors(algorithm.initial, "cpu")
    if rule is None:
        return
    rate = algorithm.sampler.sampling_rate(plan)
    led = rule.reads & side.steers if side else frozenset()
    least = public | {name: torch.tensor(TINY) for name in led}
    if side is not None and side.noise(plan) > LARGEST:
        raise EquidpError(
            f"{algorithm.name}: the side release's noise would be {side.noise(plan):g}, of which float32 holds "
            f"{LARGEST:g} at most; lower it."
        )
    counts = (0.0,) if side is None else (0.0, plan.records + 6 * side.noise(plan))
    for segment, values, count in itertools.product(segments, (public, least) if led else (public,), counts):
        values = scheduled(values, segment)
        if side is not None:
            nobody = side.statistic(torch.zeros(0), torch.zeros(0, dtype=torch.int64), values, plan)
            facts = StepFacts(
                plan, 0, plan.noise_multiplier * segment.noise, known_sensitivity(rule, values), dimension, rate
            )
            values |= side.consequences(torch.full_like(nobody, count), public, values, facts)[1]
        known = rule.reads <= values.keys()  # if not, the sampler gives the bound, which is below the clip norm
        bound = float(sensitivity(rule, values) if known else values["clip_norm"])
        noise = bound * plan.noise_multiplier * segment.noise
        if not (SHORTEST <= bound <= LARGEST and SMALLEST <= noise <= LARGEST):
            raise EquidpError(
                f"{algorithm.name}: in some step a record's influence would be bounded by {bound:g}, and the noise be "
                f"{noise:g}, in float32; choose clip norms, noise and decays for which the bound stays within "
                f"{SHORTEST:g} and {LARGEST:g}, the noise within {SMALLEST:g} and {LARGEST:g}."
            )
        seen = per_record(values, torch.arange(plan.groups))
        if known and not rule.weights(torch.zeros(plan.groups), seen).isfinite().all():
            raise EquidpError(
                f"{algorithm.name}: in some step a record without a gradient would have an infinite weight in float32; "
                "raise the norms and the stability that divide."
            )
