"""What a private choice of settings costs and brings: `python benchmarks/one_budget.py` (Adult, five repetitions).

Three models for each repetition, all of `dpsgd_f` with the groups of sex and income, 10 epochs of batch 1,024: the
preset's other settings at ε = 3;
settings that `tune` chose, where ε = 3 is that of choice and model; and settings that the best exact figure chose
(`tune.exact`), where each training alone has ε = 3. The score is the accuracy of the worst of the four groups. Every
repetition has a split, batches and noise of its own. Prints a table of the test part's figures, mean and half of the
95 % interval over repetitions, with ε of all that a training record pays for.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from scipy import stats

from equidp.data.records import Records, Split
from equidp.data.sources import source
from equidp.evaluation.metrics import evaluate
from equidp.models.weights import Weights
from equidp.parameters import Settings, resolve
from equidp.pipelines.ingestion.nodes import divide
from equidp.pipelines.training.nodes import group_arrays, plan_training, score_test, train_network
from equidp.pipelines.tune.nodes import choose_model

GROUPS = "sex*class"
NAME = "dpsgd_f"
GRID = {"training": {"learning_rate": [0.4, 1.6, 6.4], "class_weights": [[1, 1], [1, 3]]}}
LAW = {"trials_law": "poisson", "trials_mean": 6}
PRIVACY = {"epsilon": 3.0, "delta": 1e-6}
PRESET: dict[str, Any] = {
    "dataset": "adult",
    "algorithm": NAME,
    "data": {"groups": [GROUPS]},
    "model": {"name": "logistic"},
    "training": {"epochs": 10, "batch_size": 1024, "learning_rate": "1/sqrt(steps)", "device": "cpu"},
    NAME: {"options": {"base_clip_norm": 0.5}},
    "tune": {"score": "worst_group"},
}


Made = tuple[Weights, dict[str, Any], dict[str, Any]]
"""Weights, privacy.json, what was chosen."""


def by_default(records: Records, seed: int, place: Path) -> Made:
    """One training with the preset's settings."""
    of = resolve(PRESET | {"privacy": PRIVACY, "seed": seed, "training": PRESET["training"] | {"evaluate_every": 100}})
    parts = _parts(records, of)
    plan = plan_training(parts.train, of, algorithm=NAME)
    given = (parts.train, parts.test, parts.public, plan, place, of, lambda name, row: None, place, {})
    weights, _, privacy = train_network(*given, algorithm=NAME)
    return weights, privacy, {"chosen": {}}


def by_choice(records: Records, seed: int, place: Path, *, exact: bool) -> Made:
    """A tuning; the chosen weights, their statement and what was chosen."""
    privacy = PRIVACY if exact else PRIVACY | LAW
    tune = PRESET["tune"] | {"grid": GRID, "exact": exact}
    of = resolve(PRESET | {"privacy": privacy, "seed": seed, "tune": tune})
    weights, statement, choice, *_ = choose_model(records, place, of, {NAME: of.algorithm(NAME)}, place, {})
    return weights, statement, choice


def figures(records: Records, seed: int, weights: Weights) -> tuple[float, float]:
    """Accuracy of the worst group of the test part, and overall."""
    test = _parts(records, resolve(PRESET | {"privacy": PRIVACY, "seed": seed})).test
    groups = group_arrays(test, (GROUPS,))
    found = evaluate(score_test(weights, test), test.labels.numpy(), groups, classes=test.schema.classes)
    return found["worst"][GROUPS]["accuracy"], found["overall"]["accuracy"]


def _parts(records: Records, of: Settings) -> Split:
    return divide(records, of.data, of.seed, [of.algorithm(NAME)])


def _spread(values: list[float]) -> str:
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values)) if values[1:] else 0
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


def main() -> None:
    """Run, and print a line for each model and the table."""
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("--repetitions", type=int, default=5)
    torch.set_num_threads(1)
    kind = source("adult", {})
    records = kind.records(kind.locate(Path(os.environ.get("EQUIDP_RAW_DIR", "data/01_raw"))))
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for seed in range(asked.parse_args().repetitions):
        for name, how in (("default", None), ("tuned", False), ("chosen without privacy", True)):
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder)
                made = by_default(records, seed, place) if how is None else by_choice(records, seed, place, exact=how)
            weights, privacy, choice = made
            row = (*figures(records, seed, weights), privacy["epsilon"])
            rows.setdefault(name, []).append(row)
            print(f"{name}, seed {seed}: worst {row[0]:.3f}, overall {row[1]:.3f}, ε {row[2]:.3f}, "
                  f"{json.dumps(choice['chosen'])}", flush=True)  # fmt: skip
    print("\n| settings | worst group | overall | ε of choice and model |\n|---|---|---|---|")
    for name, of in rows.items():
        worst, overall, epsilons = (list(column) for column in zip(*of, strict=True))
        print(f"| {name} | {_spread(worst)} | {_spread(overall)} | {statistics.mean(epsilons):.2f} |")


if __name__ == "__main__":
    main()
