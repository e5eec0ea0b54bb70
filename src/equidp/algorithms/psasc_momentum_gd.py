"""DP-PSASC with per-record momentum, full batch ("Non-monotonous Adaptive Scaling Gradient Weight", Algorithm 2).

    m_{0,i} = ∇f(θ_0; x_i),   m_{t,i} = γ·∇f(θ_t; x_i) + (1 − γ)·m_{t−1,i}
    ĝ = (1/N)·(Σ_i w_i·m_{t,i} + σ·Δ·ξ),   w_i from ‖m_{t,i}‖ as in PSASC,   Δ = C/s

Every record takes part in every step: q = 1, B = N, one plain Gaussian event per step, E steps in E epochs. m_{t,i} is
a function of x_i and of released iterates. The algorithm keeps m, which has N × d numbers. So it is for small data
only, and refuses data above a limit.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from equidp.accounting.plan import Plan
from equidp.algorithms.psasc import PSASC
from equidp.errors import EquidpError
from equidp.gradients.engine import GradientEngine
from equidp.gradients.precision import refuse_autocast, refuse_short_products
from equidp.gradients.rounding import norms_of
from equidp.gradients.shares import threads
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.parts import Combination, Contributing, Contribution, Draw, Positive, Run, Sampler, Sampling
from equidp.mechanism.sampling import Batch

Fraction = Annotated[float, Field(gt=0, le=1)]
GIB = 2**30


class FullBatch(Sampler):
    """All records in every step."""

    def adapt(self, plan: Plan) -> Plan:
        """B = N."""
        return replace(plan, batch_size=plan.records)

    def sampling_rate(self, plan: Plan) -> float:
        """1: nothing is amplified."""
        return 1.0

    def start(self, run: Run) -> Sampling:
        """No coins."""
        return Everybody(self, run)

    def description(self, unit: str) -> str:
        """None."""
        return f"none: every {unit} takes part in every step"


class Everybody(Sampling):
    """The full batch during one run."""

    def draw(self) -> Draw:
        """All positions."""
        return Draw(torch.arange(self.run.population.size, device=self.run.population.device))

    def rates(self) -> Tensor:
        """1 for every record."""
        return torch.ones(self.run.population.size)


class RecordMomentum(Contribution):
    """A record contributes the running mean of its own gradients."""

    momentum: Fraction = 0.5
    """γ."""
    memory_limit: Positive = 2.0
    """The most memory that m may take, in GiB."""

    def start(self, run: Run) -> Contributing:
        """Begin to keep m.

        Raises:
            EquidpError: m would take more memory than allowed.
        """
        records = run.plan.records  # the declared number: the true one may be protected, so nothing may depend on it
        needed = records * run.engine.dimension * 4 / GIB
        if needed > self.memory_limit:
            raise EquidpError(
                f"Per-record momentum keeps {records} × {run.engine.dimension} numbers, {needed:.1f} GiB, "
                f"where {self.memory_limit:g} GiB are allowed. Use psasc_momentum, a smaller model or fewer records."
            )
        return RunningMeans(self, run)

    def objection(self, combination: Combination) -> str | None:
        """Refuse other samplers, because a mean over steps needs the record in every step."""
        return None if isinstance(combination.sampler, FullBatch) else "it needs the sampler full_batch"


class RunningMeans(Contributing):
    """Per-record momentum during one run. A step's means are kept only if the step is taken."""

    remembered = ("means",)

    def __init__(self, part: RecordMomentum, run: Run) -> None:
        super().__init__(run)
        self.part, self.remembers = part, True
        self.means: Tensor | None = None
        self.next = torch.zeros(run.population.size, run.engine.dimension, device=run.population.device)
        self._current = self.next[:0]

    def norms(self, batch: Batch) -> Tensor:
        """‖m_{t,i}‖, `[u]`."""
        engine = self.run.engine
        engine.try_out(batch.features[: len(batch.labels)], batch.labels)  # the first view of each record
        fresh = record_gradients(engine, batch)
        if self.means is not None:
            fresh = self.part.momentum * fresh + (1 - self.part.momentum) * self.means[batch.units]
        self.next[batch.units] = self._current = fresh
        return norms_of(fresh).sqrt()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Σ w_i·m_{t,i}, `[d]`; a mean with weight 0 is left out even if it is not finite."""
        refuse_autocast(self.run.engine.autocast_kind)
        refuse_short_products(weights.device)
        return weights @ torch.where(weights[:, None] != 0, self._current, 0.0)

    def advance(self, previous: Tensor) -> None:
        """m_{t−1} becomes m_t."""
        self.means = self.next.clone()


def record_gradients(engine: GradientEngine, batch: Batch) -> Tensor:
    """Return the gradients of the batch's units, `[u, d]`. Nowhere else are all of them in memory at once.

    Raises:
        EquidpError: `torch.func` cannot take the model or the loss record by record.
    """
    if not len(batch.labels):
        return torch.zeros(len(batch), engine.dimension, device=engine.device)
    trained = {id(p): i for i, p in enumerate(engine.parameters)}
    names = {trained[id(p)]: name for name, p in engine.model.named_parameters() if id(p) in trained}
    values = tuple(p.detach() for p in engine.parameters)

    def loss(parameters: tuple[Tensor, ...], features: Tensor, label: Tensor) -> Tensor:
        named = {names[i]: value for i, value in enumerate(parameters)}
        outputs = torch.func.functional_call(engine.model, named, (features,))
        return engine.loss(outputs, label.expand(len(features), *label.shape)).mean()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different")  # a dropout mask each
    views = batch.features.unflatten(0, (batch.views, -1)).transpose(0, 1)
    try:
        # one thread if rounding must not depend on a record's place (`shares.py`), because `vmap` hides sizes
        with contextlib.nullcontext() if engine.rows is None else threads(1):
            found = each(values, engine.padded(views), engine.padded(batch.labels))
    except RuntimeError as error:
        if not str(error).startswith("vmap:"):
            raise
        raise EquidpError(
            "A record's momentum needs every gradient by itself, and torch.func cannot take this model and loss record "
            f"by record ({str(error).partition('. ')[0]}): let neither read a number out of its tensors "
            "(F.one_hot without num_classes does)."
        ) from error
    gradients = torch.cat([g.reshape(len(g), -1) for g in found], dim=1)[: len(batch.labels)]
    if batch.owners is None:
        return gradients
    total = torch.zeros(len(batch), engine.dimension, device=engine.device).index_add_(0, batch.owners, gradients)
    return total / torch.bincount(batch.owners, minlength=len(batch))[:, None]


class PSASCMomentumGD(PSASC):
    """Settings of full-batch DP-PSASC with per-record momentum. `training.batch_size` has no effect."""

    momentum: Fraction = 0.5
    """γ: the weight of the newest gradient in a record's running mean."""

    def build(self) -> Algorithm:
        """Adaptive scaling of running means, no sampling."""
        return Algorithm(
            name="psasc_momentum_gd",
            weights=self.rule(),
            initial={"clip_norm": self.clip_norm},
            sampler=FullBatch(),
            contribution=RecordMomentum(momentum=self.momentum),
        )
