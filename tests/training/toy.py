"""A small trainer for the tests of checkpoints: noisy steps on a vector, events in a ledger, epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from equidp.accounting.events import Event
from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import Plan
from equidp.mechanism.noise import RandomSource, SeededRandom

PLAN = Plan(records=100, batch_size=10, epochs=4, groups=2, delta=1e-5, noise_multiplier=1.0)
"""40 steps in 4 epochs."""

EVENT = Event(PLAN.sampling_rate, PLAN.noise_multiplier)
WHOLE_RUN = (Event(PLAN.sampling_rate, PLAN.noise_multiplier, PLAN.steps),)


class Crash(BaseException):
    """Stands for a process that dies: nothing may catch it."""


class ToyTrainer:
    """θ ← 0.9·θ + noise, for `PLAN.steps` steps.

    Args:
        random: where coins and noise come from.
        ledger: is charged before each step.
        at_step: called in the middle of every step, after the charge, with the steps done so far.
    """

    def __init__(
        self, random: RandomSource, ledger: Ledger, *, at_step: Callable[[int], None] = lambda done: None
    ) -> None:
        self.plan, self.random, self.ledger, self.at_step = PLAN, random, ledger, at_step
        self.theta = torch.zeros(5)
        self.steps_done = 0

    def train(
        self,
        on_epoch: Callable[[dict[str, float], nn.Module], Mapping[str, float]] | None = None,
        *,
        on_step: Callable[[], None] | None = None,
        progress: bool = True,
    ) -> list[dict[str, float]]:
        rows, end = [], 0
        for epoch, length in enumerate(self.plan.epoch_lengths()):
            end += length
            if self.steps_done >= end:
                continue
            while self.steps_done < end:
                self.step()
                if on_step is not None:
                    on_step()
            row = {"epoch": float(epoch + 1), "theta": float(self.theta.sum())}
            row |= on_epoch(row, nn.Identity()) if on_epoch is not None else {}
            rows.append(row)
        return rows

    def step(self) -> None:
        sample = self.random.bernoulli(PLAN.sampling_rate, PLAN.records)
        self.ledger.append(EVENT)
        self.at_step(self.steps_done)
        noised = self.random.perturb(0.9 * self.theta + sample.sum(), sensitivity=1.0, noise_multiplier=1.0)
        self.theta = noised
        self.steps_done += 1

    def state_dict(self) -> dict[str, Any]:
        return {"theta": self.theta, "steps_done": self.steps_done, "random": self.random.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.theta, self.steps_done = state["theta"], state["steps_done"]
        self.random.load_state_dict(state["random"])


def uninterrupted(seed: int = 1) -> ToyTrainer:
    """The run that every resumed one of that seed must equal."""
    trainer = ToyTrainer(SeededRandom(seed, "cpu"), Ledger())
    trainer.train()
    return trainer
