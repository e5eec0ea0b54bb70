"""Canaries: records included or left out by fair coins, to measure how well a run's releases reveal the coins.

*Gradient canaries* are the strongest possible records: each has a direction of its own, orthogonal to every other
gradient, and the norm that the algorithm weights most. They need no change of the engine: the model gets one more
parameter per canary, and only that canary's loss depends on it, linearly. So the canary's gradient is that coordinate.
Sampling, weights, side releases, noise and ledger are the same as for any record. Everything released passes through
`RandomSource.perturb`, where the canaries' coordinates are read.

*Input canaries* are records that could exist: training records with a wrong label. Their score is the loss of the
finished model. So everything that an attacker does not see (gradients, intermediate models) counts as protection.

How to guess is fixed in advance: the r/2 largest scores are guessed "in", the r/2 smallest "out", and no other score is
guessed.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from equidp.audit.one_run import CONFIDENCE, epsilon_lower_bound
from equidp.audit.setup import TrainingSetup, losses
from equidp.data.records import Records, Schema
from equidp.gradients.losses import Loss
from equidp.mechanism.noise import RandomSource, SeededRandom, derived_seed
from equidp.mechanism.parts import WeightRule, tensors
from equidp.mechanism.trainer import Trainer

NORMS = torch.logspace(-4, 6, 1001)
"""Gradient norms a canary may choose from."""

ID_BYTES = 3
"""Bytes that a canary's number takes among the features of an image."""


@dataclass(frozen=True)
class Verdict:
    """The result of guessing about m canaries. With this confidence, ε at δ is not below the bound.

    Attributes:
        canaries: m.
        guesses: r, the number of guesses.
        correct: v, the number of right guesses.
        delta: δ.
        epsilon_lower_bound: the bound.
        confidence: of the bound.
    """

    canaries: int
    guesses: int
    correct: int
    delta: float
    epsilon_lower_bound: float
    confidence: float


def verdict(scores: Tensor, included: Tensor, *, guesses: int, delta: float, confidence: float = CONFIDENCE) -> Verdict:
    """Guess by rank, count, and bound ε.

    Args:
        scores: `[m]`, larger for canaries that seem to be included.
        included: `[m]` bool, the coins.
        guesses: r, even; fixed before the scores were seen.
    """
    half = guesses // 2
    order = scores.argsort(stable=True)
    correct = int(included[order[-half:]].sum() + (~included[order[:half]]).sum())
    bound = epsilon_lower_bound(len(scores), 2 * half, correct, delta, confidence=confidence)
    return Verdict(len(scores), 2 * half, correct, delta, bound, confidence)


def coins(canaries: int, seed: int, stream: str) -> Tensor:
    """Return `[m]` bool, which canaries are included. It is independent of everything that the training draws."""
    generator = torch.Generator().manual_seed(derived_seed(seed, f"audit/{stream}"))
    return torch.rand(canaries, generator=generator) < 0.5


# --------------------------------------------------------------------------------------------------------- gradients


def gradient_scores(
    setup: TrainingSetup, records: Records, included: Tensor, random: RandomSource, *, progress: bool = False
) -> Tensor:
    """Train once on these records and the included gradient canaries, and return the scores of all canaries, `[m]`.

    The run's random source is wrapped, to read what is released.
    """
    model = CanaryModel(setup.build_model(records.schema), records.schema, records.features.dtype, len(included))
    listener = Listener(random, model, setup.algorithm.sampler.sampling_rate(setup.algorithm.adapt(setup.plan)))

    def aim(trainer: Trainer) -> None:
        if (rule := trainer.algorithm.weights) is not None:  # values that the step itself will release are taken as 1
            model.strength = strongest_norm(rule, tensors(dict.fromkeys(rule.reads, 1.0), "cpu") | trainer.public)

    views = setup.augmentation
    if views is not None:  # augment the record, but not its number, which comes first
        views = dataclasses.replace(views, head=ID_BYTES if records.features.dtype == torch.uint8 else 1)
    public = setup.public if setup.public is None else with_canaries(setup.public, torch.zeros(0, dtype=torch.bool))
    setup.train(
        with_canaries(records, included),
        cast(RandomSource, listener),
        model=model,
        loss=canary_loss(setup.loss),
        public=public,
        augmentation=views,
        before=aim,
        progress=progress,
    )
    return listener.scores.cpu()


class CanaryModel(nn.Module):
    """A model with one more parameter per canary. It takes features as `with_canaries` writes them.

    The last two outputs are whether the record is a real one, and the canary's loss.
    """

    def __init__(self, inner: nn.Module, schema: Schema, dtype: torch.dtype, canaries: int) -> None:
        super().__init__()
        # first, so that its coordinates come first in the flat gradient; row 0 is for real records and is not used
        self.table = nn.Embedding(canaries + 1, 1)
        nn.init.zeros_(self.table.weight)
        self.inner = inner
        self.canaries, self._shape, self._dtype = canaries, schema.shape, dtype
        self.strength = 1.0

    def forward(self, features: Tensor) -> Tensor:
        """`[b, classes + 2]`."""
        head = ID_BYTES if features.dtype == torch.uint8 else 1
        number = _number(features[:, :head])
        logits = self.inner(features[:, head:].reshape(-1, *self._shape).to(self._dtype))
        real = (number == 0).to(logits.dtype).unsqueeze(1)
        canary = self.table(number) * (1.0 - real) * self.strength
        return torch.cat([logits, real, canary], dim=1)


def canary_loss(loss: Loss) -> Loss:
    """Return the setup's loss for a real record; for a canary, the last output, which is linear in its coordinate."""

    def per_record(outputs: Tensor, labels: Tensor) -> Tensor:
        return loss(outputs[:, :-2], labels) * outputs[:, -2].detach() + outputs[:, -1]

    return per_record


def with_canaries(records: Records, included: Tensor) -> Records:
    """Return the records, followed by the included canaries; each record starts with its number (0: real)."""
    numbers = included.nonzero().squeeze(1).to(records.labels.device) + 1
    none = torch.zeros_like(records.labels)
    blank = records.features.new_zeros((len(numbers), *records.schema.shape))
    features = torch.cat([records.features, blank]).flatten(1)
    head = _columns(torch.cat([none, numbers]), features.dtype)
    # spread over the groups: if many were in one group, algorithms that weight groups by size would weaken them
    spread = {name: numbers % len(names) for name, names in records.schema.groupings.items()}
    schema = dataclasses.replace(
        records.schema, kind="tabular", shape=(head.shape[1] + features.shape[1],), feature_names=()
    )
    return Records(
        features=torch.cat([head, features], dim=1),
        labels=torch.cat([records.labels, none.new_zeros(len(numbers))]),
        groups={name: torch.cat([ids, spread[name]]) for name, ids in records.groups.items()},
        schema=schema,
        unit=None if records.unit is None else _own_units(records.unit, len(numbers)),
    )


class Listener:
    """Passes everything through to a random source, and sums the evidence of the releases about each canary.

    The score is the log-likelihood ratio of "in" to "out". In the canary's coordinate and in units of Δ, a step of rate
    q releases noise, or, if the canary is in, with probability q 1 plus noise. So the score is
    Σ_t log(1 − q + q·exp((x_t − ½)/σ_t²)).
    """

    def __init__(self, random: RandomSource, model: CanaryModel, rate: float) -> None:
        self.random, self.rate = random, rate
        self._where = slice(1, model.canaries + 1)
        self._dimension = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.scores = torch.zeros(model.canaries, dtype=torch.float64)

    def perturb(self, values: Tensor, *, sensitivity: float | Tensor, noise_multiplier: float) -> Tensor:
        """Return what the wrapped source does; if it is a sum of gradients, read it."""
        released = self.random.perturb(values, sensitivity=sensitivity, noise_multiplier=noise_multiplier)
        if len(released) == self._dimension:
            self._hear((released[self._where].double() / sensitivity).cpu(), float(noise_multiplier))
        return released

    def _hear(self, seen: Tensor, noise_multiplier: float) -> None:
        drift = (seen - 0.5) / noise_multiplier**2
        if self.rate < 1:
            inside = drift + math.log(self.rate)
            drift = torch.logaddexp(torch.full_like(drift, math.log1p(-self.rate)), inside)
        self.scores += drift

    def __getattr__(self, name: str) -> Any:
        """Everything else is the wrapped source's own."""
        return getattr(self.random, name)


def strongest_norm(rule: WeightRule, public: dict[str, Tensor]) -> float:
    """Return the norm n at which w(n)·n is largest; the largest of several, because bounds may grow within the step."""
    seen = {name: value.max().cpu() for name, value in public.items()}
    norms = torch.cat([NORMS, torch.stack(list(seen.values())) * (1 - 1e-6)])
    norms = norms[norms > 0].sort().values
    reached = rule.weights(norms, seen) * norms
    return float(norms[reached >= reached.max() * (1 - 1e-4)].max())


def _columns(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype != torch.uint8:
        return numbers.to(dtype).unsqueeze(1)
    return torch.stack([(numbers >> (8 * i)) & 255 for i in range(ID_BYTES)], dim=1).to(dtype)


def _number(head: Tensor) -> Tensor:
    places = 256 ** torch.arange(head.shape[1], device=head.device)
    return (head.long() * places).sum(1)


def _own_units(unit: Tensor, canaries: int) -> Tensor:
    """Return the records' units, and a new unit for each canary."""
    return torch.cat([unit, unit.max() + 1 + torch.arange(canaries, device=unit.device)])


# ------------------------------------------------------------------------------------------------------------ inputs


def input_scores(
    setup: TrainingSetup, records: Records, canaries: Tensor, included: Tensor, random: RandomSource, *, seed: int
) -> Tensor:
    """Train once, and return the scores of mislabelled canaries, `[m]`: minus the finished model's loss on them.

    Args:
        setup: how to train.
        records: the training part.
        canaries: `[m]` positions of the records that become canaries.
        included: `[m]` bool, which of them are included.
        random: streams of the training.
        seed: of the wrong labels.
    """
    wrong = mislabelled(records.take(canaries), seed)
    rest = torch.ones(len(records), dtype=torch.bool)
    rest[canaries] = False
    model = setup.train(joined(records.take(rest), wrong.take(included)), random)
    return -losses(model, wrong, setup.loss)


def mislabelled(records: Records, seed: int) -> Records:
    """Return the records, each with a label that is drawn uniformly from the wrong ones."""
    generator = torch.Generator().manual_seed(derived_seed(seed, "audit/labels"))
    shift = torch.randint(1, len(records.schema.classes), (len(records),), generator=generator)
    labels = (records.labels + shift.to(records.labels)) % len(records.schema.classes)
    groups = {name: labels if name == "class" else ids for name, ids in records.groups.items()}
    return dataclasses.replace(records, labels=labels, groups=groups)


def joined(one: Records, other: Records) -> Records:
    """Return both, one after the other; if there are units, each record of `other` gets a unit of its own."""
    return dataclasses.replace(
        one,
        features=torch.cat([one.features, other.features]),
        labels=torch.cat([one.labels, other.labels]),
        groups={name: torch.cat([ids, other.groups[name]]) for name, ids in one.groups.items()},
        part=None,
        unit=None if one.unit is None else _own_units(one.unit, len(other)),
        identity=None,
        unit_identity=None,
    )


def seeded(setup: TrainingSetup, seed: int, stream: str) -> SeededRandom:
    """Return the streams of an audit's training run, which differ from those of any other run with this seed."""
    return SeededRandom(derived_seed(seed, f"audit/{stream}"), setup.device)
