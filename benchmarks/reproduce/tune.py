"""The best learning rate of every algorithm for its worst group, on records held back from training.

    python benchmarks/reproduce/tune.py      # the grid `tuning` of sweeps.yml; an hour on one core

Trains every cell of the grid in this process, without reports and tracking, and prints per dataset and algorithm the
accuracy of the worst group (and overall) at every rate, best first. The best rates are those of `worst_group_table`. A
grid that evaluates on test records is refused: nothing may be chosen by them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from kedro.framework.startup import bootstrap_project
from torch import Tensor
from tqdm import tqdm

from equidp.accounting.plan import Plan
from equidp.algorithms import algorithm_settings
from equidp.cli import project_at
from equidp.data import encoding
from equidp.data.records import Records, Split
from equidp.data.sources import source
from equidp.errors import EquidpError
from equidp.evaluation.live import live_metrics
from equidp.models import features, model_features
from equidp.parameters import DataSettings, ModelSettings, PrivacySettings, TrainingSettings
from equidp.pipelines.ingestion.nodes import divide
from equidp.pipelines.training.nodes import group_arrays
from equidp.sweep.grid import choose_grid
from equidp.sweep.project import Project
from equidp.training import TrainingRequest, make_model, plan_run, predict, train_model, units_in

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Train, and print the table."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("grid", nargs="?", default="tuning")
    torch.set_num_threads(1)
    bootstrap_project(ROOT)
    project = project_at(ROOT)
    cells, raw = project.cells(choose_grid(project.grids(), arguments.parse_args().grid, {})), raw_folder(project)
    for cell in cells:
        if cell.settings["data"]["evaluate_on"] != "validation":
            raise EquidpError(f"{cell} evaluates on test records, by which nothing may be chosen.")
    found: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for cell in tqdm(cells, disable=not sys.stderr.isatty()):
        by = f"{cell.dataset} by {cell.settings['data']['groups'][0]}"
        adjustment = cell.settings[cell.algorithm]["options"].get("adjustment")
        rate = f"{cell.settings['training']['learning_rate']:g}" + (f" τ {adjustment:g}" if adjustment else "")
        found[by, cell.algorithm][rate].append(scores(cell.settings, cell.algorithm, raw))
    for (dataset, algorithm), rates in found.items():
        means = {rate: tuple(map(statistics.mean, zip(*seeds, strict=True))) for rate, seeds in rates.items()}
        best_first = sorted(means.items(), key=lambda item: item[1], reverse=True)
        shown = "   ".join(f"{rate}: {worst:.3f} ({overall:.3f})" for rate, (worst, overall) in best_first)
        print(f"{dataset:25s} {algorithm:16s} {shown}")


def raw_folder(project: Project) -> Path:
    """Where raw files are looked for."""
    return ROOT / project.configure({})["parameters"]["raw_dir"]


@cache
def records_of(name: str, options: str, raw: Path, mapped: str | None = None) -> Records:
    """A source's records, or a map's features of them, kept on disk; options are JSON, which a cache tells apart."""
    chosen = source(name, json.loads(options))
    files = chosen.locate(raw)
    if mapped is None:
        return chosen.records(files)
    facts = [name, options, files.fingerprint, features.fingerprint(*json.loads(mapped))]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return encoding.kept(
        ROOT / "data" / "04_feature" / name, key, lambda: features.extract(chosen.records(files), *json.loads(mapped))
    )


@cache
def plan_of(name: str, options: str, privacy: str, training: str, units: int, groups: int) -> Plan:
    """A run's plan, of settings as JSON. Solving for its noise takes longer than a small training; seeds share it."""
    return plan_run(
        algorithm_settings(name, json.loads(options)).build(),
        units=units,
        groups=groups,
        privacy=privacy_of(json.loads(privacy)),
        training=training_of(json.loads(training)),
    )


def scores(settings: Mapping[str, Any], name: str, raw: Path) -> tuple[float, float]:
    """Accuracy of the worst group of the first grouping, and overall, of one cell."""
    parts, outputs = trained(settings, name, raw)
    return worst_and_overall(parts.test, outputs, settings["data"]["groups"][0])


def worst_and_overall(test: Records, outputs: Tensor, grouping: str) -> tuple[float, float]:
    """Accuracy of the worst group, and overall, from a model's `[n, K]` outputs for these records."""
    figures = live_metrics(outputs.numpy(), test.labels.numpy(), group_arrays(test, (grouping,)))
    overall = figures.pop("test/accuracy")
    return min(value for figure, value in figures.items() if figure.startswith("test/accuracy/")), overall


def training_of(block: Mapping[str, Any]) -> TrainingSettings:
    """What trains, of a cell's block `training`: it also says when to evaluate and to save."""
    return TrainingSettings(**{name: value for name, value in block.items() if name in TrainingSettings.model_fields})


def privacy_of(block: Mapping[str, Any]) -> PrivacySettings:
    """The guarantee, of a cell's block `privacy`: it also says how many trials `tune` may make."""
    found = {name: value for name, value in block.items() if name in PrivacySettings.model_fields}
    if found.get("epsilon") is found.get("noise_multiplier") is None:  # of sgd, which adds no noise
        found["epsilon"] = 1.0
    return PrivacySettings(**found)


def divided(settings: Mapping[str, Any], name: str, raw: Path) -> Split:
    """The parts of one cell's records."""
    data = DataSettings(**settings["data"])
    wanted = model_features(settings["model"]["name"], settings["model"]["options"])
    mapped = None if wanted is None else json.dumps(wanted)
    records = records_of(data.source, json.dumps(data.options), raw, mapped)
    algorithm = algorithm_settings(name, settings[name]["options"]).build()
    return divide(records, data, settings["seed"], [algorithm])


def trained(settings: Mapping[str, Any], name: str, raw: Path) -> tuple[Split, Tensor]:
    """Train one cell: the parts of its records, and the model's outputs for the test part."""
    model, options, seed = ModelSettings(**settings["model"]), settings[name]["options"], settings["seed"]
    privacy, training = privacy_of(settings["privacy"]), training_of(settings["training"])
    grouping, parts = settings["data"]["groups"][0], divided(settings, name, raw)
    algorithm = algorithm_settings(name, options).build()
    _, names = parts.train.grouping(grouping)
    asked = (json.dumps(of) for of in (options, settings["privacy"], settings["training"]))
    request = TrainingRequest(
        algorithm, plan_of(name, *asked, units_in(parts.train, privacy), len(names)), grouping=grouping, model=model,
        privacy=privacy, training=training, seed=seed, options=options,
    )  # fmt: skip
    found = train_model(request, parts, progress=False)
    network = make_model(parts.train.schema, model, algorithm, seed)
    network.load_state_dict(found.weights)
    return parts, predict(network, parts.test.features)


if __name__ == "__main__":
    main()
