"""Whether a change of the code has changed a digit of any run.

    python benchmarks/unchanged.py --write before.json      # with the code as it was
    python benchmarks/unchanged.py --against before.json    # with the code as it is now
    python benchmarks/unchanged.py --against before.json --only dpis/linear custom/linear

Every registered algorithm trains a linear model for 60 steps on made-up records, one thread, seeded; some of them train
other models too, protect units of several records, or take other settings. Of each run it keeps the ε of every kind,
the calibrated noise and the spent events as they are printed, and a sha256 of everything else: the parameters, the
released weights, the scores, the state of the trainer, and each column of the history. Columns of seconds are left out.

Both runs belong on one machine: other libraries or another processor may round otherwise. The exit status is 1 where
anything differs, each difference in one sentence. Expect "N cases, no digit changed".
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.data.records import Records, Schema, Split
from equidp.errors import EquidpError, unknown_name
from equidp.parameters import ModelSettings, PrivacySettings, TrainingSettings
from equidp.training import TrainingRequest, conclude, plan_run, predict, prepare

FORMAT = "equidp unchanged 1"
LIBRARIES = ("dp-accounting", "kymatio", "llvmlite", "numpy", "pandas", "scipy", "torch")
"""Those whose version may change a digit."""

SEED, STEPS = 11, 60
SIZE, BATCH, EPOCHS = 240, 24, 6
"""Units, expected batch size and epochs: 60 steps."""

MANY = 100_000
SPARSE: Mapping[str, Any] = {"epochs": 1, "batch_size": 800}
"""Of so many units, batches so small are drawn by counting: 125 steps, as an epoch is the least there is."""

RECORDS_PER_UNIT = 3
TEST, PUBLIC = 60, 48
DELTA, NOISE, TARGET = 1e-5, 1.1, 6.0
"""δ; the noise multiplier that runs train with; the ε that noise is calibrated for."""

CLASSES = ("common", "less", "rare")
SHARES = (0.6, 0.3, 0.1)
SHAPES: dict[str, tuple[int, ...]] = {"tabular": (8,), "image": (1, 8, 8), "text": (6,)}
VOCABULARY = 40

SECONDS = ("second", "time", "duration")
"""A history column whose name has one of these words is of the clock."""


@dataclass(frozen=True)
class Case:
    """One run: what trains on which records.

    Attributes:
        options: of the algorithm.
        training: settings of `training` other than those of all cases.
        calibrated: train with the noise of the target ε, not with `NOISE`.
        by_unit: protect units of three records.
    """

    algorithm: str
    model: str = "logistic"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "tabular"
    options: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    calibrated: bool = False
    by_unit: bool = False
    size: int = SIZE


FULL_BATCH: Mapping[str, Any] = {"epochs": STEPS}
"""Where every step takes all records, an epoch is one step."""

OTHER_MODELS = ("sgd", "dpsgd", "dpsgd_f", "psasc_momentum", "dpis")
SMALL_LSTM = {"dimension": 8, "projection": 6, "hidden": 5, "head": 4}
COMBINED = {
    "weights": {"name": "psasc", "scale": 0.8},
    "contribution": "inner_momentum",
    "schedule": "steps",
    "side_release": "quantile",
    "update": "outer_momentum",
}


def cases() -> dict[str, Case]:
    """All cases by name."""
    found = {
        f"{name}/linear": Case(name, training=FULL_BATCH if name == "psasc_momentum_gd" else {}) for name in ALGORITHMS
    }
    for name in OTHER_MODELS:
        found[f"{name}/cnn_small"] = Case(name, "cnn_small", kind="image")
        found[f"{name}/bilstm"] = Case(name, "bilstm", SMALL_LSTM, kind="text")
        found[f"{name}/units"] = Case(name, by_unit=True)
    return found | {
        "sa_dpsgd/units": Case("sa_dpsgd", by_unit=True),
        "sa_dpsgd/private_energy": Case("sa_dpsgd", options={"energy": "private", "energy_records": 80}),
        "dpis/adaptive_clip": Case("dpis", options={"adaptive_clip": True}),
        "dpis/calibrated": Case("dpis", calibrated=True),
        "dpsgd_f/calibrated": Case("dpsgd_f", calibrated=True),
        "dpsgd_tanh/mlp": Case("dpsgd_tanh", "mlp", {"hidden": [7]}),
        "custom/combined": Case("custom", options=COMBINED),
        "dpsgd/many_records": Case("dpsgd", size=MANY, training=SPARSE),
        "dpsgd/adam_in_chunks": Case("dpsgd", training={"optimizer": "adam", "physical_batch_size": 7}),
        "dpsgd_f/diagnostics": Case("dpsgd_f", training={"optimizer": "momentum", "diagnostics": True}),
        "dpsgd_f/class_weights": Case("dpsgd_f", training={"optimizer": "adamw", "class_weights": [0.5, 1.0, 2.0]}),
    }


def records(kind: str, units: int, seed: int, *, by_unit: bool = False) -> Records:
    """Random records of three classes, the last of them rare; a feature tells the class in part."""
    stream = torch.Generator().manual_seed(seed)
    each, shape = RECORDS_PER_UNIT if by_unit else 1, SHAPES[kind]
    size = units * each
    labels = torch.multinomial(torch.tensor(SHARES), size, replacement=True, generator=stream)
    features = torch.rand((size, *shape), generator=stream)
    features.view(size, -1)[:, 0] = (features.view(size, -1)[:, 0] + labels) / len(CLASSES)
    if kind == "image":
        features = (255 * features).to(torch.uint8)
    elif kind == "text":
        features = (VOCABULARY * features).long()
    schema = Schema(
        name="made_up",
        kind=kind,  # type: ignore[arg-type]
        shape=shape,
        classes=CLASSES,
        groupings={"class": CLASSES},
        feature_names=tuple(f"x{column}" for column in range(*shape)) if kind == "tabular" else (),
        mean=(0.4,) if kind == "image" else (),
        sd=(0.3,) if kind == "image" else (),
        vocabulary=VOCABULARY if kind == "text" else 0,
    )
    unit = torch.arange(units).repeat_interleave(each) if by_unit else None
    return Records(features, labels, {"class": labels}, schema, unit=unit)


def observed(case: Case) -> dict[str, str]:
    """Train, and give every digit of the run: numbers as they are printed, tensors by their sha256."""
    algorithm = algorithm_settings(case.algorithm, case.options).build()
    unit = "unit" if case.by_unit else "record"
    training = TrainingSettings(
        **({"epochs": EPOCHS, "batch_size": BATCH, "learning_rate": 0.5, "device": "cpu"} | dict(case.training))
    )
    fixed = PrivacySettings(noise_multiplier=NOISE, delta=DELTA, unit=unit)
    target = PrivacySettings(epsilon=TARGET, delta=DELTA, unit=unit)
    published = PrivacySettings(epsilon=TARGET, epsilon_as="published", delta=DELTA, unit=unit)
    facts: dict[str, Any] = {"units": case.size, "groups": len(CLASSES), "training": training}
    found = {}
    if algorithm.private:
        found["noise_multiplier/sound"] = repr(plan_run(algorithm, privacy=target, **facts).noise_multiplier)
        found["noise_multiplier/published"] = _noise_or_refused(algorithm, published, facts)
    privacy = target if case.calibrated else fixed
    split = Split(
        train=records(case.kind, case.size, SEED, by_unit=case.by_unit),
        test=records(case.kind, TEST, SEED + 1),
        public=records(case.kind, PUBLIC, SEED + 2),
    )
    request = TrainingRequest(
        algorithm, plan_run(algorithm, privacy=privacy, **facts), grouping="class",
        model=ModelSettings(name=case.model, options=dict(case.model_options)), privacy=privacy, training=training,
        seed=SEED,
    )  # fmt: skip
    prepared = prepare(request, split)
    trained = conclude(prepared, prepared.run(None, progress=False))
    trainer, stated = prepared.trainer, trained.privacy
    found |= {name: repr(stated[name]) for name in ("epsilon", "epsilon_rdp", "epsilon_pld")}
    figure = stated["epsilon_published"]
    found["epsilon_published"] = repr(figure and figure["value"])  # its formula is in words, which may be mended
    found |= {
        "steps": repr(trainer.steps_done),
        "ledger": json.dumps(stated["ledger"], sort_keys=True),
        "statement": digest({key: value for key, value in stated.items() if isinstance(value, int | float)}),
        "parameters": digest(dict(trainer.model.named_parameters())),
        "released_weights": digest(trained.weights),
        "scores": digest(predict(trainer.model, split.test.features)),
    }
    found |= {f"state/{name}": digest(value) for name, value in trainer.state_dict().items()}
    columns = [name for name in trained.history if not any(word in name for word in SECONDS)]
    return found | {f"history/{name}": digest(trained.history[name].tolist()) for name in columns}


def _noise_or_refused(algorithm: Any, privacy: PrivacySettings, facts: Mapping[str, Any]) -> str:
    """Not every algorithm can be calibrated by its paper's figure."""
    try:
        return repr(plan_run(algorithm, privacy=privacy, **facts).noise_multiplier)
    except EquidpError:
        return "refused"


def digest(value: Any) -> str:
    """sha256 of a value made of tensors, numbers and text, whatever they are nested in."""
    found = hashlib.sha256()
    for piece in _pieces(value):
        found.update(len(piece).to_bytes(8, "big") + piece)
    return found.hexdigest()


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        yield f"mapping of {len(value)}".encode()
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from _pieces(value[key])
    elif isinstance(value, list | tuple):
        yield f"sequence of {len(value)}".encode()
        for item in value:
            yield from _pieces(item)
    elif value is None or isinstance(value, bool | int | float | str):
        yield repr(value).encode()
    else:  # its text could have an address in it
        raise TypeError(f"no digest of a {type(value).__name__}")


def differences(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Each difference of two sets of cases in one sentence."""
    sentences = []
    for name in sorted(before.keys() | now.keys()):
        if name not in now or name not in before:
            sentences.append(f"The case {name} is only in {'the file' if name in before else 'this run'}.")
            continue
        old, new = before[name], now[name]
        for key in sorted(old.keys() | new.keys()):
            if key not in new or key not in old:
                sentences.append(f"{name}: {key} is only in {'the file' if key in old else 'this run'}.")
            elif old[key] != new[key]:
                sentences.append(f"{name}: {key} was {_short(old[key])} and is now {_short(new[key])}.")
    return sentences


def _short(text: str) -> str:
    return f"{text[:12]}…" if len(text) == 64 and " " not in text else text


def libraries() -> dict[str, str]:
    """Versions, "none" where one is not installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def read(path: Path) -> dict[str, dict[str, str]]:
    """The cases of a file that `write` made.

    Raises:
        EquidpError: it is no such file, or other libraries were installed then.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EquidpError(f"--against {path}: {error}. Give a file that --write made.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise EquidpError(f"--against {path}: no file of the format {FORMAT!r}. Give one that --write made.")
    then, now = content["libraries"], libraries()
    if other := [f"{name} {then.get(name)} (now {now[name]})" for name in LIBRARIES if then.get(name) != now[name]]:
        raise EquidpError(
            f"--against {path}: it was written with {', '.join(other)}, which may round otherwise. Install the same "
            "versions, or write the file anew."
        )
    return content["cases"]


def write(path: Path, found: Mapping[str, Mapping[str, str]]) -> None:
    """Write the file, whole or not at all."""
    content = {"format": FORMAT, "libraries": libraries(), "cases": found}
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, path)


def run(options: argparse.Namespace) -> int:
    """Run the cases; write or compare. Returns the exit status."""
    every = cases()
    for name in options.only or ():
        if name not in every:
            raise unknown_name("case", name, every)
    chosen = {name: case for name, case in every.items() if not options.only or name in options.only}
    before = read(options.against) if options.against else {}
    if options.write and not options.write.resolve().parent.is_dir():
        raise EquidpError(f"--write {options.write}: there is no folder {options.write.parent}. Make it first.")
    torch.set_num_threads(1)
    found = {name: observed(case) for name, case in tqdm(chosen.items(), unit="case", disable=None)}
    if options.write:
        write(options.write, found)
        print(f"{len(found)} cases written to {options.write}")
        return 0
    if options.only:
        before = {name: case for name, case in before.items() if name in options.only}
    sentences = differences(before, found)
    print("\n".join(sentences) or f"{len(found)} cases, no digit changed")
    return int(bool(sentences))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--write", type=Path, metavar="FILE", help="keep what the runs come to")
    task.add_argument("--against", type=Path, metavar="FILE", help="compare with what was kept")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="these cases, such as dpsgd/linear")
    try:
        return run(parser.parse_args(arguments))
    except EquidpError as error:
        print(error.format_message(), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
