"""One combination of parts that no paper has, beside its parents: the example of docs/algorithms/custom.md.

    python benchmarks/combination.py [--seeds 10]

DP-PSASC*'s weights and momenta on Auto-DPSGD-S's falling noise, on `digits` with 40 training records of class 8, an
MLP, ε = 4 at δ = 1e-4. Prints a table in a few minutes on two cores; expect differences within the seeds' spread.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch

from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.data.records import Split
from equidp.data.sources import source
from equidp.data.splitting import split
from equidp.mechanism.algorithm import Algorithm
from equidp.parameters import ModelSettings, PrivacySettings, TrainingSettings
from equidp.training import TrainingRequest, make_model, plan_run, predict, train_model

RARE, GROUPS = 8, 10
T_95 = {5: 2.776, 10: 2.262}
"""Student's t, 97.5 %, by number of seeds."""

MOMENTA = {"contribution": "inner_momentum", "update": "outer_momentum", "initial": {"clip_norm": 0.1}}
RUNS: dict[str, tuple[str, dict[str, Any], float]] = {
    "dpsgd": ("dpsgd", {}, 1.0),
    "psasc_momentum (parent)": ("psasc_momentum", {}, 3.0),
    "auto_dpsgd_s (parent)": ("auto_dpsgd_s", {}, 1.0),
    "custom": ("custom", {"weights": {"name": "psasc", "scale": 0.8}, "schedule": "steps", **MOMENTA}, 3.0),
}
"""Row: algorithm, options, learning rate."""


def scores(algorithm: Algorithm, plan: Plan, rate: float, seed: int) -> tuple[float, float]:
    """Test accuracy, and recall of the rare class, of one run."""
    parts = digits(seed)
    model = ModelSettings(name="mlp")
    request = TrainingRequest(
        algorithm, plan, grouping="class", model=model, privacy=PrivacySettings(epsilon=4.0, delta=1e-4),
        training=settings(rate), seed=seed,
    )  # fmt: skip
    trained = train_model(request, parts, progress=False)
    network = make_model(parts.train.schema, model, algorithm, seed)
    network.load_state_dict(trained.weights)
    found = predict(network, parts.test.features).argmax(1)
    right = found == parts.test.labels
    return float(right.float().mean()), float(right[parts.test.labels == RARE].float().mean())


def digits(seed: int) -> Split:
    """The data, class 8 rare."""
    reader = source("digits", {})
    records = reader.read(reader.locate(Path()))
    return split(records, seed=seed, keep={str(RARE): 40}, public_fraction=0.05, membership="strata")


def settings(rate: float) -> TrainingSettings:
    """30 epochs of expected batch size 128."""
    return TrainingSettings(epochs=30, batch_size=128, learning_rate=rate, device="cpu")


def interval(values: list[float]) -> str:
    """Mean ± 95 %."""
    spread = T_95.get(len(values), 1.96) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {spread:.3f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    print("| algorithm | sound ε | accuracy | class 8 |\n|---|---|---|---|")
    for row, (name, options, rate) in RUNS.items():
        algorithm = algorithm_settings(name, options).build()
        privacy = PrivacySettings(epsilon=4.0, delta=1e-4)
        plan = plan_run(algorithm, units=len(digits(0).train), groups=GROUPS, privacy=privacy, training=settings(rate))
        total, rare = zip(*(scores(algorithm, plan, rate, seed) for seed in seeds), strict=True)
        print(f"| {row} | {algorithm.epsilon(plan).value:.2f} | {interval(list(total))} | {interval(list(rare))} |")


if __name__ == "__main__":
    main()
