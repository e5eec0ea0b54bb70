"""How often the audit catches half the noise, and how often it accuses an honest run.

    python benchmarks/audit.py                                    # all algorithms, ε = 1, 2, 3, 4, five seeds
    python benchmarks/audit.py --algorithms dpsgd --runs 50 --rate 0.1

Every run is audited with gradient canaries through the real engine: sampling, weights, side releases and noise are
those of training. A row says, for one algorithm and one claimed ε, how many honest runs had a bound above their claim
(at most 5 % should), how many runs with half the noise had one (all should), and the mean bounds. Side noise is a ratio
to the gradients', so that the budget is the gradients'; nothing is read from the counts themselves.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import mean

import torch
from torch import Tensor, nn

from equidp.accounting.plan import Plan
from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.audit import AuditSettings, TrainingSetup
from equidp.audit.canaries import coins, gradient_scores, verdict
from equidp.audit.run import audited_delta, claimed
from equidp.data.records import Records, Schema
from equidp.gradients.losses import CrossEntropy
from equidp.mechanism.noise import SeededRandom

SCHEMA = Schema("toy", "tabular", (4,), ("a", "b"), {"class": ("a", "b")})
RECORDS, EPOCHS = 60, 10
HEAVY = ("psasc_momentum_gd",)
"""Keeps a vector per record: a gigabyte here, so only on request."""


class HalfNoise(SeededRandom):
    """Adds half the noise that is charged."""

    def perturb(self, values: Tensor, *, sensitivity: float | Tensor, noise_multiplier: float) -> Tensor:
        return super().perturb(values, sensitivity=sensitivity, noise_multiplier=noise_multiplier / 2)


def toy_records(count: int, seed: int) -> Records:
    """Records whose label follows their first feature."""
    features = torch.rand(count, 4, generator=torch.Generator().manual_seed(seed))
    labels = (features[:, 0] > 0.5).long()
    return Records(features, labels, {"class": labels}, SCHEMA)


def setup_of(name: str, epsilon: float, rate: float) -> TrainingSetup:
    """An algorithm with its defaults, solved for ε."""
    options = {"count_noise_multiplier": "10x"} if "count_noise_multiplier" in ALGORITHMS[name].model_fields else {}
    algorithm = algorithm_settings(name, options).build()
    plan = Plan(RECORDS, max(1, round(rate * RECORDS)), EPOCHS, 2, 1e-6, 1.0)
    if name == "dpis":
        # it cannot take everybody, its releases of N and K pay off at size only, and its budget holds at one δ
        plan = Plan(5000, round(5000 * min(rate, 0.5)), EPOCHS // 2, 2, 3e-5, 1.0)
    return TrainingSetup(
        build_model=lambda schema: nn.Linear(4, 2),
        algorithm=algorithm,
        plan=algorithm.calibrated(plan, epsilon),
        loss=CrossEntropy(),
        learning_rate=0.1,
        public=toy_records(64, 2),
    )


def bounds(how: TrainingSetup, source: type[SeededRandom], runs: int, settings: AuditSettings) -> list[float]:
    """Lower bounds on ε of so many runs."""
    m = settings.gradient_canaries
    found = []
    for seed in range(runs):
        included = coins(m, seed, "benchmark")
        scores = gradient_scores(how, toy_records(RECORDS, 1), included, source(seed, "cpu"))
        guesses, delta = settings.guesses_of(m), audited_delta(how, settings, m)
        found.append(verdict(scores, included, guesses=guesses, delta=delta).epsilon_lower_bound)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status is 1 if an honest run is accused more often than chance allows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = [name for name in ALGORITHMS if name not in ("sgd", "custom", *HEAVY)]
    parser.add_argument("--algorithms", nargs="+", default=default)
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 2.0, 3.0, 4.0])
    parser.add_argument("--canaries", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=1.0, help="sampling rate q")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(arguments)
    settings = AuditSettings(gradient_canaries=options.canaries)
    print("| algorithm | ε | ε at the audit's δ | honest: bound (accused) | half the noise: bound (caught) | s |")
    print("|---|---|---|---|---|---|")
    accused = audited = 0
    for name in options.algorithms:
        for epsilon in options.epsilons:
            began = time.perf_counter()
            how = setup_of(name, epsilon, options.rate)
            claim = claimed(how, audited_delta(how, settings, options.canaries))
            honest, broken = (bounds(how, kind, options.runs, settings) for kind in (SeededRandom, HalfNoise))
            wrong, caught = (sum(bound > claim for bound in found) for found in (honest, broken))
            accused, audited = accused + wrong, audited + len(honest)
            print(
                f"| `{name}` | {epsilon:g} | {claim:.2f} | {mean(honest):.2f} ({wrong}/{len(honest)}) "
                f"| {mean(broken):.2f} ({caught}/{len(broken)}) | {time.perf_counter() - began:.0f} |",
                flush=True,
            )
    print(f"\n{accused} of {audited} honest runs accused.")
    return int(accused > 0.05 * audited + 3 * (0.05 * 0.95 * audited) ** 0.5)


if __name__ == "__main__":
    sys.exit(main())
