"""Train one model: from a split and settings to weights, history and a privacy statement. No Kedro, no MLflow.

plan = plan_run(algorithm, units=len(split.train), groups=K, privacy=…, training=…)
trained = train_model(algorithm, plan, split, grouping=…, model=…, privacy=…, training=…, seed=0)
scores = predict(network, split.test.features)      # a `build_model` that has loaded trained.weights
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

import equidp
from equidp.algorithms import algorithm_settings
from equidp.distributed.peers import Peers
from equidp.distributed.trainer import ParallelTrainer
from equidp.engine.algorithm import Algorithm, Outcome
from equidp.engine.checkpoint import CHECKPOINT_FILE, JOURNAL_FILE, Checkpointer, life_of
from equidp.engine.journal import BLOCK, unless_in_use
from equidp.engine.ledger import Epsilon, Event, Ledger, counted, epsilon, merged
from equidp.engine.losses import CrossEntropy
from equidp.engine.noise import RandomSource, SeededRandom, derived_seed
from equidp.engine.parts import Public, WeightRule, scheduled, tensors
from equidp.engine.plan import Plan
from equidp.engine.recording import CudaGraphs
from equidp.engine.sampling import Population
from equidp.engine.secure import SecureRandom
from equidp.engine.trainer import SMALLEST, EpochCallback, Trainer, choose_device
from equidp.errors import EquidpError
from equidp.models import build_model, weights_of
from equidp.models.features import is_raw_image
from equidp.parameters import ModelSettings, PrivacySettings, TrainingSettings
from equidp.records import Records, Schema, Split
from equidp.threads import GLOBAL_RANDOM

logger = logging.getLogger(__name__)

PREDICTION_BATCH = 1024
"""Records scored at once."""

ROUNDING = 1e-5
"""How far rounding in float32 may carry a weighted norm beyond its bound."""

CODE = ("parameters.py", "records.py", "training.py", "distributed", "engine", "models", "algorithms")
"""What a trained model depends on, within the package."""

LIBRARIES = ("kymatio", "llvmlite", "numpy", "opacus", "scipy", "torchvision")
"""And beside it and torch: a model's forward pass may be theirs, llvmlite compiles sums, and DPIS chooses its noise by
Opacus's divergences.

A step done again with a noise that differs in its last digits would betray the sum, as both bear the same Gaussian.
"""


def _code_digest() -> str:
    root = Path(equidp.__file__).parent
    files = sorted(
        file for part in CODE for file in ([root / part] if part.endswith(".py") else (root / part).rglob("*.py"))
    )
    versions = " ".join(map(_version, LIBRARIES))
    return hashlib.sha256(b"".join([*(file.read_bytes() for file in files), versions.encode()])).hexdigest()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:  # llvmlite is not asked for everywhere
        return "none"


CODE_DIGEST = _code_digest()
"""Of the code that training runs: taken as it is imported, since files may be edited while a run trains."""


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
        EquidpError: where the target cannot be met, the batch exceeds the data, a part does not do what it promises, or
            settings are given in place of the algorithm they build.
    """
    if not isinstance(algorithm, Algorithm):
        raise EquidpError(
            f"{algorithm!r} is no algorithm: build one, such as "
            "algorithm_settings('dpsgd', {'clip_norm': 1.0}).build()."
        )
    plan = Plan(
        records=units,
        batch_size=training.batch_size,
        epochs=training.epochs,
        groups=groups,
        delta=privacy.delta,
        noise_multiplier=(privacy.noise_multiplier or 0.0) if algorithm.private else 0.0,
    )
    adapted = algorithm.adapt(plan)
    _refuse_broken_promises(algorithm, adapted)
    if algorithm.private and privacy.epsilon is not None:
        return algorithm.calibrated(plan, privacy.epsilon, published=privacy.epsilon_as == "published")
    return adapted


def _refuse_broken_promises(algorithm: Algorithm, plan: Plan) -> None:
    """What ε is computed from, tried out: a part of one's own must not train before its tests are written.

    Some norms, at the values of the first step; the contract tests go through more of both.
    """
    segments = algorithm.schedule.segments(plan)
    if (steps := sum(segment.steps for segment in segments)) != plan.steps:
        raise EquidpError(
            f"{algorithm.name}: the segments of the schedule {type(algorithm.schedule).__name__} come to {steps} steps "
            f"where the run has {plan.steps}; make them add up to plan.steps."
        )
    rule, public = algorithm.weights, tensors(algorithm.initial, "cpu")
    if rule is None or not rule.reads <= public.keys():  # the sampler's values come with the first epoch
        return
    if broken := _broken_promise(rule, scheduled(public, segments[0])):
        raise EquidpError(
            f"{algorithm.name}: the weight rule {type(rule).__name__} {broken}. With it ε would not hold: mend it."
        )


def _broken_promise(rule: WeightRule, public: Public) -> str:
    """What is wrong with a rule's weights; empty where nothing is found."""
    norms = torch.logspace(-9, 9, 55)
    weights = rule.weights(norms, public)
    if weights.shape != norms.shape:
        return f"gives weights of shape {tuple(weights.shape)} for {len(norms)} records, and must give one for each"
    if not (weights >= 0).all():
        return "gives weights that are below 0, or no numbers"
    alone = torch.cat([rule.weights(norm, public) for norm in norms.split(1)])
    if not torch.allclose(weights, alone, rtol=1e-4, atol=0.0):
        return "weighs a record by the others of its batch, and may look at its own norm and public values alone"
    added = weights.double() * norms * (weights > SMALLEST)  # below, float32 has few digits left
    if float(added.max()) > float(rule.bound(public)) * (1 + ROUNDING):
        return f"lets a record add {added.max():.6g}, more than the {float(rule.bound(public)):.6g} of its `bound`"
    return ""


def groups_of(algorithm: Algorithm, records: Records, grouping: str) -> tuple[Tensor, tuple[str, ...]]:
    """Group ids `[N]` and names of the partition that the algorithm is told.

    Raises:
        EquidpError: where it needs the classes, and the grouping is another.
    """
    ids, names = records.grouping(grouping)
    if algorithm.objective.by_class and names != records.schema.classes:
        raise EquidpError(
            f"{algorithm.name} allows for how rare each class is, so its groups have to be the classes, not "
            f"{grouping!r}: put class first in data.groups."
        )
    return ids, names


def units_in(records: Records, privacy: PrivacySettings) -> int:
    """Number of privacy units among the records."""
    return Population(records, records.labels, by_unit=privacy.by_unit).size


def record_loss(weights: tuple[float, ...] | None, classes: Sequence[str], device: torch.device) -> Any:
    """Cross-entropy of each record on its own, optionally times its class's weight.

    Never a weighted *mean*: its denominator would couple the records and break the sensitivity.

    Raises:
        EquidpError: there is not one weight for each class.
    """
    if weights is None:
        return CrossEntropy()
    if len(weights) != len(classes):
        raise EquidpError(
            f"training.class_weights has {len(weights)} numbers; give one for each of the {len(classes)} classes, in "
            f"this order: {', '.join(classes)}."
        )
    scale = torch.tensor(weights, device=device)
    plain = CrossEntropy()
    return lambda outputs, labels: plain(outputs, labels) * scale[labels]


def imposed(model: ModelSettings, algorithm: Algorithm, schema: Schema) -> ModelSettings:
    """The run's model, with what the algorithm imposes on it: options, or another head for features of its own."""
    if algorithm.model and schema.kind == "image" and not is_raw_image(schema):
        model = ModelSettings(name=algorithm.model)
    return model.model_copy(update={"options": {**model.options, **algorithm.model_options}})


def make_model(schema: Schema, model: ModelSettings, algorithm: Algorithm, seed: int) -> nn.Module:
    """The model an algorithm trains. Algorithms of one seed that train the same model start from the same weights."""
    chosen = imposed(model, algorithm, schema)
    return build_model(chosen.name, schema, options=chosen.options, seed=derived_seed(seed, "model"))


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
    options: Mapping[str, Any] | None = None,
    on_epoch: EpochCallback | None = None,
    workplace: Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Trained:
    """Train, and state what was spent.

    Args:
        grouping: the partition that group-aware algorithms use.
        options: of the algorithm, where they are not its defaults; several processes build it again from them.
        on_epoch: called after every epoch with the row so far and the model; returns more columns.
        workplace: folder of this run alone, for checkpoints and the ledger's journal, which stay until `forget`; None
            keeps nothing.
        resume: continue what an interrupted run left in `workplace`.

    Raises:
        EquidpError: for settings that do not fit the data, or a checkpoint of other settings.
    """
    if resume and workplace is None:
        raise EquidpError(
            "resume=True needs the workplace of the interrupted run: without one this would be a new training, which "
            "costs its ε once more."
        )
    if training.devices == 1:
        prepared = prepare(
            algorithm,
            plan,
            split,
            grouping=grouping,
            model=model,
            privacy=privacy,
            training=training,
            seed=seed,
            workplace=workplace,
            resume=resume,
        )
        return conclude(prepared, prepared.run(on_epoch, progress=progress))
    job = {
        "algorithm": algorithm.name,
        "options": dict(options or {}),
        "plan": dataclasses.asdict(plan),
        "grouping": grouping,
        "model": model.model_dump(mode="json"),
        "privacy": privacy.model_dump(mode="json"),
        "training": training.model_dump(mode="json"),
        "seed": seed,
        "workplace": str(workplace.resolve()) if workplace is not None else None,
        "resume": resume,
        "progress": progress,
    }
    return _train_on_ranks(algorithm, job, split, model, training, seed, on_epoch)


def _train_on_ranks(
    algorithm: Algorithm,
    job: Mapping[str, Any],
    split: Split,
    model: ModelSettings,
    training: TrainingSettings,
    seed: int,
    on_epoch: EpochCallback | None,
) -> Trained:
    """Hand the training to several processes; evaluate here."""
    device = device_of(training)
    from equidp.distributed.launch import train  # which starts processes that import this module

    again = settings_of(job)["algorithm"]
    if _told_of(again) != _told_of(algorithm):
        raise EquidpError(
            f"training.devices={training.devices} needs the options that {algorithm.name} was built from."
        )
    network = make_model(split.train.schema, model, algorithm, seed).to(device)

    def evaluate(row: dict[str, float], weights: dict[str, Tensor]) -> Mapping[str, float]:
        network.load_state_dict(weights)
        return on_epoch(row, network) if on_epoch is not None else {}

    results = train(job, split, training.devices, evaluate if on_epoch is not None else None)
    return Trained(*results)


def settings_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """What `prepare` takes, from plain values."""
    return {
        "algorithm": algorithm_settings(job["algorithm"], job["options"]).build(),
        "plan": Plan(**job["plan"]),
        "grouping": job["grouping"],
        "model": ModelSettings(**job["model"]),
        "privacy": PrivacySettings(**job["privacy"]),
        "training": TrainingSettings(**job["training"]),
        "seed": job["seed"],
    }


@dataclass(frozen=True)
class Prepared:
    """A training that is ready to run: the loop, its keeper, and what the statement will need."""

    trainer: Trainer
    keeper: Checkpointer | None
    group_names: tuple[str, ...]
    privacy: PrivacySettings
    training: TrainingSettings
    seed: int
    public: int

    def run(self, on_epoch: EpochCallback | None, *, progress: bool) -> list[dict[str, float]]:
        """Run it to its end; one row per epoch, those before a resumption included."""

        def named(row: dict[str, float], model: nn.Module) -> Mapping[str, float]:
            return on_epoch(named_columns(row, self.group_names), model) if on_epoch is not None else {}

        if self.keeper is None:
            return self.trainer.train(named, progress=progress)
        try:
            rows = self.keeper.train(self.trainer, named, progress=progress)
            self.keeper.save(self.trainer)  # kept until the results are written, see `forget`
            return rows
        finally:
            self.keeper.close()


def prepare(
    algorithm: Algorithm,
    plan: Plan,
    split: Split,
    *,
    grouping: str,
    model: ModelSettings,
    privacy: PrivacySettings,
    training: TrainingSettings,
    seed: int,
    workplace: Path | None = None,
    resume: bool = False,
    peers: Peers | None = None,
) -> Prepared:
    """Build model, population, streams, ledger and loop. With `peers`, those of one rank among several."""
    device = device_of(training)
    loss = record_loss(training.class_weights, split.train.schema.classes, device)
    train = (split.train if peers is None else peers.shard(split.train, by_unit=privacy.by_unit)).to(device)
    own_seed = seed if peers is None else peers.seed(seed)
    random = _random(privacy, own_seed, device, peers)
    network = make_model(train.schema, model, algorithm, seed).to(device)
    keeper = None
    if workplace is not None and algorithm.private and (peers is None or peers.first):
        asked = _asked(algorithm, plan, grouping, model, privacy, training, seed) | {
            "initial_model": initial_state(network),
            "records": fingerprint(split.train),
            "public": fingerprint(split.public) if algorithm.needs_public else None,
        }
        budgeted = algorithm.sampler.budget(algorithm.adapt(plan)) is not None
        keeper = Checkpointer(
            workplace,
            asked,
            resume=resume,
            every_epochs=training.checkpoint_every,
            block=1 if budgeted else BLOCK,  # a budget has no room for steps that were charged and not taken
            code=CODE_DIGEST[:16],
            repeating=not training.cuda_graphs,  # a resumed run makes other recordings, of other sizes
        )
        if resume and not keeper.found:
            logger.info("%s: there is nothing to resume; training begins at its beginning.", algorithm.name)
        if keeper.abandoned:
            logger.warning(
                "%s: this run begins anew, in the folder of one that was left behind (resume=true would have gone on). "
                "What that one was charged is in %s and not in this ε; for whoever saw what it had shown, both count.",
                algorithm.name,
                keeper.abandoned,
            )
    try:
        others = [] if peers is None else _others_of(peers, random)
        ledger: Ledger = keeper.ledger(random, others) if keeper else Ledger()
        ids, names = groups_of(algorithm, train, grouping)
        arguments: dict[str, Any] = {
            "model": network,
            "loss": loss,
            "algorithm": algorithm,
            "plan": plan,
            "population": Population(train, ids, by_unit=privacy.by_unit),
            "random": random,
            "ledger": ledger,
            "learning_rate": algorithm.learning_rate or training.rate(plan.steps),
            "optimizer": training.optimizer,
            "physical_batch_size": training.physical_batch_size,
            "precision": training.precision,
            "new_recorder": partial(CudaGraphs, device) if training.cuda_graphs and algorithm.private else None,
            "diagnostics": training.diagnostics,
            "public": split.public.to(device) if len(split.public) else None,
        }
        renewed = keeper.renewed if keeper else 0
        if peers is not None and (renewed := peers.object_from_first(renewed)) and not peers.first:
            random.renew(renewed)
        # of models that draw (dropout): a step done again must repeat, in a secure run nobody may foretell it, and no
        # rank or life may draw what another does: a record would shift whose masks are alike
        stream = f"dropout/life {renewed}" if renewed else "dropout"
        with GLOBAL_RANDOM:
            torch.manual_seed(secrets.randbits(63) if privacy.secure else derived_seed(own_seed, stream))
        saved = keeper.saved.state if keeper and keeper.saved else None
        trainer = Trainer(**arguments) if peers is None else ParallelTrainer.joined(peers, saved, **arguments)
        return Prepared(trainer, keeper, names, privacy, training, seed, len(split.public))
    except BaseException:
        if keeper is not None:  # or its lock would live as long as the error does, which a notebook keeps
            keeper.close()
        raise


def _others_of(peers: Peers, random: RandomSource) -> list[str]:
    """`life_of` of the other ranks, on rank 0.

    Raises:
        EquidpError: where one runs other code, installed on another machine: its bounds may not be those that ε is of.
    """
    seen = peers.gather((life_of(random), CODE_DIGEST))
    for rank, (_, code) in enumerate(seen):
        if code != CODE_DIGEST:
            raise EquidpError(
                f"Rank {rank} runs another version of equidp, or of {', '.join(LIBRARIES)}, than rank 0: install the "
                "same on all machines."
            )
    return [life for life, _ in seen[1:]]


def device_of(training: TrainingSettings) -> torch.device:
    """Where a training runs.

    Raises:
        EquidpError: for a device that is not here, or that cannot do what is asked of it.
    """
    if training.devices > 1 and sys.platform == "win32":
        raise EquidpError(
            f"training.devices={training.devices}: several processes do not train together on Windows: leave it out, "
            "or take WSL."
        )
    device = choose_device(training.device)
    if training.cuda_graphs and device.type != "cuda":
        raise EquidpError(
            f"training.cuda_graphs is for CUDA devices, and this run would train on the {device.type}: leave it out, "
            "or set training.device=cuda where there is one."
        )
    return device


def fingerprint(records: Records) -> str:
    """sha256 of features, labels, groups and units: a checkpoint of other records is refused."""
    digest = hashlib.sha256()
    units = () if records.unit is None else (records.unit,)
    for column in (records.features, records.labels, *records.groups.values(), *units):
        digest.update(column.contiguous().cpu().numpy().data)
    return digest.hexdigest()


def initial_state(network: nn.Module) -> str:
    """sha256 of layers, initial weights and buffers: a file of weights is a setting by its content."""
    digest = hashlib.sha256(str(network).encode())
    for name, value in (*network.named_parameters(), *network.named_buffers()):  # the standardisation's constants too
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} {value.requires_grad}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _random(privacy: PrivacySettings, seed: int, device: torch.device, peers: Peers | None) -> RandomSource:
    own: RandomSource = SecureRandom(device) if privacy.secure else SeededRandom(seed, device)
    return own if peers is None else peers.random(own)


def _asked(
    algorithm: Algorithm,
    plan: Plan,
    grouping: str,
    model: ModelSettings,
    privacy: PrivacySettings,
    training: TrainingSettings,
    seed: int,
) -> dict[str, Any]:
    """Everything a checkpoint must agree with.

    Whatever changes a release belongs here: steps done again take the noise they took, so that the difference of two
    releases under two settings would be exact.
    """
    return {
        "algorithm": _told_of(algorithm),
        "plan": dataclasses.asdict(plan),
        "model": model.model_dump(mode="json"),
        "privacy": privacy.model_dump(mode="json"),
        "training": training.model_dump(mode="json"),
        "grouping": grouping,
        "seed": seed,
    }


def _told_of(algorithm: Algorithm) -> dict[str, Any]:
    """Everything about an algorithm by which two of one name may differ."""
    return {
        "name": algorithm.name,
        "parts": [repr(part) for part in algorithm.parts],
        "initial": dict(algorithm.initial),  # clip norms: no part's field
        "model": algorithm.model,
        "model_options": dict(algorithm.model_options),
        "learning_rate": algorithm.learning_rate,
    }


def conclude(prepared: Prepared, rows: Sequence[Mapping[str, float]]) -> Trained:
    """Weights, history and statement of a finished training."""
    trainer, algorithm = prepared.trainer, prepared.trainer.algorithm
    if trainer.sampling.exhausted and trainer.steps_done < trainer.plan.steps:
        logger.warning(
            "%s: the privacy budget was spent after step %d of %d, and training ended there. Steps that an interrupted "
            "run had shown are paid for, whether or not it had saved them.",
            algorithm.name,
            trainer.steps_done,
            trainer.plan.steps,
        )
    history = pd.DataFrame(named_columns(row, prepared.group_names) for row in rows)
    statement = privacy_statement(
        algorithm,
        trainer.plan,
        trainer.outcome(),
        privacy=prepared.privacy,
        training=prepared.training,
        seed=prepared.seed,
        public=prepared.public,
    )
    if algorithm.private:
        history.insert(1, "epsilon", _epsilon_path(trainer, statement, history))
        history["epsilon_rdp"] = _ending_in(statement["epsilon_rdp"], history["epsilon_rdp"])
    return Trained(weights_of(trainer.model), history, statement)


def _epsilon_path(trainer: Trainer, statement: Mapping[str, Any], history: pd.DataFrame) -> Sequence[float]:
    """ε after every epoch: the plan's, or what the ledger held then where a crash made it charge more.

    It ends in the statement's, also where the run has stopped early: that it stopped there is an output too.
    """
    if trainer.algorithm.covers(trainer.plan, trainer.outcome().events, trainer.steps_done):
        return [*trainer.algorithm.epsilon_path(trainer.plan)[: len(history) - 1], statement["epsilon"]]
    return _ending_in(statement["epsilon"], history["epsilon_rdp"])


def _ending_in(stated: float, live: pd.Series) -> list[float]:
    """The live figures, which integer orders bound alone, with the statement's at the end and none above it."""
    return [min(value, stated) for value in live[:-1]] + [stated]


def forget(workplace: Path) -> None:
    """Remove what a run kept to be resumed by: its results are written. It is as sensitive as the training data.

    Unless another run has begun there since this one trained: the charges in the journal are then that one's.
    """
    checkpoint, journal = workplace / CHECKPOINT_FILE, workplace / JOURNAL_FILE
    windows = sys.platform == "win32"  # it removes no open file, and so none of a run that has begun since
    with unless_in_use(journal) as free:
        if free:
            checkpoint.unlink(missing_ok=True)
            if not windows:
                journal.unlink(missing_ok=True)
    if free and windows:
        with suppress(PermissionError):
            journal.unlink(missing_ok=True)


def named_columns(row: Mapping[str, float], names: tuple[str, ...]) -> dict[str, float]:
    """Group numbers in a history row's column names replaced by the groups' names."""

    def name(column: str) -> str:
        head, _, tail = column.rpartition("/")
        return f"{head}/{names[int(tail)]}" if head and tail.isdigit() and int(tail) < len(names) else column

    return {name(column): value for column, value in row.items()}


def privacy_statement(
    algorithm: Algorithm,
    plan: Plan,
    outcome: Outcome,
    *,
    privacy: PrivacySettings,
    training: TrainingSettings,
    seed: int,
    public: int = 0,
) -> dict[str, Any]:
    """privacy.json: what is guaranteed, for whom, at what ε; enough to recompute ε from.

    Raises:
        EquidpError: if the ledger holds less, or other things, than the plan that ε was computed for.
    """
    plan = algorithm.adapt(plan)
    base = {
        "algorithm": algorithm.name,
        "private": algorithm.private,
        "delta": plan.delta,
        "records": plan.records,
        "expected_batch_size": plan.batch_size,
        "steps": plan.steps,
        "epochs": plan.epochs,
        "groups": plan.groups,
        "seed": None if privacy.secure else seed,
        "secure": privacy.secure and algorithm.private,
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
    spent, published = _spent(algorithm, plan, outcome), algorithm.published_epsilon(plan, outcome)
    assert published is not None
    declared = _declares_records(algorithm, plan)
    size = f"The number of training {privacy.unit}s ({plan.records})"
    if declared:
        size = f"The declared number of {privacy.unit}s ({plan.records}; how many there are is protected, too)"
    return base | {
        "records_declared": declared,
        "epsilon": spent.value,
        "epsilon_rdp": spent.rdp,
        "epsilon_pld": spent.pld if math.isfinite(spent.pld or 0.0) else None,  # a tiny δ is below its grid
        "epsilon_published": dataclasses.asdict(published),
        "epsilon_fixed_before_training": algorithm.fixed,
        "target_epsilon": privacy.epsilon,
        "target_epsilon_as": privacy.epsilon_as if privacy.epsilon is not None else None,
        "noise_multiplier": plan.noise_multiplier,
        "adjacency": f"add or remove one {privacy.unit}" + (" with all its records" if privacy.by_unit else ""),
        "sampling": algorithm.sampler.told(privacy.unit),
        "sampling_rate": algorithm.sampler.sampling_rate(plan),
        "ledger": [event.to_dict() for event in outcome.events],
        **_spent_otherwise(algorithm, plan, outcome),
        "accepted_steps": outcome.accepted_steps,
        "releases": ["The model after every step.", *(part.released for part in algorithm.parts if part.released)],
        "public_records": public if algorithm.needs_public else 0,  # else unused: their number would only tell N
        "diagnostics_published": ["nonprivate/*"] if training.diagnostics else [],
        "assumptions": [
            f"{size}, the batch size, the number of steps, the schema, the number of groups and all hyper-parameters "
            "are public.",
            "What the model starts from is public and was not computed from these records: initial weights, and "
            "pretrained weights, word vectors or feature maps read from files.",
            f"The split is taken as given: ε compares training parts that differ in one {privacy.unit}.",
            "ε holds for this run alone: publishing several runs composes their ledgers."
            + ("" if privacy.secure else " Runs of one seed share batches and noise, and do not even compose."),
        ],
        "notes": [],
    }


def _declares_records(algorithm: Algorithm, plan: Plan) -> bool:
    """Whether N is a setting, the same for any data."""
    return algorithm.adapt(dataclasses.replace(plan, records=plan.records + 1)).records == plan.records


def _spent_otherwise(algorithm: Algorithm, plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """What ε is of, where it is not the ledger's: a Rényi budget, or the cap of a run that might have gone on."""
    if budget := algorithm.sampler.budget(plan):
        return {"filter_order": budget.order, "filter_total": budget.total}
    if algorithm.fixed:
        return {}
    return {"capped_ledger": [event.to_dict() for event in _capped(algorithm, plan, outcome)]}


def _capped(algorithm: Algorithm, plan: Plan, outcome: Outcome) -> tuple[Event, ...]:
    """The most that a run which may stop early can have charged, whenever it stopped.

    The last life may have taken as many candidates as the cap allows; earlier lives took at most what is charged.
    """
    alone = algorithm.covers(plan, outcome.events, outcome.steps)
    return algorithm.events(plan) if alone else merged((*algorithm.events(plan), *outcome.events))


def _spent(algorithm: Algorithm, plan: Plan, outcome: Outcome) -> Epsilon:
    """ε of a finished run: that of its plan, cap or budget; of its ledger, where a crash made it charge more."""
    if algorithm.covers(plan, outcome.events, outcome.steps):
        return algorithm.epsilon(plan)
    planned, charged = counted(algorithm.events(plan)), counted(outcome.events)
    if algorithm.fixed and planned <= charged and planned.keys() == charged.keys():
        return epsilon(outcome.events, plan.delta)  # repeated steps of a resumed run, each charged again
    if algorithm.acceptance.may_stop and charged.keys() <= planned.keys():
        return epsilon(_capped(algorithm, plan, outcome), plan.delta)
    raise EquidpError(
        "The ledger differs from the plan that ε was computed for; the run is not covered by its ε. "
        "This is a bug: please report it with the settings."
    )


@torch.no_grad()
def predict(network: nn.Module, features: Tensor) -> Tensor:
    """Class probabilities `[n, classes]` on the CPU, scored in batches."""
    where = next(network.parameters()).device
    was_training = network.training
    network.eval()
    parts = [torch.softmax(network(chunk.to(where)).float(), dim=1).cpu() for chunk in features.split(PREDICTION_BATCH)]
    network.train(was_training)
    return torch.cat(parts)
