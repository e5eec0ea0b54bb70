"""What two ranks do in the tests: every algorithm, once, in one start of two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tests.tried import tried_once

from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.data.records import Records, Schema, Split
from equidp.parameters import ModelSettings, PrivacySettings, TrainingSettings
from equidp.training import Prepared, TrainingRequest, plan_run, prepare
from equidp.training.ranks.peers import Peers

RECORDS, DIMENSION = 48, 6
OPTIONS: dict[str, dict[str, Any]] = {
    "dpis": {"count_noise_fraction": 0.5, "sum_noise_fraction": 0.5},
    "sa_dpsgd": {"energy_records": 8},
}
"""Where an algorithm's defaults do not suit 48 records."""
ASKED = "algorithms.json"
"""Names the algorithms, in the folder of the ranks."""
UPDATES = 300
"""How many single steps are compared."""


def toy(seed: int = 0) -> Split:
    """48 training records of two classes and three sexes, 8 public ones."""
    draw = torch.Generator().manual_seed(seed)
    total = RECORDS + 8
    labels = torch.arange(total) % 2
    schema = Schema(
        name="toy",
        kind="tabular",
        shape=(DIMENSION,),
        classes=("no", "yes"),
        groupings={"class": ("no", "yes"), "sex": ("a", "b", "c")},
    )
    records = Records(
        features=torch.rand(total, DIMENSION, generator=draw) + labels.view(-1, 1) * 0.5,
        labels=labels,
        groups={"class": labels, "sex": torch.arange(total) % 3},
        schema=schema,
        unit=torch.arange(total) // 2,
    )
    index = torch.arange(total)
    return Split(records.take(index[:RECORDS]), records.take(index[:0]), records.take(index[RECORDS:]))


def ready(name: str, batch_size: int, peers: Peers | None, **changes: Any) -> Prepared:
    """A short training of one algorithm, on this rank or alone."""
    algorithm = algorithm_settings(name, changes.pop("options", OPTIONS.get(name))).build()
    split = toy()
    private = PrivacySettings(**{"noise_multiplier": 1.0, "delta": 1e-2} | changes.pop("privacy", {}))
    epochs = changes.pop("epochs", 3)
    training = TrainingSettings(
        epochs=epochs, batch_size=batch_size, learning_rate=0.5, device="cpu", devices=2, **changes.pop("training", {})
    )
    units = RECORDS // 2 if private.by_unit else RECORDS
    grouping = "class" if algorithm.objective.by_class else "sex"
    groups = len(split.train.schema.groupings[grouping])
    plan = plan_run(algorithm, units=units, groups=groups, privacy=private, training=training)
    request = TrainingRequest(
        algorithm, plan, grouping=grouping, model=ModelSettings(name="logistic"), privacy=private, training=training,
        seed=5, **changes,
    )  # fmt: skip
    return prepare(request, split, peers=peers)


def fingerprint(prepared: Prepared) -> list[float]:
    """The weights, as numbers that JSON keeps exactly."""
    return prepared.trainer.engine.flatten().tolist()


def algorithms_here() -> list[str]:
    """Every algorithm that trains on tables; `custom` is any of them."""
    return [name for name in ALGORITHMS if name not in ("custom", "dpsgd_scatter")]


def battery(folder: str) -> None:
    """Everything the tests look at, written as one JSON file per rank."""
    peers = Peers(torch.device("cpu"), Path(folder))
    with tried_once():
        found = _found(peers, json.loads(Path(folder, ASKED).read_text()))
    Path(folder, f"rank{peers.rank}.json").write_text(json.dumps(found))
    peers.leave()


def _found(peers: Peers, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"rank": peers.rank, "size": peers.size}
    found["sampled"] = {name: _run(name, 8, peers) for name in names}
    found["everybody"] = {name: _run(name, RECORDS, peers, epochs=4) for name in names if name != "dpis"}
    found["units"] = _run("dpsgd", RECORDS // 2, peers, privacy={"unit": "unit"}, epochs=4)
    found["chunks"] = _run("dpsgd_f", RECORDS, peers, training={"physical_batch_size": 5}, epochs=4)
    found["private_energy"] = _run(
        "sa_dpsgd", RECORDS, peers, options={"energy": "private", "energy_records": RECORDS}, epochs=4
    )
    found["secure"] = _run("sa_dpsgd", 8, peers, privacy={"secure": True})
    found["diagnostics"] = _run("dpsgd", RECORDS, peers, training={"diagnostics": True}, epochs=4)
    found["whole"] = _run("dpsgd_f", 8, peers, epochs=5, options={"base_clip_norm": 0.7})
    found["empty"] = _empty_batches(peers)
    found["noise"] = _noise(peers)
    found["dropout"] = _dropout(peers)
    found["updates"] = updates(UPDATES, peers)
    peers.seed = lambda seed: seed  # type: ignore[method-assign]  # a fault: all ranks toss the same coins
    found["same_coins"] = updates(UPDATES // 3, peers)
    return found


def _run(name: str, batch_size: int, peers: Peers, **changes: Any) -> dict[str, Any]:
    prepared = ready(name, batch_size, peers, **changes)
    rows = prepared.run(None, progress=False)
    return {
        "weights": fingerprint(prepared),
        "ledger": [event.to_dict() for event in prepared.trainer.outcome().events],
        "rows": rows,
        "units": prepared.trainer.population.size,
    }


def _empty_batches(peers: Peers) -> dict[str, Any]:
    """Sizes of this rank's batches at an expected size of 1 for both ranks together."""
    prepared = ready("dpsgd_f", 1, peers, epochs=3)
    trainer, sizes = prepared.trainer, []
    draw = trainer.draw

    def counted() -> Any:
        drawn = draw()
        sizes.append(len(drawn.units))
        return drawn

    trainer.draw = counted  # type: ignore[method-assign]
    prepared.run(None, progress=False)
    return {"sizes": sizes, "weights": fingerprint(prepared)}


def updates(count: int, peers: Peers | None) -> list[list[float]]:
    """`[count, d]`: one step of dpsgd_f from the same weights, again and again; little noise, so that samples show."""
    options = {"count_noise_multiplier": 0.5}
    trainer = ready("dpsgd_f", 8, peers, epochs=count, options=options, privacy={"noise_multiplier": 0.1}).trainer
    start = trainer.engine.flatten() + 0.3
    found, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine a second one makes steps this small ten times slower
    for _ in range(count):
        trainer.engine.load_(start)
        trainer.run_steps(1)
        found.append((trainer.engine.flatten() - start).tolist())
    torch.set_num_threads(threads)
    return found


def _noise(peers: Peers) -> list[float]:
    """A total of nothing from both ranks, noised."""
    random = ready("dpsgd", 8, peers).trainer.random
    return random.perturb(torch.zeros(2000), sensitivity=0.5, noise_multiplier=2.0).tolist()


def _dropout(peers: Peers) -> list[float]:
    """What a model that draws would be given first."""
    ready("dpsgd", 8, peers)
    return torch.rand(4).tolist()
