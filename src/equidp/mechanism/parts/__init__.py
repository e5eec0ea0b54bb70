"""What an algorithm is made of, and what each part must promise.

An algorithm is one combination of nine kinds of parts, a file each:

    sampler        who is in the batch                          Poisson
    objective      which loss a record has                      the run's
    contribution   which vector stands for a record             its gradient
    weights        how much it counts, and the bound of that    min(1, C/n)
    side_release   a noised statistic of the same batch         none
    schedule       noise and clip norm over the steps           constant
    update         what the optimiser is given                  the noisy mean
    acceptance     whether the step is taken                    always
    released       which weights leave the run                  the trained ones

Each part states its own bound and its own event. So the sensitivity and the ε of any combination follow from the parts.
A part whose promise does not hold beside another part says so (`objection`).

The signatures say what a part may look at: a weight rule sees a record's own norm and `Public` values, nothing else.
Public values are settings, or outputs of releases, which were noised before a part sees them. A part is frozen. What
changes during a run is in the object that its `start` returns.

The plain parts are here, and the others in the file of the algorithm that introduced them. Begin with `base`.
"""

from __future__ import annotations

from collections.abc import Mapping

from equidp.mechanism.parts.acceptance import Acceptance, Accepting, AlwaysAccept
from equidp.mechanism.parts.base import TINY, Combination, NoiseLevel, Part, Run, Running
from equidp.mechanism.parts.contribution import Contributing, Contribution
from equidp.mechanism.parts.facts import StepFacts
from equidp.mechanism.parts.objective import Objective, Pursuing
from equidp.mechanism.parts.public import Public, per_record, scheduled, tensors
from equidp.mechanism.parts.released import ExponentialAverage, Released, Releasing
from equidp.mechanism.parts.sampler import Draw, PoissonSampler, Sampler, Sampling, draws_plainly
from equidp.mechanism.parts.schedule import Constant, Schedule
from equidp.mechanism.parts.seen import Tossed, seen_by
from equidp.mechanism.parts.side_release import Added, SideRelease, counts, noise_level
from equidp.mechanism.parts.update import Update, Updating
from equidp.mechanism.parts.weights import FlatClip, UnitWeight, WeightRule, known_sensitivity, sensitivity
from equidp.options import HUGE, Positive

KINDS: Mapping[str, type[Part]] = {
    "sampler": Sampler,
    "objective": Objective,
    "contribution": Contribution,
    "weights": WeightRule,
    "schedule": Schedule,
    "side_release": SideRelease,
    "update": Update,
    "acceptance": Acceptance,
    "released_weights": Released,
}
"""The kind of each part of an algorithm, by its name in the algorithm."""
