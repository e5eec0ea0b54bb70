"""The Kedro project of a sweep: its configuration, the folders of results, and the store of its runs."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from equidp import __version__
from equidp.algorithms import ALGORITHMS, BASELINE
from equidp.errors import refuse_unknown
from equidp.parameters import TrainingSettings
from equidp.sweep.grid import Grid, nested, params_text
from equidp.tasks import CLASSIFICATION

OUTPUTS = ("metrics", "privacy", "report")
"""Kinds of files that a finished run has written."""

NOT_PART_OF_THE_RUN = ("run_label", "raw_dir", "resume", "audit", "report", "release", "tune")
"""Settings that do not change a run's results."""

NEWER = (
    "cuda_graphs", "deterministic", "momentum", "weight_decay", "adam_epsilon", "schedule", "schedule_at",
    "schedule_factor", "average", "augmentations", "augmentation_kinds", "augmentation_padding", "augmentation_noise",
    "trainable", "loss", "huber_delta",
)  # fmt: skip
"""Settings of training that came after the first recorded cells."""

NEWER_OPTIONS = ("lead",)
"""Options of private algorithms that came later."""


@dataclass(frozen=True)
class Cell:
    """One point of a grid: one run.

    Attributes:
        algorithm: the pipeline's name.
        overrides: settings given after `--params`, by dotted name; other algorithms' options are left out.
        settings: all settings that the results depend on, defaults included.
        key: the cell's name; a digest of `settings`.
        baseline: digest of the settings that the baseline depends on.
        records: digest of the settings that the encoded records depend on.
        outputs: files of a finished run, by kind.
        workplace: folder of checkpoints.
        folder: of results.
        raw_folder, records_cache: where raw files are read, and where encoded records are kept.
        provenance: file in which a finished run tells of its raw files.
    """

    algorithm: str
    overrides: Mapping[str, Any]
    settings: Mapping[str, Any] = field(repr=False)
    key: str
    baseline: str
    records: str
    outputs: Mapping[str, Path] = field(repr=False)
    workplace: Path = field(repr=False)
    folder: Path = field(repr=False)
    raw_folder: Path = field(default=Path(), repr=False)
    records_cache: Path = field(default=Path(), repr=False)
    provenance: Path = field(default=Path(), repr=False)

    @property
    def dataset(self) -> str:
        """The dataset's name."""
        return self.settings["dataset"]

    @property
    def seed(self) -> int:
        """The seed."""
        return self.settings["seed"]

    @property
    def params(self) -> str:
        """The text after `--params=`."""
        return params_text({**self.overrides, "run_label": self.key})

    @property
    def command(self) -> str:
        """What a user would type to run this cell alone."""
        return f"kedro run --pipeline={self.algorithm} {shlex.quote(f'--params={self.params}')}"

    def __str__(self) -> str:
        return f"{self.algorithm} {params_text(self.overrides)}"


@dataclass(frozen=True)
class Project:
    """A Kedro project in one of its environments; `equidp.cli.project_at` makes one.

    Attributes:
        path: its root folder.
        env: configuration environment, None for the default one.
        configure: its configuration (`EquidpConfigLoader`) as a run with `--params`, nested settings, reads it.
        store: makes MLflow's store and experiment; its address and the experiment's id.
    """

    path: Path
    env: str | None
    configure: Callable[[Mapping[str, Any]], Any] = field(repr=False)
    store: Callable[[], tuple[str, str]] = field(repr=False)

    def grids(self) -> dict[str, Any]:
        """Named grids of the configuration."""
        return dict(self.configure({})["sweeps"])

    def cells(self, grid: Grid) -> list[Cell]:
        """Every cell of a grid, once each, all settings validated.

        Raises:
            EquidpError: for any name or value that does not exist, before anything runs.
        """
        points = list(grid.points())
        # All names are checked first, because a cell takes seconds to import. The first data set is checked by its cell
        refuse_unknown("algorithm", (algorithm for algorithm, _ in points), ALGORITHMS)
        for overrides in list({str(of.get("dataset")): of for _, of in points}.values())[1:]:
            self.configure(nested(params_text(overrides))).refuse_wrong_names()
        shown = tqdm(points, desc="settings", unit="cell", delay=2, leave=False, disable=None)
        found = (self.cell(algorithm, overrides) for algorithm, overrides in shown)
        return list({cell.key: cell for cell in found}.values())

    def cell(self, algorithm: str, overrides: Mapping[str, Any]) -> Cell:
        """One cell, validated. Raises EquidpError for any name or value that does not exist."""
        refuse_unknown("algorithm", [algorithm], ALGORITHMS)
        loader = self.configure(nested(params_text(overrides)))
        parameters = loader["parameters"]
        mine = {name: value for name, value in overrides.items() if _concerns(name, algorithm)}
        if mine != overrides:
            # The others are valid, but not for this cell. Resolved, they would show in the block `audited`, and so in
            # the key
            loader = self.configure(nested(params_text(mine)))
            parameters = loader["parameters"]
        settings = settings_that_matter(algorithm, parameters, private=loader.settings.algorithm(algorithm).private)
        key = f"cell-{digest(settings)}"
        # the same run under its own name, without resolving all settings anew
        loader.runtime_params = {**loader.runtime_params, "run_label": key}
        loader["parameters"] = {**parameters, "run_label": key}
        catalog = loader["catalog"]

        def place(name: str, of: str = "{algorithm}.") -> Path:
            return self.path / catalog[f"{of}{name}"]["filepath"].format(algorithm=algorithm)

        data = settings["data"]
        shared = {name: settings[name] for name in ("dataset", "seed", "data", "model", "training", BASELINE)}
        return Cell(
            algorithm=algorithm,
            overrides=mine,
            settings=settings,
            key=key,
            baseline=digest({**shared, "unit": settings["privacy"]["unit"]}),
            records=digest({"dataset": settings["dataset"], "source": data["source"], "options": data["options"]}),
            outputs={kind: place(kind) for kind in OUTPUTS},
            workplace=place("workplace"),
            folder=place("metrics").parent,
            raw_folder=place("raw_folder", ""),
            records_cache=place("records_cache", ""),
            provenance=place("provenance", ""),
        )


def settings_that_matter(algorithm: str, parameters: Mapping[str, Any], *, private: bool) -> dict[str, Any]:
    """The settings that one algorithm's results depend on: shared ones, its own and the baseline's."""
    kept = {
        name: value
        for name, value in parameters.items()
        if name not in NOT_PART_OF_THE_RUN and _concerns(name, algorithm)
    }
    if not private:
        # a non-private run is the same for every ε
        kept["privacy"] = {"unit": kept["privacy"]["unit"]}
    else:
        kept["privacy"] = _privacy_that_matters(kept["privacy"])
    kept[algorithm] = {**kept[algorithm], "options": given(kept[algorithm]["options"])}
    kept[BASELINE] = {**kept[BASELINE], "options": given(kept[BASELINE]["options"], kept[BASELINE]["options"])}
    kept["training"] = _training_that_matters(kept["training"])
    kept["data"] = _data_that_matters(kept["data"])
    return {"algorithm": algorithm, "version": __version__, **kept}


def given(options: Mapping[str, Any], newer: Container[str] = NEWER_OPTIONS) -> dict[str, Any]:
    """Options without newer ones that are null, so that names of older cells stay the same."""
    return {name: value for name, value in options.items() if value is not None or name not in newer}


def _privacy_that_matters(privacy: Mapping[str, Any]) -> dict[str, Any]:
    """The privacy settings without newer ones that have no effect, so that names of older cells stay the same."""
    idle = {"total_epsilon", "total_adaptive", "ledger"} | (
        {"evaluation"} if privacy["evaluation"]["epsilon"] is None else set()
    )
    kept = {name: value for name, value in privacy.items() if name not in idle}
    if kept["trials_law"] is not None:
        return kept
    trials = kept.pop("max_trials")
    return {name: value for name, value in kept.items() if not name.startswith("trials_")} | {"trials": trials}


def _training_that_matters(training: Mapping[str, Any]) -> dict[str, Any]:
    """The training settings without newer ones at their defaults, so that names of older cells stay the same."""
    defaults = TrainingSettings().model_dump(mode="json")
    idle = {name for name in NEWER if training.get(name) == defaults[name]}
    kept = {name: value for name, value in training.items() if name not in idle}
    return kept | {"optimizer": kept.get("optimizer") or "sgd"}


def _data_that_matters(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data settings without those that do not change the parts, so that names of cells by strata stay the same."""
    idle = {"accept_strata", "id"} | ({"task"} if data["task"] == CLASSIFICATION else set())
    idle |= set() if data.get("positive_class") else {"positive_class"}
    idle |= {"membership", "key"} if data["membership"] == "strata" else set()
    return {name: value for name, value in data.items() if name not in idle}


def _concerns(name: str, algorithm: str) -> bool:
    """Whether a setting is shared, the algorithm's own or the baseline's, and no other algorithm's."""
    section = name.split(".")[0]
    return section in (algorithm, BASELINE) or section not in ALGORITHMS


def digest(settings: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that stand for these settings."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def by_seed(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells that differ in their seed alone, together."""
    return grouped(cells, row_key)


def row_key(cell: Cell) -> str:
    """Digest of a cell's settings without the seed: cells that differ in their seed alone have it in common."""
    return digest({**cell.settings, "seed": None})


def grouped(cells: Iterable[Cell], key: Callable[[Cell], str]) -> list[list[Cell]]:
    """Cells grouped by a key, in the order in which the keys first occur."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return list(groups.values())


def differing(cells: Iterable[Cell]) -> dict[str, dict[str, Any]]:
    """Return, by cell, the overrides that are not the same in all cells that they concern, except dataset and seed."""
    cells = list(cells)
    shown: dict[str, dict[str, Any]] = {cell.key: {} for cell in cells}
    names = dict.fromkeys(name for cell in cells for name in cell.overrides if name not in ("dataset", "seed"))
    for name in names:
        values = {cell.key: cell.overrides.get(name) for cell in cells if _concerns(name, cell.algorithm)}
        if len({str(value) for value in values.values()}) > 1:
            for key, value in values.items():
                if value is not None:
                    shown[key][name] = value
    return shown
