"""A training made ready to run: model, population, random streams, ledger, checkpoints and loop."""

from __future__ import annotations

import dataclasses
import logging
import math
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from equidp.accounting.ledger import Ledger
from equidp.data.records import Membership, Records, Split
from equidp.errors import EquidpError
from equidp.gradients.engine import GradientEngine
from equidp.gradients.memory import room_for
from equidp.gradients.recording import CudaGraphs
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.device import choose_device
from equidp.mechanism.noise import RandomSource, SeededRandom, derived_seed
from equidp.mechanism.sampling import Population
from equidp.mechanism.secure import SecureRandom
from equidp.mechanism.trainer import EpochCallback, Trainer
from equidp.parameters import PrivacySettings, TrainingSettings
from equidp.system.installed import CODE_DIGEST, LIBRARIES
from equidp.system.threads import GLOBAL_RANDOM
from equidp.training.checkpoint import Checkpointer, life_of
from equidp.training.digests import code_of_others, fingerprint, initial_state
from equidp.training.journal import block_of
from equidp.training.networks import augmentation, class_weights, loss_of, make_model
from equidp.training.planning import declares_records, groups_of, refuse_test_records
from equidp.training.promises import refuse_broken_promises
from equidp.training.ranks.peers import Peers
from equidp.training.ranks.trainer import ParallelTrainer
from equidp.training.request import TrainingRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A training that is ready to run: the loop, what saves its checkpoints, and what the statement will need."""

    request: TrainingRequest
    trainer: Trainer
    keeper: Checkpointer | None
    group_names: tuple[str, ...]
    public: int
    membership: Membership | None = None

    def run(self, on_epoch: EpochCallback | None, *, progress: bool) -> list[dict[str, float]]:
        """Run it to its end; returns one row per epoch, with those before a resumption."""

        start = self.trainer.engine.flatten() if not self.trainer.steps_done else None

        def named(row: dict[str, float], model: nn.Module) -> Mapping[str, float]:
            if start is not None and row["epoch"] == 1:
                warn_of_unmoved(self.trainer, start)
            return (on_epoch(named_columns(row, self.group_names), model) if on_epoch is not None else None) or {}

        if self.keeper is None:
            return self.trainer.train(named, progress=progress)
        try:
            rows = self.keeper.train(self.trainer, named, progress=progress)
            self.keeper.save(self.trainer)  # kept until the results are written, see `forget`
            return rows
        finally:
            self.keeper.close()


def refuse_unfit(request: TrainingRequest, train: Records) -> None:
    """Refuse, before anything is charged, settings that do not fit, whatever the records are.

    `prepare` would refuse them too. But the data set's ledger would then count a run that never was.

    Raises:
        EquidpError: for a device, loss, weights of classes, augmentation, model or precision that does not fit.
    """
    algorithm, training = request.algorithm, request.training
    device = device_of(training)
    loss = loss_of(training, train, device)
    augmentation(training, train.schema, request.seed)
    network = make_model(train.schema, request.model, algorithm, request.seed).to(device)
    GradientEngine(network, loss, precision=training.precision)


def prepare(request: TrainingRequest, split: Split, peers: Peers | None = None) -> Prepared:
    """Build model, population, streams, ledger and loop; with `peers`, those of one rank among several."""
    request = dataclasses.replace(request, algorithm=request.algorithm.averaged(request.training.average))
    algorithm, plan, privacy, training = request.algorithm, request.plan, request.privacy, request.training
    if peers is None or peers.first:  # again: the plan may not come from `plan_run`, where promises are tried
        refuse_broken_promises(algorithm, algorithm.adapt(plan), tell=False)
    device, seed, schema = device_of(training), request.seed, split.train.schema
    loss = loss_of(training, split.train, device)
    public = _public_part(algorithm, split, privacy, training)
    if peers is None:
        part, own_seed = split.train, seed
        random = random_source(privacy, own_seed, device)
    else:
        part, own_seed = peers.shard(split.train, by_unit=privacy.by_unit), peers.seed(seed)
        random = peers.random(random_source(privacy, own_seed, device))
    train, first = part.to(device), peers is None or peers.first
    views = augmentation(training, schema, secrets.randbits(63) if privacy.secure else seed)
    network = make_model(schema, request.model, algorithm, seed).to(device)
    if first:
        tell_parameters(algorithm.name, network)
    declared = plan.records if declares_records(algorithm, plan) and not privacy.by_unit else None
    resident = bytes_of(split.train, declared) // (1 if peers is None else peers.size)
    at_once, graphs = _fitting(request, network, train, resident)
    added = code_of_others(map(type, (*algorithm.parts, *network.modules())))
    keeper = None
    if request.workplace is not None and first:
        data = {
            "initial_model": initial_state(network),
            "records": fingerprint(split.train, viewed=views is not None),
            "public": fingerprint(public) if algorithm.needs_public or algorithm.acceptance.on_test else None,
            # what the loss depends on besides the settings
            "target": (schema.task, *schema.bounds) if schema.bounds else None,
            "class_weights": class_weights(training, split.train),
        }
        if peers is not None:  # a checkpoint keeps values of each record on its rank; another version may choose others
            data["ranks"] = "by identity"
        # Steps done again are new releases in two cases. Code of others may keep values besides `remembered` and
        # buffers, which are lost in a crash, so sums would differ. And it was not tried on a GPU whether a new
        # recording repeats an old one.
        code = f"{CODE_DIGEST[:16]}{added[:16]}"
        keeper = _keeper(request, request.workplace, data, at_once, code=code, repeating=not (graphs or added))
    try:
        others: list[str] = []
        if peers is not None:
            refuse_other_code(peers, added)
            # rank 0 sends the trained weights and no others: another machine may have another file of frozen weights
            peers.refuse_unlike(
                initial_state(network, trained=False),
                "has another model than rank 0: layers, frozen weights or buffers differ. Give all machines the same "
                "files of weights.",
            )
            others = peers.gather(life_of(random))[1:]
        ledger: Ledger = keeper.ledger(random, others) if keeper else Ledger()
        ids, names = groups_of(algorithm, train, request.grouping)
        population = Population(train, ids, by_unit=privacy.by_unit)
        renewed = keeper.renewed if keeper else 0
        if peers is not None and (renewed := peers.object_from_first(renewed)) and not peers.first:
            random.renew(renewed)
        # For models that draw (dropout): a step done again must draw the same. In a secure run nobody may foretell the
        # draws. And no rank or life may draw what another does: then one record more would shift which masks are alike.
        stream = f"dropout/life {renewed}" if renewed else "dropout"
        with GLOBAL_RANDOM:
            torch.manual_seed(secrets.randbits(63) if privacy.secure else derived_seed(own_seed, stream))
        saved = keeper.saved.state if keeper and keeper.saved else None
        make: Callable[..., Trainer] = Trainer if peers is None else partial(ParallelTrainer.joined, peers, saved)
        trainer = make(
            model=network,
            loss=loss,
            algorithm=algorithm,
            plan=plan,
            population=population,
            random=random,
            ledger=ledger,
            learning_rate=algorithm.learning_rate or training.rate(plan.steps),
            optimizer=training.descent,
            physical_batch_size=at_once,
            precision=training.precision,
            new_recorder=partial(CudaGraphs, device) if graphs else None,
            record_passes=bool(training.cuda_graphs),
            diagnostics=training.diagnostics,
            public=public.to(device) if len(public) else None,
            augmentation=views,
        )
        return Prepared(request, trainer, keeper, names, len(split.public), split.train.membership)
    except BaseException:
        if keeper is not None:  # otherwise its lock would live as long as the error does, which a notebook keeps
            keeper.close()
        raise


def _fitting(request: TrainingRequest, network: nn.Module, train: Records, resident: int) -> tuple[int | None, bool]:
    """Return the most records at once, None for the whole batch, and whether steps are recorded as CUDA graphs.

    Both are what the user sets, or what a GPU's memory allows beside the training data, which take `resident` bytes.
    """
    training, batch_size = request.training, request.plan.batch_size
    views = max(training.augmentations, 1)
    roomy, at_once = room_for(network, train.features, batch_size, views, resident=resident)
    graphs = (roomy and not training.deterministic) if training.cuda_graphs is None else training.cuda_graphs
    if training.physical_batch_size is not None:
        return training.physical_batch_size, graphs
    if at_once is not None and at_once < batch_size:
        logger.info("%s: %d records at once fit into the GPU's memory.", request.algorithm.name, at_once)
    return at_once, graphs


def _keeper(
    request: TrainingRequest,
    workplace: Path,
    data: Mapping[str, object],
    at_once: int | None,
    *,
    code: str,
    repeating: bool,
) -> Checkpointer:
    """Make what keeps a run in its workplace; `data` are digests of what the run begins with, and facts of its loss."""
    algorithm, training = request.algorithm, request.training
    asked = {**request.facts(), **data}
    if not algorithm.private:  # nothing is released, so settings of privacy and what rounds its sums may differ
        asked["privacy"] = {"unit": request.privacy.unit}
    elif at_once != training.physical_batch_size:  # sums over chunks of another size round differently
        asked["physical_batch_size"] = at_once
    budgeted = algorithm.sampler.budget(algorithm.adapt(request.plan)) is not None
    keeper = Checkpointer(
        workplace,
        asked,
        resume=request.resume,
        every_epochs=request.checkpoint_every,
        # with a budget nothing is charged ahead: it has no room for steps that were charged and not taken
        block=1 if budgeted else block_of(request.plan.steps),
        code=code,
        repeating=repeating or not algorithm.private,
    )
    if request.resume and not keeper.found and algorithm.private:
        logger.info("%s: there is nothing to resume; training begins at its beginning.", algorithm.name)
    if keeper.abandoned:
        logger.warning(
            "%s: this run begins anew, in the folder of one that was left behind (resume=true would have gone on). "
            "What that one was charged is in %s and not in this ε; for whoever saw what it had shown, both count.",
            algorithm.name,
            keeper.abandoned,
        )
    return keeper


def bytes_of(train: Records, declared: int | None = None) -> int:
    """Bytes of the training part, by the declared or expected number of records, because the actual one must not show.

    Args:
        train: the training part.
        declared: the number in the place of N where N itself is protected.
    """
    columns = [train.features, train.labels, *train.groups.values(), *train.optional.values()]
    expected = None if train.membership is None else train.membership.expects(by_unit=False)
    return bytes_each(columns) * (declared or expected or len(train))


def bytes_each(columns: Iterable[Tensor]) -> int:
    """Bytes of one record in columns `[N, …]`."""
    return sum(math.prod(column.shape[1:]) * column.element_size() for column in columns)


def _public_part(algorithm: Algorithm, split: Split, privacy: PrivacySettings, training: TrainingSettings) -> Records:
    """The records that an acceptance may look at without noise.

    Raises:
        EquidpError: where these are test records, and the run is to be released or its test records are protected.
    """
    if not algorithm.acceptance.on_test:
        return split.public
    refuse_test_records(algorithm, privacy, training)
    logger.warning(
        "%s: energy=test chooses steps by test records. This run's test figures are no claim about other records, and "
        "nothing protects these from whoever has the model.",
        algorithm.name,
    )
    return split.test


def warn_of_unmoved(trainer: Trainer, start: Tensor) -> None:
    """Warn of trained parameters that have not moved since `start`, `[d]`, if others have: something holds them."""
    engine = trainer.engine
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    pairs = zip(engine.parameters, engine.passes.views(start), strict=True)
    unmoved = [names[parameter] for parameter, before in pairs if torch.equal(parameter.detach(), before)]
    if 0 < len(unmoved) < len(engine.parameters):
        logger.warning(
            "%s: after the first epoch %d of %d trained parameters have not moved: %s. Their gradients may not reach "
            "the optimiser, or they may need none: freeze them, or correct the model.",
            trainer.algorithm.name,
            len(unmoved),
            len(engine.parameters),
            ", ".join(unmoved[:3]) + (", …" if len(unmoved) > 3 else ""),
        )


def tell_parameters(name: str, network: nn.Module) -> None:
    """Log how many of a model's parameters are trained, because each of them gets noise."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in network.parameters()]
    trained, whole = sum(n for n, chosen in sizes if chosen), sum(n for n, _ in sizes)
    logger.info("%s trains %s of the model's %s parameters.", name, f"{trained:,}", f"{whole:,}")


def refuse_other_code(peers: Peers, added: str = "") -> None:
    """Refuse a rank that runs other code, installed on another machine: its bounds may not be those of ε.

    Args:
        added: digest of the packages that add the algorithm or the model.

    Raises:
        EquidpError: on every rank.
    """
    peers.refuse_unlike(
        CODE_DIGEST + added,
        f"runs another version of equidp, of {', '.join(LIBRARIES)}, or of a package that adds the algorithm or the "
        "model, than rank 0: install the same on all machines.",
    )


def device_of(training: TrainingSettings) -> torch.device:
    """Return the device that a training runs on.

    Raises:
        EquidpError: for a device that this machine does not have, or that cannot do what is asked of it.
    """
    if training.devices > 1 and sys.platform == "win32":
        raise EquidpError(
            f"training.devices={training.devices}: several processes do not train together on Windows: leave it out, "
            "or take WSL."
        )
    if training.devices > 1 and ":" in training.device:
        raise EquidpError(
            f"training.devices={training.devices} trains on as many GPUs, and training.device={training.device} names "
            "one: set training.device=cuda, and choose GPUs by CUDA_VISIBLE_DEVICES."
        )
    device = choose_device(training.device)
    if training.cuda_graphs and device.type != "cuda":
        raise EquidpError(
            f"training.cuda_graphs is for CUDA devices, and this run would train on the {device.type}: leave it out, "
            "or set training.device=cuda where there is one."
        )
    return device


def random_source(privacy: PrivacySettings, seed: int, device: torch.device | str = "cpu") -> RandomSource:
    """The random streams of a run: seeded ones, or for a secure run streams without a seed."""
    return SecureRandom(device) if privacy.secure else SeededRandom(seed, device)


def named_columns(row: Mapping[str, float], names: tuple[str, ...]) -> dict[str, float]:
    """A history row with the groups' names in the place of their numbers in column names."""

    def name(column: str) -> str:
        head, _, tail = column.rpartition("/")
        return f"{head}/{names[int(tail)]}" if head and tail.isdigit() and int(tail) < len(names) else column

    return {name(column): value for column, value in row.items()}
