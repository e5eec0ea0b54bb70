"""The loop: sample → norms → side release → weights → noisy mean → ledger → update. Written once for all algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from tqdm import tqdm

from equidp.engine.gradients import GradientEngine
from equidp.engine.ledger import Event, Ledger, live_epsilon
from equidp.engine.noise import RandomSource
from equidp.engine.parts import Algorithm, Plan, Segment, per_record, scheduled, segment_at, sensitivity, tensors
from equidp.engine.sampling import Batch, Population
from equidp.errors import EquidpError

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr),
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
}
"""Optimisers by name; each sees nothing but the noisy mean, so any of them is post-processing."""


def choose_device(name: str) -> torch.device:
    """`auto` takes CUDA, then MPS, then the CPU; anything else is taken at its word.

    Raises:
        EquidpError: for a device this machine does not have.
    """
    if name == "auto":
        mps = torch.backends.mps.is_available()
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EquidpError(f"training.device={name!r} is not available here: use auto or cpu.") from error
    return device


class EpochCallback(Protocol):
    """Called after every epoch, with what may be shown; may add columns to the history row."""

    def __call__(self, row: dict[str, float], model: nn.Module) -> Mapping[str, float]:
        """Return further columns for this epoch's row."""


@dataclass
class Diagnostics:
    """Exact figures of one epoch's batches. *Outside the guarantee*: off unless asked for, named `nonprivate/…`."""

    batches: int = 0
    units: Tensor | float = 0.0
    totals: dict[str, Tensor] = field(default_factory=dict)
    histogram: Tensor | None = None

    def observe(self, **values: Tensor) -> None:
        """Add a batch's sums."""
        for name, value in values.items():
            self.totals[name] = self.totals.get(name, torch.zeros_like(value)) + value


class Trainer:
    """Trains one model under one algorithm.

    Args:
        model: the model, already on the device of the data.
        loss: `(outputs [b, …], labels [b]) -> [b]` loss of each record on its own.
        algorithm: the combination of parts.
        plan: the run's public facts.
        population: the training data.
        random: the streams for sampling and noise.
        ledger: receives every event before the step becomes visible.
        learning_rate, optimizer: of the update, post-processing of the noisy mean.
        physical_batch_size: at most so many units in memory at once; None for the whole batch.
        precision: `bf16` runs the model under autocast; norms and sums stay in float32.
        diagnostics: collect exact training figures (outside the guarantee).
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        algorithm: Algorithm,
        plan: Plan,
        population: Population,
        random: RandomSource,
        ledger: Ledger,
        learning_rate: float,
        optimizer: str = "sgd",
        physical_batch_size: int | None = None,
        precision: Literal["float32", "bf16"] = "float32",
        diagnostics: bool = False,
    ) -> None:
        self.model, self.algorithm, self.plan = model, algorithm, plan
        self.population, self.random, self.ledger = population, random, ledger
        self.engine = GradientEngine(model, loss, precision=precision)
        self.optimizer = OPTIMIZERS[optimizer](self.engine.parameters, learning_rate)
        self.physical_batch_size = physical_batch_size
        self.public: dict[str, Tensor] = tensors(algorithm.initial, population.device)
        self.segments = algorithm.schedule.segments(plan)
        self.steps_done = 0
        self.shown: dict[str, Tensor] = {}  # public values of the last step: publishable, as they were noised
        self.diagnostics = Diagnostics() if diagnostics else None

    def train(
        self,
        on_epoch: EpochCallback | None = None,
        *,
        on_step: Callable[[], None] | None = None,
        progress: bool = True,
    ) -> list[dict[str, float]]:
        """Run the remaining epochs; returns one history row per epoch.

        Args:
            on_epoch: called after every epoch.
            on_step: called after every step, when the state is whole: a checkpoint may be taken, or training stopped.
            progress: show a progress bar.
        """
        history = []
        remaining = sum(1 for _ in self._epochs())
        with tqdm(total=remaining, unit="epoch", desc=self.algorithm.name, disable=not progress, leave=False) as bar:
            for epoch, segments in self._epochs():
                row = self._epoch(epoch, segments, on_step)
                if on_epoch is not None:
                    row |= on_epoch(row, self.model)
                history.append(row)
                bar.update()
                if self.algorithm.private:
                    bar.set_postfix_str(f"ε ≤ {row['epsilon_rdp']:.3f}")
        return history

    def step(self, segment: Segment) -> None:
        """One step of ALGORITHMS.md §1: everything released is noised, and charged before it is seen."""
        batches = [self.population.batch(part) for part in self._chunks(self.draw())]
        total = self._private_sum(batches, segment) if self.algorithm.private else self._plain_sum(batches)
        # divided by the *expected* batch size: the actual one is private
        self.engine.apply_gradient(total.div_(self.plan.batch_size))
        self.optimizer.step()
        self.steps_done += 1

    def run_steps(self, count: int) -> None:
        """The next `count` steps, without the bookkeeping of epochs."""
        for _ in range(count):
            self.step(segment_at(self.segments, self.steps_done))

    def draw(self) -> Tensor:
        """`[u]` positions of the units in the next batch."""
        return self.algorithm.sampler.draw(self.random, self.plan, self.population.size)

    def _private_sum(self, batches: list[Batch], segment: Segment) -> Tensor:
        """The noisy weighted sum of per-sample gradients, flat `[d]`; appends the step's event."""
        rule, release = self.algorithm.weights, self.algorithm.side_release
        assert rule is not None
        public = scheduled(self.public, segment)
        norms = None
        self.ledger.append(self.algorithm.step_event(self.plan, segment))
        if release is not None:
            norms = [self._norms(batch) for batch in batches]
            public |= self._side_release(torch.cat(norms), torch.cat([b.groups for b in batches]), public)
        total = self.weighted_sum(batches, public, norms)
        delta = sensitivity(rule, public)
        noise_multiplier = self.plan.noise_multiplier * segment.noise
        self.shown = {
            "sensitivity": delta,
            "noise_multiplier": torch.tensor(noise_multiplier),
            **{k: v for k, v in public.items() if k != "scale" or v.dim()},
        }
        return self.random.perturb(total, sensitivity=delta, noise_multiplier=noise_multiplier)

    def _side_release(self, norms: Tensor, groups: Tensor, public: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Release the batch's statistic; nothing but its noised value leaves this function."""
        release = self.algorithm.side_release
        assert release is not None
        exact = release.statistic(torch.where(norms.isfinite(), norms, 0.0), groups, public, self.plan)
        noised = self.random.perturb(
            exact, sensitivity=release.sensitivity, noise_multiplier=release.noise(self.plan) / release.sensitivity
        )
        self.public |= release.later(noised, self.public, self.plan)
        return release.now(noised, public, self.plan)

    def weighted_sum(
        self, batches: list[Batch], public: Mapping[str, Tensor], norms: list[Tensor] | None = None
    ) -> Tensor:
        """Σ w_i·g_i over the chunks, flat `[d]`, *exact*: it must be noised before anything else sees it.

        A second forward per chunk is needed only if weights awaited the whole batch.
        """
        total = torch.zeros(self.engine.dimension, device=self.population.device)
        kept = len(batches) == 1 and norms is not None
        for index, batch in enumerate(batches):
            fresh = norms[index] if kept and norms is not None else self._norms(batch)
            weights = self.weights(fresh, batch.groups, public)
            total += self.engine.weighted_sum(weights)
            if self.diagnostics is not None:
                self._observe(fresh, weights, batch, total)
        return total

    def weights(self, norms: Tensor, groups: Tensor, public: Mapping[str, Tensor]) -> Tensor:
        """`[u]` weights. A record whose gradient is not finite gets weight 0 (and so adds nothing to the sum)."""
        rule = self.algorithm.weights
        assert rule is not None
        finite = norms.isfinite()
        seen = per_record(public, groups)
        weights = rule.weights(torch.where(finite, norms, 0.0), seen) * seen["scale"]
        return torch.where(finite, weights, 0.0)

    def _norms(self, batch: Batch) -> Tensor:
        return self.engine.norms(batch.features, batch.labels, owners=batch.owners)

    def _plain_sum(self, batches: list[Batch]) -> Tensor:
        """Σ g_i by ordinary automatic differentiation: the non-private baseline."""
        total = torch.zeros(self.engine.dimension, device=self.population.device)
        for batch in batches:
            total += self.engine.plain_sum(batch.features, batch.labels, owners=batch.owners)
            if self.diagnostics is not None:
                norms = self._norms(batch)
                self._observe(norms, torch.ones_like(norms), batch, total)
        return total

    def _chunks(self, units: Tensor) -> tuple[Tensor, ...]:
        size = self.physical_batch_size
        return units.split(size) if size and len(units) > size else (units,)

    def _epochs(self) -> Iterator[tuple[int, list[Segment]]]:
        """Remaining epochs with the segment of each of their remaining steps."""
        every = [segment for segment in self.segments for _ in range(segment.steps)]
        start = 0
        for epoch, length in enumerate(self.plan.epoch_lengths()):
            steps = every[max(start, self.steps_done) : start + length]
            start += length
            if steps:
                yield epoch, steps

    def _epoch(self, epoch: int, segments: list[Segment], on_step: Callable[[], None] | None) -> dict[str, float]:
        self.model.train()
        for segment in segments:
            self.step(segment)
            if on_step is not None:
                on_step()
        row: dict[str, float] = {"epoch": float(epoch + 1)}
        if self.algorithm.private:
            row["epsilon_rdp"] = live_epsilon(self.ledger.events, self.plan.delta)
            row |= self._shown_values()
        if self.diagnostics is not None:
            row |= self._diagnostic_row()
        return row

    def _shown_values(self) -> dict[str, float]:
        row = {}
        for name, value in self.shown.items():
            entries = value.detach().float().cpu()
            if entries.dim():
                row |= {f"{name}/{k}": float(v) for k, v in enumerate(entries)}
            else:
                row[name] = float(entries)
        return row

    def _observe(self, norms: Tensor, weights: Tensor, batch: Batch, private_sum: Tensor) -> None:
        assert self.diagnostics is not None
        finite = norms.isfinite()
        groups = self.plan.groups
        ones = finite.float()
        self.diagnostics.batches += 1
        self.diagnostics.observe(
            units=ones.sum(),
            nonfinite=(~finite).float().sum(),
            weight=weights.sum(),
            group_units=torch.zeros(groups, device=norms.device).index_add_(0, batch.groups, ones),
            group_norm=torch.zeros(groups, device=norms.device).index_add_(
                0, batch.groups, torch.where(finite, norms, 0.0)
            ),
            cosine=torch.nn.functional.cosine_similarity(private_sum, self.engine.weighted_sum(ones), dim=0),
        )

    def _diagnostic_row(self) -> dict[str, float]:
        assert self.diagnostics is not None
        totals, count = self.diagnostics.totals, max(self.diagnostics.batches, 1)
        self.diagnostics = Diagnostics()
        if not totals:
            return {}
        units = totals["units"].clamp(min=1)
        mean_norm = totals["group_norm"] / totals["group_units"].clamp(min=1)
        return {
            "nonprivate/batch_size": float(totals["units"]) / count,
            "nonprivate/nonfinite": float(totals["nonfinite"]),
            "nonprivate/mean_weight": float(totals["weight"] / units),
            "nonprivate/cosine": float(totals["cosine"]) / count,
            **{f"nonprivate/gradient_norm/{k}": float(v) for k, v in enumerate(mean_norm)},
        }

    def charge(self) -> tuple[Event, ...]:
        """What has been charged so far."""
        return self.ledger.events
