"""Train one model: from a split and settings to weights, history and a privacy statement. No Kedro, no MLflow.

plan = plan_run(algorithm, train, privacy=…, training=…, groups=K)
trained = train_model(algorithm, plan, split, …)
scores = predict(model, split.test.features)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from equidp.engine.ledger import Event, Ledger, calibrate, epsilon, epsilon_path
from equidp.engine.noise import SeededRandom, derived_seed
from equidp.engine.parts import Algorithm, Plan
from equidp.engine.sampling import Population
from equidp.engine.trainer import EpochCallback, Trainer, choose_device
from equidp.errors import EquidpError
from equidp.models import build_model
from equidp.parameters import ModelSettings, PrivacySettings, TrainingSettings
from equidp.records import Records, Schema, Split

PREDICTION_BATCH = 1024
"""Records scored at once."""


@dataclass(frozen=True)
class Trained:
    """What a training run leaves: weights by name, one history row per epoch, the privacy statement."""

    weights: dict[str, Tensor]
    history: pd.DataFrame
    privacy: dict[str, Any]


def plan_run(
    algorithm: Algorithm, *, units: int, groups: int, privacy: PrivacySettings, training: TrainingSettings
) -> Plan:
    """Fix the run's public facts, solving for the noise where a target ε is given.

    Args:
        algorithm: the combination of parts.
        units: declared number of privacy units in the training part.
        groups: K of the partition used in training.

    Raises:
        EquidpError: where the target cannot be met, or the batch exceeds the data.
    """
    plan = Plan(
        records=units,
        batch_size=training.batch_size,
        epochs=training.epochs,
        groups=groups,
        delta=privacy.delta,
        noise_multiplier=privacy.noise_multiplier or 0.0,
    )
    if not algorithm.private:
        return dataclasses.replace(plan, noise_multiplier=0.0)
    if privacy.epsilon is None:
        return plan
    noise = calibrate(
        lambda sigma: algorithm.events(dataclasses.replace(plan, noise_multiplier=sigma)), privacy.epsilon, plan.delta
    )
    return dataclasses.replace(plan, noise_multiplier=noise)


def units_in(records: Records, privacy: PrivacySettings) -> int:
    """Number of privacy units among the records."""
    return Population(records, records.labels, by_unit=privacy.by_unit).size


def record_loss(weights: tuple[float, ...] | None, device: torch.device) -> Any:
    """Cross-entropy of each record on its own, optionally times its class's weight.

    Never a weighted *mean*: its denominator would couple the records and break the sensitivity.
    """
    if weights is None:
        return nn.CrossEntropyLoss(reduction="none")
    scale = torch.tensor(weights, device=device)
    plain = nn.CrossEntropyLoss(reduction="none")
    return lambda outputs, labels: plain(outputs, labels) * scale[labels]


def make_model(schema: Schema, model: ModelSettings, algorithm: Algorithm | None, seed: int) -> nn.Module:
    """The model an algorithm trains: the dataset's, with what the algorithm imposes on it. Same seed, same start."""
    imposed = dict(algorithm.model_options) if algorithm else {}
    return build_model(model.name, schema, options={**model.options, **imposed}, seed=derived_seed(seed, "model"))


def train_model(
    algorithm: Algorithm,
    plan: Plan,
    split: Split,
    *,
    grouping: str,
    model: ModelSettings,
    privacy: PrivacySettings,
    training: TrainingSettings,
    seed: int,
    on_epoch: EpochCallback | None = None,
    progress: bool = True,
) -> Trained:
    """Train, and state what was spent.

    Args:
        grouping: the partition that group-aware algorithms use.
        on_epoch: called after every epoch with the row so far and the model; returns more columns.
    """
    device = choose_device(training.device)
    train = split.train.to(device)
    network = make_model(train.schema, model, algorithm, seed).to(device)
    ids, names = train.grouping(grouping)
    ledger = Ledger()
    trainer = Trainer(
        model=network,
        loss=record_loss(training.class_weights, device),
        algorithm=algorithm,
        plan=plan,
        population=Population(train, ids, by_unit=privacy.by_unit),
        random=SeededRandom(seed, device),
        ledger=ledger,
        learning_rate=training.rate(plan.steps),
        optimizer=training.optimizer,
        physical_batch_size=training.physical_batch_size,
        precision=training.precision,
        diagnostics=training.diagnostics,
    )
    history = pd.DataFrame(named_columns(row, names) for row in trainer.train(on_epoch, progress=progress))
    if algorithm.private:
        history.insert(1, "epsilon", epsilon_per_epoch(algorithm.events(plan), plan))
    statement = privacy_statement(algorithm, plan, ledger.events, privacy=privacy, training=training, seed=seed)
    weights = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    return Trained(weights, history, statement)


def named_columns(row: Mapping[str, float], names: tuple[str, ...]) -> dict[str, float]:
    """Group numbers in a history row's column names replaced by the groups' names."""

    def name(column: str) -> str:
        head, _, tail = column.rpartition("/")
        return f"{head}/{names[int(tail)]}" if head and tail.isdigit() and int(tail) < len(names) else column

    return {name(column): value for column, value in row.items()}


def epsilon_per_epoch(events: tuple[Event, ...], plan: Plan) -> list[float]:
    """Sound ε after each epoch of a schedule fixed in advance."""
    return [point.value for point in epsilon_path(_by_epoch(events, plan.epoch_lengths()), plan.delta)]


def _by_epoch(events: tuple[Event, ...], lengths: list[int]) -> list[list[Event]]:
    """Cut a run-length list of step events at the ends of the epochs."""
    left = list(events)
    epochs: list[list[Event]] = []
    for length in lengths:
        epoch: list[Event] = []
        while length and left:
            taken = min(length, left[0].count)
            epoch.append(dataclasses.replace(left[0], count=taken))
            rest = left[0].count - taken
            left[:1] = [dataclasses.replace(left[0], count=rest)] if rest else []
            length -= taken
        epochs.append(epoch)
    return epochs


def privacy_statement(
    algorithm: Algorithm,
    plan: Plan,
    ledger: tuple[Event, ...],
    *,
    privacy: PrivacySettings,
    training: TrainingSettings,
    seed: int | None,
) -> dict[str, Any]:
    """privacy.json: what is guaranteed, for whom, at what ε; enough to recompute ε from.

    Raises:
        EquidpError: if the ledger differs from the plan that ε was computed for.
    """
    base = {
        "algorithm": algorithm.name,
        "private": algorithm.private,
        "delta": plan.delta,
        "records": plan.records,
        "expected_batch_size": plan.batch_size,
        "steps": plan.steps,
        "epochs": plan.epochs,
        "groups": plan.groups,
        "seed": seed,
        "secure": privacy.secure,
        "unit": privacy.unit,
        "trials": privacy.trials,
    }
    if not algorithm.private:
        return base | {
            "epsilon": None,
            "epsilon_rdp": None,
            "epsilon_pld": None,
            "epsilon_published": None,
            "ledger": [],
            "notes": ["Non-private baseline: nothing computed from it carries a guarantee."],
        }
    planned = algorithm.events(plan)
    if ledger != planned:
        raise EquidpError(
            "The ledger differs from the plan that ε was computed for; the run is not covered by its ε. "
            "This is a bug: please report it with the settings."
        )
    spent, published = epsilon(ledger, plan.delta), algorithm.published_epsilon(plan)
    assert published is not None
    return base | {
        "epsilon": spent.value,
        "epsilon_rdp": spent.rdp,
        "epsilon_pld": spent.pld,
        "epsilon_published": {"value": published.value, "formula": published.formula},
        "target_epsilon": privacy.epsilon,
        "noise_multiplier": plan.noise_multiplier,
        "adjacency": "add or remove one record"
        if not privacy.by_unit
        else "add or remove one unit with all its records",
        "sampling": f"Poisson: every {privacy.unit} enters a batch independently with probability q",
        "sampling_rate": algorithm.sampler.sampling_rate(plan),
        "ledger": [event.to_dict() for event in ledger],
        "releases": _releases(algorithm),
        "diagnostics_published": ["nonprivate/*"] if training.diagnostics else [],
        "assumptions": [
            f"The number of training {privacy.unit}s ({plan.records}), the batch size, the number of steps, the "
            "schema, the number of groups and all hyper-parameters are public.",
            "Which records are in the training part depends on a public draw, not on other records.",
            "ε holds for this run alone: publishing several runs composes their ledgers.",
        ],
        "notes": [],
    }


def _releases(algorithm: Algorithm) -> list[str]:
    side = algorithm.side_release
    return ["the model after every step"] + ([f"noised {type(side).__name__} of every batch"] if side else [])


@torch.no_grad()
def predict(network: nn.Module, features: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Class probabilities `[n, classes]` on the CPU, scored in batches."""
    where = torch.device(device) if device else next(network.parameters()).device
    was_training = network.training
    network.eval()
    parts = [torch.softmax(network(chunk.to(where)).float(), dim=1).cpu() for chunk in features.split(PREDICTION_BATCH)]
    network.train(was_training)
    return torch.cat(parts)
