"""A loss steered by counted errors: this project's own, for the worst group.

`dpsgd_level` shifts a class's outputs by the share of its gradients that are long. This says little about how many of
its records are classified wrongly. Here the wrong and the right records of each cell are counted. A cell is a class, or
a class within a group if the partition is a product such as `sex*class`. The counted errors are those of the model that
the run would release, which may be an average of iterates. Let x̃^c and r̃^c be the noised numbers of wrong and right
records of cell c in a step, K the number of classes, T the number of steps, a(c) the group and k(c) the class of cell
c. Then

    b̂^c = max(mean over the steps of x̃^c + r̃^c, σ_1·√(2/t), B/N),   π̂^c = b̂^c/Σb̂
    ē^c = mean of x̃^c over all steps / b̂^c,   e^c = the same over about the last T/15 steps,   both within [0, 1]
    r^c = ((b̂^c)² − u²)/((b̂^c)² + v),   u the floor of b̂, v the variance of the noise in the recent x̃^c
    d^c = r^c·max(0, e^c − m),   m the mean of e over the K cells of a(c) with weights r
    p^c = −min(λ/T, b̂^c/(2·σ_1·√T))·(d^c less the mean of d over these K),   s^c ← s^c + p^c, within ±6
    shift^c = τ·log π̂^c − κ·ē^c + (s^c + ν·p^c·T/15, within ±6)
    ℓ(z, y, a) = −log softmax(z + shift^{(a, ·)})_y,   w_i = min(1, C/n_i),   Δ = C

Why it helps: a model that can fit a shift of its outputs fits z + shift to the data. So z, by which records are
classified, is higher where the shift is lower. s is an integral: it moves as long as a class has more errors than its
group's mean, however long the steps are. If the counts are mostly noise, it moves little: over a run the noise of x̃^c
gives it a standard deviation of about 1/2 at most (Σ_t of independent noises σ_1/b̂^c, each times the factor of d). The
e of a cell without records is anywhere within [0, 1], but its r is near 0, so it has little influence. ē and π̂ act at
once. e lags by a window, so s may overshoot in both directions; ν leads it by as many windows. To classify a record no
group is needed: the group's row is used in training only.

A record moves one of the 2·cells counts by one. A unit with several records moves two counts of one cell by the shares
of its records that are wrong and right, (x, 1 − x), of length √(x² + (1 − x)²) ≤ 1. Whether a record is wrong depends
on the record and on released weights. A step's loss depends on earlier counts, which are noised. So a step has the
event of DPSGD-F, (q, (σ_1⁻² + σ_2⁻²)^(−1/2)). Errors are counted in the step's own forward pass. If an average of
iterates would be released, they are counted in another pass before it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from equidp.accounting.plan import Plan
from equidp.algorithms.dpsgd_f_adjusted import COUNTED, Adjustment, counted_until, sizes_of
from equidp.algorithms.dpsgd_f_smooth import averaged
from equidp.algorithms.settings import AlgorithmSettings
from equidp.errors import EquidpError
from equidp.gradients.losses import KnowsGradient, Loss, widened
from equidp.mechanism.algorithm import Algorithm, published_by
from equidp.mechanism.parts import (
    TINY,
    Acceptance,
    Combination,
    FlatClip,
    NoiseLevel,
    Objective,
    Positive,
    Public,
    Pursuing,
    SideRelease,
    StepFacts,
    counts,
    noise_level,
)
from equidp.mechanism.sampling import Batch

SHIFT = "shift"
ERRED, RECENT, STEERED = "counted_errors", "recent_errors", "steered"

WINDOW = 15
"""Recent errors are those of about the last fifteenth of the run."""

DRIFT = 0.5
"""Largest standard deviation that noise of the counts may give a shift over the run."""

FARTHEST = 6.0
"""Largest shift by steering: a factor of 400 between two classes' odds."""


class ErrorCounts(SideRelease):
    """x̃^c and r̃^c, turned into the shift of each cell."""

    of_errors: ClassVar[bool] = True
    additive: ClassVar[bool] = True
    keeps: ClassVar[frozenset[str]] = frozenset({COUNTED, ERRED, RECENT, STEERED})
    steers: ClassVar[frozenset[str]] = frozenset({SHIFT})
    defaults: ClassVar[dict[str, float]] = {SHIFT: 0.0}

    count_noise_multiplier: NoiseLevel = "5x"
    adjustment: Adjustment = 1.0
    margin: Annotated[float, Field(ge=0, le=10)] = 2.0
    pull: Annotated[float, Field(ge=0, le=1000)] = 40.0
    lead: Annotated[float, Field(gt=0, le=10)] | None = None

    @property
    def released(self) -> str:
        """x̃^c and r̃^c."""
        return (
            "The noised numbers of each group's records that the model classifies wrongly and rightly, in every batch."
        )

    def noise(self, plan: Plan) -> float:
        """σ_1."""
        return noise_level(self.count_noise_multiplier, plan)

    def statistic(self, norms: Tensor, groups: Tensor, public: Public, plan: Plan) -> Tensor:
        """(x^1..x^M, r^1..r^M), `[2M]` for M cells; `norms` are shares of wrong records, `[u]`, clamped to [0, 1]."""
        wrong = counts(groups, plan.groups, norms.clamp(0.0, 1.0))
        return torch.cat([wrong, counts(groups, plan.groups) - wrong])

    def later(self, noised: Tensor, public: Public, facts: StepFacts) -> dict[str, Tensor]:
        """The sums that the next step continues, and the shift, `[M]`."""
        plan, noise = facts.plan, self.noise(facts.plan)
        wrong, _ = noised.chunk(2)
        counted = counted_until(noised, public)
        erred = wrong + public.get(ERRED, 0.0)
        kept = max(0.0, 1.0 - WINDOW / plan.steps)
        recent = averaged(wrong, public.get(RECENT), kept)
        sizes, least = sizes_of(counted, noise, plan)
        errors = (recent[:-1] / recent[-1] / sizes).clamp(0.0, 1.0).view(-1, plan.classes_each)
        # a cell that the noise hides seems wrong half of the time, as an empty one does, and would move its whole group
        variance = noise**2 * (1 - kept) / (1 + kept)
        known = ((sizes**2 - least**2) / (sizes**2 + variance)).view_as(errors)
        mean = (known * errors).sum(1, keepdim=True) / known.sum(1, keepdim=True).clamp(min=TINY)
        excess = known * (errors - mean).clamp(min=0.0)
        excess = (excess - excess.mean(1, keepdim=True)).flatten()
        gain = (DRIFT * sizes / (noise * plan.steps**0.5)).clamp(max=self.pull / plan.steps)
        pulled = gain * excess
        steered = (public.get(STEERED, 0.0) - pulled).clamp(-FARTHEST, FARTHEST)
        led = (steered - self.lead * plan.steps / WINDOW * pulled).clamp(-FARTHEST, FARTHEST) if self.lead else steered
        always = (erred / counted[-1] / sizes).clamp(0.0, 1.0)
        shift = self.adjustment * (sizes / sizes.sum()).log() - self.margin * always
        return {COUNTED: counted, ERRED: erred, RECENT: recent, STEERED: steered, SHIFT: shift + led}


class Steered(Objective):
    """Cross-entropy of outputs to which the shifts of a record's group are added."""

    reads: ClassVar[frozenset[str]] = frozenset({SHIFT})
    by_class: ClassVar[bool] = True
    crossed: ClassVar[bool] = True

    def objection(self, combination: Combination) -> str | None:
        """Refuse an acceptance that asks for losses of records whose group is unknown: they would get the first row."""
        acceptance = combination.acceptance
        if isinstance(acceptance, Acceptance) and (acceptance.public_records or acceptance.on_test):
            return f"{type(acceptance).__name__} asks for the loss of records whose group is not known"
        return super().objection(combination)

    def start(self, loss: Loss, plan: Plan, device: torch.device) -> Pursuing:
        """Begin without shifts.

        Raises:
            EquidpError: the groups are not all classes of every group.
        """
        if plan.groups % plan.classes_each:
            raise EquidpError(
                f"The partition has {plan.groups} groups, which are not all {plan.classes} classes of every group: "
                "take the classes, or a product that ends in them, such as sex*class."
            )
        return Steering(ShiftedByGroup(loss, torch.zeros(plan.groups, device=device).view(-1, plan.classes_each)))


class ShiftedByGroup:
    """A loss of outputs `[b, K]` to which the row of the record's group is added; labels are `a·K + y`.

    Args:
        loss: the loss of these sums.
        rows: `[A, K]`, public; they may be changed in place between steps. Outputs beyond column K (an audit has some)
            are not shifted.
    """

    def __init__(self, loss: Loss, rows: Tensor) -> None:
        self.loss, self.rows = loss, rows
        self._known = loss if isinstance(loss, KnowsGradient) else None  # asked once: asking a protocol takes 5 µs

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return losses `[b]`."""
        return self.loss(*self._shifted(outputs, labels))

    def gradient(self, outputs: Tensor, labels: Tensor) -> Tensor | None:
        """Return the loss's own gradient at the sums. To add a constant does not change it."""
        return None if self._known is None else self._known.gradient(*self._shifted(outputs, labels))

    def wrong(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return `[b]` bool: whether a record's largest output, without any shift, is another class's."""
        classes = self.rows.shape[1]
        return outputs[:, :classes].argmax(1) != labels % classes

    def _shifted(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        classes = self.rows.shape[1]
        rows = self.rows.index_select(0, labels // classes)
        return outputs + widened(rows, outputs), labels % classes


class Steering(Pursuing):
    """A steered loss during one run."""

    in_place: ClassVar[bool] = True

    def __init__(self, loss: ShiftedByGroup) -> None:
        super().__init__(loss)
        self.steered, self.rows = loss, loss.rows

    def wrong(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return `[b]` bool: whether a record is classified wrongly by the outputs without any shift."""
        return self.steered.wrong(outputs, labels)

    def labels(self, batch: Batch) -> Tensor:
        """Return a·K + y, `[b]`: a is the group of the record's unit, y the record's own class."""
        groups = batch.groups if batch.owners is None else batch.groups.index_select(0, batch.owners)
        classes = self.rows.shape[1]
        return groups // classes * classes + batch.labels

    def follow(self, public: Public) -> None:
        """The shifts."""
        self.rows.copy_(public[SHIFT].expand(self.rows.numel()).view_as(self.rows))


class DPSGDMinimax(AlgorithmSettings):
    """Settings of a loss steered by counted errors. Its groups are the classes, or a product that ends in them."""

    clip_norm: Positive = 1.0
    """C, the bound."""
    count_noise_multiplier: NoiseLevel = "5x"
    """σ_1, noise on the counts of wrong and right records; a ratio such as "5x" is to the noise multiplier σ_2."""
    adjustment: Adjustment = 1.0
    """τ, how far the loss allows for how rare each class is: 0 not at all."""
    margin: Annotated[float, Field(ge=0, le=10)] = 2.0
    """κ, how much more the loss allows for a class that is always wrong than for a class that never is."""
    pull: Annotated[float, Field(ge=0, le=1000)] = 40.0
    """λ: over the run a class with one more error per record than its group's mean is pulled so far, before limits; 0:
    the loss is not steered."""
    lead: Annotated[float, Field(gt=0, le=10)] | None = None
    """ν: the steering looks ahead by so many windows of a fifteenth of the run. Take 1 if two classes look alike and
    their accuracies swing."""

    def build(self) -> Algorithm:
        """Flat clipping of the gradients of a steered loss."""
        release = ErrorCounts(**self.model_dump(exclude={"clip_norm"}))
        return Algorithm(
            name="dpsgd_minimax",
            weights=FlatClip(),
            initial={"clip_norm": self.clip_norm, **ErrorCounts.defaults},
            objective=Steered(),
            side_release=release,
            published=published_by("classic"),
        )
