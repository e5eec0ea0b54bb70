"""The public facts of a run, fixed before its first step."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from equidp.accounting.plan import Plan
from equidp.accounting.trials import Trials
from equidp.data.products import PRODUCT, factors_of
from equidp.data.records import Membership, Records
from equidp.errors import EquidpError
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.sampling import Population
from equidp.parameters import PrivacySettings, Settings, TrainingSettings
from equidp.tasks import CLASSIFICATION
from equidp.training.promises import refuse_broken_promises


def large_delta(
    algorithm: str, plan: Plan, settings: Settings, membership: Membership | None, *, tuned: bool = False
) -> str:
    """Return a sentence on a δ so large that publishing one record outright would meet it; empty if there is none.

    The δ of the training and of figures are judged. How many records are evaluated is not public if figures of them
    have an ε. N stands for this number, or the number that N and the share held out let one expect, if that is more.

    Args:
        tuned: whether a validation part, held back as well, has an ε of its own.
    """
    privacy, data = settings.privacy, settings.data
    stays = 1 - data.test_fraction
    judged = [("delta", privacy.delta, "training", 1.0)]
    if tuned:
        judged.append(("delta", privacy.delta, "validation", data.test_fraction / stays))
    if privacy.evaluation.epsilon is not None:
        drawn = membership is not None and membership.how == "hash" and not membership.given
        expected = data.test_fraction / stays**2 if tuned else data.test_fraction / stays
        known = drawn or data.evaluate_on == "validation"
        judged.append(("evaluation.delta", privacy.figures_delta, data.evaluate_on, expected if known else 0.0))
    words = "units" if privacy.by_unit else "records"
    for setting, delta, part, each in judged:
        size = max(plan.records, round(each * plan.records))
        if delta >= 1 / size:
            many = f"the {size} training" if size == plan.records else f"about {size} {part}"
            return (
                f"{algorithm}: δ = {delta:g} is not below one over {many} {words}: publishing one of them outright "
                f"would meet it. Set privacy.{setting} to {0.1 / size:.0e} or less."
            )
    return ""


def plan_run(
    algorithm: Algorithm,
    *,
    units: int,
    groups: int,
    privacy: PrivacySettings,
    training: TrainingSettings,
    classes: int = 0,
) -> Plan:
    """Fix the run's public facts; if a target ε is given, solve for the noise.

    Args:
        algorithm: the combination of parts.
        units: declared number of privacy units in the training part.
        groups: K of the partition used in training.
        privacy: the run's settings of privacy.
        training: the run's settings of training.
        classes: how many classes there are, if the partition is of classes within groups.

    Raises:
        EquidpError: if the target cannot be met, if the batch exceeds the data, if an optimiser or average is asked for
            beside the algorithm's own, if a part does not do what it promises, if test records would decide in a run
            that protects them or is released, or if settings are given in place of the algorithm that they build.
    """
    if not isinstance(algorithm, Algorithm):
        raise EquidpError(
            f"{algorithm!r} is no algorithm: build one, such as "
            "algorithm_settings('dpsgd', {'clip_norm': 1.0}).build()."
        )
    algorithm.averaged(training.average).optimizer_beside(training.descent)
    refuse_test_records(algorithm, privacy, training)
    plan = Plan(
        records=units,
        batch_size=training.batch_size,
        epochs=training.epochs,
        groups=groups,
        classes=classes,
        delta=privacy.delta,
        noise_multiplier=(privacy.noise_multiplier or 0.0) if algorithm.private else 0.0,
        trials=privacy.trials if algorithm.private else Trials(),
    )
    adapted = algorithm.adapt(plan)
    refuse_broken_promises(algorithm, adapted)
    if not algorithm.private or privacy.epsilon is None:
        return adapted
    try:
        solved = algorithm.calibrated(plan, privacy.epsilon, published=privacy.epsilon_as == "published")
    except EquidpError as error:
        if error.message.startswith(f"{algorithm.name}:"):
            raise
        # a command may train several algorithms: say which one it is
        raise EquidpError(f"{algorithm.name}: {error.message}") from error
    refuse_broken_promises(algorithm, solved)  # again, at the noise that was found
    return solved


def declares_records(algorithm: Algorithm, plan: Plan) -> bool:
    """Whether the number of units is a setting of the algorithm: then their true number is protected."""
    return algorithm.adapt(replace(plan, records=plan.records + 1)).records == plan.records


def plan_of(algorithm: str, train: Records, settings: Settings) -> Plan:
    """The plan of a training by the settings of a run. Raises EquidpError as `plan_run`."""
    chosen, privacy = settings.algorithm(algorithm), settings.privacy
    groups = len(groups_of(chosen, train, settings.data.groups[0])[1])
    return plan_run(
        chosen,
        units=units_in(train, privacy),
        groups=groups,
        classes=classes_of(chosen, train),
        privacy=privacy,
        training=settings.training,
    )


def refuse_test_records(algorithm: Algorithm, privacy: PrivacySettings, training: TrainingSettings) -> None:
    """Refuse an acceptance that looks at test records, before anything is charged, where it must not.

    Raises:
        EquidpError: if test records are protected, if the model is to be released, or on several devices, which have no
            test records.
    """
    if not algorithm.acceptance.on_test:
        return
    if privacy.secure or privacy.evaluation.epsilon is not None or training.devices != 1:
        raise EquidpError(
            f"{algorithm.name}: energy=test chooses steps by test records, to reproduce a printed figure: not in a "
            "secure run, not beside privacy.evaluation.epsilon, not on several devices. Take energy=public or private."
        )


def refuse_without_classes(algorithm: Algorithm, task: str) -> None:
    """Refuse an algorithm that changes the scores of classes, if the task is not classification."""
    if algorithm.objective.by_class and task != CLASSIFICATION:
        raise EquidpError(
            f"{algorithm.name} allows for how rare each class is, and is for classification, not for the task {task}: "
            "choose another algorithm, such as dpsgd or dpsgd_f_smooth."
        )


def partition(algorithm: Algorithm, grouping: str) -> str:
    """The grouping that the algorithm is told: usually `grouping`.

    An algorithm that changes the scores of classes is told the classes. If it can also tell the other factors of a
    product with the classes apart (`crossed`), it is told the classes within these.
    """
    if not algorithm.objective.by_class:
        return grouping
    factors = factors_of(grouping)
    if not algorithm.objective.crossed or "class" not in factors:
        return "class"
    return PRODUCT.join([*(factor for factor in factors if factor != "class"), "class"])


def groups_of(algorithm: Algorithm, records: Records, grouping: str) -> tuple[Tensor, tuple[str, ...]]:
    """Group ids `[N]` and names of the algorithm's `partition`.

    Raises:
        EquidpError: if it needs classes, and there are none.
    """
    refuse_without_classes(algorithm, records.schema.task)
    return records.grouping(partition(algorithm, grouping))


def classes_of(algorithm: Algorithm, records: Records) -> int:
    """How many classes the plan must tell the algorithm; 0 if the algorithm need not know."""
    return len(records.schema.classes) if algorithm.objective.crossed else 0


def units_in(train: Records, privacy: PrivacySettings) -> int:
    """N, the declared number of privacy units in the training part.

    If each record's own hash says whether it trains, N is the expected number, because rates, steps and noise must not
    tell how many there are. Otherwise it is the actual number, which is taken as public.
    """
    there = Population(train, train.class_ids, by_unit=privacy.by_unit).size
    planned = None if train.membership is None else train.membership.expects(by_unit=privacy.by_unit)
    return there if planned is None else planned
