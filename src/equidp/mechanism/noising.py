"""What a step charges, and the noise on everything that leaves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from equidp.accounting.events import Event
from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Segment
from equidp.errors import EquidpError
from equidp.gradients.precision import refuse_around, refuse_short_products
from equidp.gradients.shape import warn_of_rounding_by_place
from equidp.mechanism.looking import copied
from equidp.mechanism.noise import RandomSource
from equidp.mechanism.optimizers import moved_by, refuse_idle
from equidp.mechanism.parts import StepFacts, known_sensitivity, scheduled, sensitivity
from equidp.mechanism.states import seed_unforeseen
from equidp.mechanism.trying import Trying

if TYPE_CHECKING:
    from equidp.mechanism.recorded import Padded

P = ParamSpec("P")
T = TypeVar("T")


def unforeseen(steps: Callable[P, T]) -> Callable[P, T]:
    """Decorate a loop's method that takes steps: in a run without a seed, nobody can know what its model draws.

    Torch's generators, from which dropout draws, get a state of the operating system before the steps and after them.
    Before: another trainer of the process, or the caller's `torch.manual_seed`, may have seeded them. After: what is
    drawn next, for example a model's initial weights, may be shown, and would tell the state that the steps had.

    A private run also refuses torch's settings that shorten products (`precision.refuse_short_products`).
    """

    @wraps(steps)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        loop = cast(Noising, args[0])
        if loop.algorithm.private:  # another library may have changed the setting since the last steps
            refuse_short_products(loop.population.device)
            if not loop.random.repeatable and loop.population.device.type == "cpu":
                warn_of_rounding_by_place()
        loop.seed_unforeseen()
        try:
            return steps(*args, **kwargs)
        except BaseException:
            loop.engine.passes.clear()  # Ctrl-C may have left in the model what a pass puts there
            raise
        finally:
            loop.seed_unforeseen()

    return alone


class Noising(Trying):
    """The part of the training loop that charges events, and adds noise to sums and statistics of its records."""

    ledger: Ledger
    random: RandomSource
    public: dict[str, Tensor]
    given: dict[str, Tensor]
    shown: dict[str, Tensor | float]
    _event: Callable[..., Event]
    _release_steps: range
    _side_noise: tuple[float, float] | None
    steps_begun: int = 0
    """How many steps may have had their noise seen: the steps taken, and one more if it was interrupted."""

    def __repr__(self) -> str:
        plan = self.plan
        sigma = f", σ={plan.noise_multiplier:.4g}, δ={plan.delta:g}" if self.algorithm.private else ""
        return (
            f"<{type(self).__name__} of {self.algorithm.name}: {self.steps_done} of {plan.steps} steps, "
            f"{plan.batch_size} of {plan.records} in a batch{sigma}>"
        )

    def seed_unforeseen(self) -> None:
        """If the run has no seed, seed torch's generators, which the process shares, from the operating system."""
        if not self.random.repeatable:
            seed_unforeseen(self.population.device)

    def charge(self, segment: Segment) -> float:
        """Charge the next step's event, and return its noise multiplier.

        The step must use this value: a sampler that is asked again may give another one.

        Raises:
            EquidpError: inside torch.autocast or inference_mode, where no step can be taken, or if the optimiser was
                given other parameters than the model's, or takes no step now. Nothing is charged then.
        """
        refuse_around(self.engine.autocast_kind)
        refuse_idle(self.optimizer)
        if not moved_by(self.optimizer) <= set(map(id, self.engine.parameters)):
            raise EquidpError(
                "The optimiser was given parameters that are not trained here: it would move them by gradients without "
                "noise. Leave out add_param_group, and put layers into the model before the trainer is made."
            )
        self.steps_begun = max(self.steps_begun, self.steps_done + 1)
        noise_multiplier = self.sampling.noise(segment)
        if self.algorithm.private:
            released = self.steps_done in self._release_steps
            self.ledger.append(self._event(self.sampling.rate, noise_multiplier, released=released))
        return noise_multiplier

    def _facts(self, noise_multiplier: float, delta: Tensor) -> StepFacts:
        return StepFacts(self.plan, self.steps_done, noise_multiplier, delta, self.engine.dimension, self.sampling.rate)

    def public_values(self, segment: Segment) -> dict[str, Tensor]:
        """The public values that a weight rule may read before this step's side release."""
        return scheduled(self.public | self.sampling.public(), segment)

    def reduce(self, total: Tensor) -> Tensor:
        """The sum over all processes that train together; here there is one. Exact: add noise before it is seen."""
        return total

    def noised_at_once(self, batch: Padded, segment: Segment) -> Tensor:
        """Return the noised sum of a padded batch of one chunk, for a recorded step: nothing here waits for the device.

        The step's event must be charged already.
        """
        assert self.algorithm.weights is not None
        noise_multiplier, public = self.sampling.noise(segment), self.public_values(segment)
        if self.algorithm.side_release is not None:
            facts = batch.facts(
                self.plan, noise_multiplier, known_sensitivity(self.algorithm.weights, public), self.engine.dimension,
                self.sampling.rate,
            )  # fmt: skip
            finite, seen = (False, batch.norms) if batch.wrong is None else (True, batch.wrong)
            public |= self._side_release(seen, batch.groups, public, facts, finite=finite, absent=batch.absent)
        grouped = any(value.dim() for value in public.values())
        weights = self.weights(batch.norms, batch.groups if grouped else None, public, finite=False)
        return self._noised(batch.weighted_sum(weights), public, noise_multiplier)[0]

    def _noised(self, total: Tensor, public: Mapping[str, Tensor], noise_multiplier: float) -> tuple[Tensor, Tensor]:
        """Return the sum with its noise, and Δ; `shown` gets the step's public values."""
        rule, release = self.algorithm.weights, self.algorithm.side_release
        assert rule is not None
        self._asked = None  # forget what is known of this step's norms: the next step's may lie in the same tensor
        delta = sensitivity(rule, public, scaled=self._scales)
        self.shown = {"sensitivity": delta, "noise_multiplier": noise_multiplier}
        kept = release.keeps if release is not None else frozenset()
        self.shown |= {k: v for k, v in public.items() if k not in kept and (k != "scale" or v.dim())}
        return self.random.perturb(total, sensitivity=delta, noise_multiplier=noise_multiplier), delta

    @torch.inference_mode()
    def _side_release(
        self,
        norms: Tensor,
        groups: Tensor,
        public: Mapping[str, Tensor],
        facts: StepFacts,
        *,
        finite: bool,
        absent: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Release the batch's statistic; nothing but its noised value leaves this function.

        Args:
            finite: whether all `norms` are known to be finite.
            absent: `()`, how many rows stand for no record. They are counted as norm 0 in group 0, and taken off again.
        """
        release, noise = self.algorithm.side_release, self._side_noise
        assert release is not None
        assert noise is not None
        seen, carried = norms if finite else self._finite(norms)[1], self.public
        if self._ruled:  # copies: records would be weighed by norms that a release of others changes in place
            seen, groups, carried, public = seen.clone(), groups.clone(), copied(carried), copied(public)
        exact = release.statistic(seen, groups, public, self.plan)
        if absent is not None:
            exact = exact - absent * release.statistic(self._zero.view(1), groups.new_zeros(1), public, self.plan)
        exact = self.reduce(exact)
        noised = self.random.perturb(exact, sensitivity=noise[0], noise_multiplier=noise[1])
        later, now = release.consequences(noised, carried, public, facts)
        self.public |= later
        if len(self._release_steps) < self.plan.steps:
            self.given = now
        return now
