"""Trials of the promises that ε is computed from, before training, because a user's own part may have no tests.

A trial takes a few adversarial records at a few public values. The contract tests go through more of both.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from operator import attrgetter

import torch
from torch import Tensor

from equidp.accounting.plan import Plan, Segment
from equidp.errors import EquidpError, nearest
from equidp.mechanism.algorithm import Algorithm
from equidp.mechanism.float32 import SMALLEST
from equidp.mechanism.parts import (
    Part,
    Public,
    SideRelease,
    StepFacts,
    WeightRule,
    known_sensitivity,
    per_record,
    scheduled,
    sensitivity,
    tensors,
)
from equidp.mechanism.parts.base import listed
from equidp.mechanism.trying import ROUNDING

logger = logging.getLogger(__name__)

LOOSE = 0.4
"""A warning tells if no record that was tried moves more than this share of what is charged. It is well below 1 because
only some norms are tried, and others may move more."""

NORMS = (-20.0, 19.3)
"""Powers of ten between which norms are tried: the longest finite gradients have a norm of 2e19."""

MUTABLE = list | set | bytearray | Tensor
"""Types that a part could write to although it is frozen."""

GROUPS = 4
"""The most groups that are tried, spread over all."""

CROWD = 64
"""Records of the largest batch that is tried."""

BETWEEN = 16
"""The most segments of a schedule that are tried, besides the first and those of extreme noise or clip factor."""


def refuse_broken_promises(algorithm: Algorithm, plan: Plan, *, tell: bool = True) -> None:
    """Try what a schedule, a weight rule and a side release promise.

    Args:
        tell: warn of a bound so large that no record comes near it, if the noise is known.

    Raises:
        EquidpError: for a part with a place where it could keep what it is told; for a schedule with another number of
            steps than the run; for a weight rule that exceeds its `bound`; for a side release whose values have names
            that it did not declare, follow from records that it was told of, or bound nothing; and for one with which
            a record moves more than the step is charged for.
    """
    for part in algorithm.parts:
        if name := _keeps(part):
            raise EquidpError(
                f"{algorithm.name}: {type(part).__name__} has {name!r}, which it can change, and what a part is told "
                "is private: make it a tuple, a frozenset or a number; state belongs in what `start` returns."
            )
    segments = algorithm.schedule.segments(plan)
    if (steps := sum(segment.steps for segment in segments)) != plan.steps:
        raise EquidpError(
            f"{algorithm.name}: the segments of the schedule {type(algorithm.schedule).__name__} come to {steps} steps "
            f"where the run has {plan.steps}; make them add up to plan.steps."
        )
    rule, side, public = algorithm.weights, algorithm.side_release, tensors(algorithm.initial, "cpu")
    if rule is None:
        return
    if "clip_norm" not in rule.reads & public.keys() and any(segment.clip != 1 for segment in segments):
        raise EquidpError(
            f"{algorithm.name}: the schedule {type(algorithm.schedule).__name__} moves clip_norm, and "
            f"{type(rule).__name__} reads none that begins in `initial`: leave `clip` of each Segment out."
        )
    known = plan if plan.noise_multiplier else replace(plan, noise_multiplier=10.0)
    for number, segment in enumerate(_unlike(segments)):
        carried, tell = scheduled(public, segment), tell and number == 0 and plan.noise_multiplier > 0
        if rule.reads <= public.keys():  # if not, the sampler gives values in the first epoch
            _refuse_broken_rule(algorithm, rule, carried, tell=tell)
        if side is not None and rule.reads <= public.keys() | side.gives:
            noise = known.noise_multiplier * segment.noise
            _refuse_broken_side(algorithm, side, rule, carried, known, noise, tell=tell)
    if side is not None and "clip_norm" in side.gives and rule.reads <= public.keys() | side.gives:
        _refuse_unmoved(algorithm, side, public, segments, known)


def _unlike(segments: Sequence[Segment]) -> list[Segment]:
    """Segments that differ in noise or clip factor: the first, those with the least and largest, and some between."""
    taken = [segment for segment in segments if segment.steps]
    ends = [end(taken, key=attrgetter(of)) for of in ("noise", "clip") for end in (min, max)]
    others = list({(segment.noise, segment.clip): segment for segment in taken}.values())
    between = others[:: -(-len(others) // BETWEEN)]
    return list({(segment.noise, segment.clip): segment for segment in (taken[0], *ends, *between)}.values())


def _refuse_unmoved(
    algorithm: Algorithm, side: SideRelease, public: Public, segments: Sequence[Segment], plan: Plan
) -> None:
    """Refuse a schedule that moves clip_norm, if the side release gives a clip_norm that does not follow it."""
    moving = next((segment for segment in segments if segment.clip != 1 and segment.steps), None)
    if moving is None:
        return
    noised, facts = _noised(side, public, plan), _first_step(plan)
    as_it_is, moved = (
        [side.consequences(value.clone(), state, state, facts)[1]["clip_norm"] for value in noised]
        for state in (public, scheduled(public, moving))
    )
    if all(map(torch.equal, as_it_is, moved)):
        raise EquidpError(
            f"{algorithm.name}: the schedule {type(algorithm.schedule).__name__} moves clip_norm, and the side release "
            f"{type(side).__name__} gives one that does not follow it: leave `clip` of each Segment out, or take "
            "another side release."
        )


def _refuse_broken_rule(algorithm: Algorithm, rule: WeightRule, first: Public, *, tell: bool) -> None:
    name = f"the weight rule {type(rule).__name__}"
    broken, most = _broken_bound(rule, first)
    if broken:
        raise EquidpError(f"{algorithm.name}: {name} {broken}. With it ε would not hold: correct it.")
    if tell:
        _tell_of_slack(algorithm, name, "`bound`", most)


def _refuse_broken_side(
    algorithm: Algorithm, side: SideRelease, rule: WeightRule, first: Public, plan: Plan, noise: float, *, tell: bool
) -> None:
    name = f"the side release {type(side).__name__}"
    sizes = {tuple(_of_batch(side, first, plan, size).shape) for size in (0, 1, 2, CROWD)}
    if len(sizes) > 1 or any(len(shape) != 1 for shape in sizes):
        raise EquidpError(
            f"{algorithm.name}: {name} gives statistics of the shapes {', '.join(map(str, sorted(sizes)))}, and must "
            "give [m], with one m for every batch: noise is drawn for each entry of a vector."
        )
    if broken := _broken_names(side, first, plan):
        raise EquidpError(f"{algorithm.name}: {name} {broken}")
    norms, ids = torch.logspace(-9, 9, 19), torch.arange(19) % plan.groups
    _, changed = _asked(
        lambda: side.statistic(norms, ids, first, plan), {"the norms": norms, "the groups": ids, **first}
    )
    if changed:
        raise EquidpError(
            f"{algorithm.name}: {name} changes {changed} in place, by which records are weighed after it: let "
            "`statistic` work on a copy."
        )
    for method, value in (("sensitivity()", side.sensitivity()), ("noise(plan)", side.noise(plan))):
        if not isinstance(value, Real):
            raise EquidpError(
                f"{algorithm.name}: {name} gives a {type(value).__name__} as `{method}`, and must give a number, such "
                "as float(…) of it: what is charged would differ from it in the last digits."
            )
    if kept := _kept(side, rule, first, plan, noise):
        raise EquidpError(
            f"{algorithm.name}: {name} gives other values for {kept} once `statistic` was told of other records, and "
            "what it is told is private: kept, it would be released without noise. Make them of what they are given."
        )
    if broken := _broken_values(side, rule, first, plan, noise):
        raise EquidpError(
            f"{algorithm.name}: {name} {broken}. Noise makes any statistic possible: clamp what `later` and `now` make "
            "of it to above 0."
        )
    broken, most = _broken_joint(side, rule, first, plan, noise)
    if broken:
        raise EquidpError(
            f"{algorithm.name}: {name} lets {broken}. With it ε would not hold: correct its `added`, `sensitivity` or "
            f"`joint_noise`, or `bound` or `reach` of {type(rule).__name__}."
        )
    if tell:
        _tell_of_slack(algorithm, f"{name} with the gradients", "`sensitivity`, `added` or `joint_noise`", most)


def _of_batch(side: SideRelease, public: Public, plan: Plan, size: int) -> Tensor:
    """The statistic of `size` records, with norms from `size` down to 0."""
    return side.statistic(torch.linspace(size, 0, size), torch.arange(size) % plan.groups, public, plan)


def _keeps(part: Part) -> str:
    """Name a place where a part could keep what it is told; empty if there is none.

    Attributes that it sets need no look here: setting one is refused (`Part.__setattr__`).
    """
    for name in type(part).model_fields:
        if isinstance(getattr(part, name), MUTABLE | dict):
            return name
    if type(part).__private_attributes__:
        return next(iter(type(part).__private_attributes__))
    own = type(part).__mro__[: type(part).__mro__.index(Part)]
    every = ((name, value) for kind in own for name, value in vars(kind).items() if not name.startswith("__"))
    return next((name for name, value in every if isinstance(value, MUTABLE)), "")


def _asked(ask: Callable[[], Tensor], given: Mapping[str, Tensor]) -> tuple[Tensor, str]:
    """Return a part's answer, and the name of a given value that it has changed in place; empty if none."""
    before = {name: value.clone() for name, value in given.items()}
    answer = ask()
    return answer, next((name for name, value in given.items() if not torch.equal(value, before[name])), "")


def _broken_bound(rule: WeightRule, public: Public) -> tuple[str, float]:
    """Say what is wrong with a rule's weights, or ""; and the most that a record adds, as a share of the bound."""
    bound, most = float(rule.bound(public)), 0.0
    if not bound > 0:
        return f"has a `bound` of {bound:g}, and must have one above 0", most
    # from the smallest to the largest, and close together around the bound, where most rules change
    around = bound * torch.logspace(-1, 1, 200)
    norms = torch.cat([torch.logspace(*NORMS, 2000), around[around.isfinite()]])
    weights, changed = _asked(lambda: rule.weights(norms, public), {"the norms": norms, **public})
    if changed:
        return f"changes {changed} in place, which others use after it, and may work on a copy alone", most
    if weights.shape != norms.shape:
        return (
            f"gives weights of shape {tuple(weights.shape)} for {len(norms)} records, and must give one for each",
            most,
        )
    if not (weights >= 0).all():
        return "gives weights that are below 0, or no numbers", most
    if float(rule.bound(public)) != bound:
        return "gives another `bound` once `weights` was told of records, and may look at public values alone", most
    few = slice(None, None, 10)
    alone = torch.cat([rule.weights(norm, public) for norm in norms[few].split(1)])
    if not torch.allclose(weights[few], alone, rtol=1e-4, atol=0.0):
        return "weighs a record by the others of its batch, and may look at its own norm and public values alone", most
    added = weights.double() * norms * (weights > SMALLEST)  # smaller weights have few digits in float32
    most = float(added.max()) / bound
    if most > 1 + ROUNDING:
        return f"lets a record add {most * bound:.6g}, more than the {bound:.6g} of its `bound`", most
    return "", most


def _broken_names(side: SideRelease, first: Public, plan: Plan) -> str:
    """Say which value a side release returns undeclared, declares and does not return, or shapes wrongly; or ""."""
    facts = _first_step(plan)
    every = [side.consequences(value, first, first, facts) for value in _noised(side, first, plan)]
    for name, value in ((name, value) for found in every for made in found for name, value in made.items()):
        if not isinstance(value, Tensor):
            return f"makes a {type(value).__name__} of {name!r}, and must make a tensor."
        if name not in side.keeps and tuple(value.shape) not in ((), (plan.groups,)):
            return (
                f"makes {name!r} of shape {tuple(value.shape)}, and must make it of () for all records, or of "
                f"[{plan.groups}], one for each group."
            )
    later, now = (frozenset[str]().union(*found) for found in zip(*every, strict=True))
    for method, found, declared in (("later", later, side.steers | side.keeps), ("now", now, side.gives)):
        if extra := sorted(found - declared):
            near = nearest(extra[0], declared, cutoff=0.4)
            return f"returns {extra[0]!r} in `{method}`, which it does not declare" + (
                f". Did you mean {near!r}?" if near else f": it declares {listed(declared)}."
            )
        if missing := sorted(declared - found):
            return f"declares {missing[0]!r}, and `{method}` does not return it."
    return ""


def _kept(side: SideRelease, rule: WeightRule, first: Public, plan: Plan, noise: float) -> str:
    """Name the values that a side release makes of norms that it was told before, wherever it keeps them; or "".

    A noised value must have the same consequences, and a step the same charge, whatever batch `statistic` was given.
    """
    facts = StepFacts(plan, 0, noise, known_sensitivity(rule, first), 1, plan.sampling_rate)
    noised, answers = _noised(side, first, plan)[1], list[dict[str, Tensor]]()
    for size in (0, 1, 2, CROWD):
        norms, groups = torch.linspace(size, 0, size), torch.arange(size) % plan.groups
        # What follows from a noised value may be drawn at random, so the CPU's generator is seeded. `torch.manual_seed`
        # would seed the GPUs' generators too, from which a secure run in this process may draw dropout.
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(0)
            side.statistic(norms, groups, first, plan)
            torch.random.default_generator.manual_seed(0)
            later, now = side.consequences(noised.clone(), dict(first), dict(first), facts)
        charged = {"sensitivity": side.sensitivity(), "noise": side.noise(plan)}
        charged["joint_noise"] = side.joint_noise(rule, plan, noise)
        numbers = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in charged.items()}  # all digits
        answers.append({name: torch.as_tensor(value).clone() for name, value in (numbers | later | now).items()})
    first_answer, *others = answers
    changed = [name for name, value in first_answer.items() if any(not torch.equal(value, of[name]) for of in others)]
    return listed(changed) if changed else ""


def _broken_values(side: SideRelease, rule: WeightRule, first: Public, plan: Plan, noise: float) -> str:
    """Say which value made of a noised statistic bounds nothing, as it is 0, negative or no number; or ""."""
    norms = torch.logspace(-9, 9, 19)
    for _, value, values in _tried(side, rule, first, plan, noise):
        bounds = rule.bound(values)
        weights = [rule.weights(norms, _read(rule, values, torch.full((19,), group))) for group in _groups(plan)]
        if not ((bounds > 0) & (bounds < math.inf)).all() or not (torch.stack(weights) >= 0).all():
            shown = ", ".join(f"{name} = {values[name].tolist()}" for name in sorted(side.steers | side.gives))
            return (
                f"makes {shown} of the noised statistic {value.tolist()}, by which {type(rule).__name__} bounds nothing"
            )
    return ""


def _broken_joint(side: SideRelease, rule: WeightRule, first: Public, plan: Plan, noise: float) -> tuple[str, float]:
    """Say which record moves statistic and gradients by more than is charged, or ""; and the most that one moves.

    The most is a share of what is charged. A record is put into a batch of others, and what it moves is read off:
    (w·n/(σ·Δ))² + (h/σ_1)².
    """
    charged, most = side.joint_noise(rule, plan, noise), 0.0
    for _, every in itertools.groupby(list(_tried(side, rule, first, plan, noise)), key=lambda one: id(one[0])):
        same = list(every)
        norms, groups, moved = _moved(side, same[0][0], plan)
        for _, _, values in same:
            seen = _read(rule, values, groups)
            weights = rule.weights(norms, seen) * seen["scale"]
            added = weights.double() * norms * (weights > SMALLEST) / (float(sensitivity(rule, values)) * noise)
            joint = (added**2 + (moved / side.noise(plan)) ** 2) * charged**2
            most = max(most, math.sqrt(float(joint.max())))
            if float(joint.max()) > 1 + ROUNDING:
                at = int(joint.argmax())
                return (
                    f"a record of norm {float(norms[at]):.6g} in group {int(groups[at])} move it and the gradients by "
                    f"{most:.6g} times what the step is charged for",
                    most,
                )
    return "", most


def _tell_of_slack(algorithm: Algorithm, what: str, where: str, most: float) -> None:
    """Warn of a bound so large that no record comes near it: ε holds, but there is more noise than it needs."""
    if most < LOOSE:
        logger.warning(
            "%s: no record that was tried moves more than %.2g of what %s is charged for. If none can, there is more "
            "noise than needed: see its %s.",
            algorithm.name,
            most,
            what,
            where,
        )


def _tried(
    side: SideRelease, rule: WeightRule, first: Public, plan: Plan, noise: float
) -> Iterator[tuple[Public, Tensor, Public]]:
    """Carried values, a noised statistic, and the public values of a step that follow from both.

    Values that the side release leads (`steers`) are tried at their start, at a thousandth and at a thousand times of
    it, and after one release of each statistic.
    """
    facts = StepFacts(plan, 0, noise, known_sensitivity(rule, first), 1, plan.sampling_rate)
    led = {name: value for name, value in first.items() if name in side.steers}
    states = [dict(first), *({**first, **{k: v * size for k, v in led.items()}} for size in (1e-3, 1e3))]
    noised = _noised(side, first, plan)
    states += [{**first, **side.consequences(value, first, first, facts)[0]} for value in noised]
    for carried in states:
        for value in noised:
            yield carried, value, {**carried, **side.consequences(value, carried, carried, facts)[1]}


def _read(rule: WeightRule, values: Public, groups: Tensor) -> Public:
    """The values that a rule is given in a run. Others are left out: a side release may keep values of any shape."""
    return per_record({name: values[name] for name in (*rule.reads, "scale")}, groups)


def _first_step(plan: Plan) -> StepFacts:
    """Facts of the first step, for uses in which its noise and bound do not matter."""
    return StepFacts(plan, 0, 1.0, torch.tensor(1.0), 1, plan.sampling_rate)


def _noised(side: SideRelease, first: Public, plan: Plan) -> list[Tensor]:
    """Noised statistics that may occur: zeros, ordinary values, and values with an entry below 0."""
    size = len(side.statistic(torch.zeros(0), torch.zeros(0, dtype=torch.int64), first, plan))
    return [torch.zeros(size), torch.linspace(3, 1, size), torch.linspace(-5, 40, size)]


def _groups(plan: Plan) -> list[int]:
    return sorted({round(k * (plan.groups - 1) / (GROUPS - 1)) for k in range(GROUPS)})


def _norms(side: SideRelease, carried: Public, group: int) -> Tensor:
    """Norms at, just below and just above every value that may decide for a record of that group; and others."""
    shown = [value for name, value in carried.items() if name not in side.keeps]
    sizes = torch.stack([torch.tensor(1.0), *((v[group] if v.dim() else v).float() for v in shown)])
    shares = [piece.upto for piece in side.added() if piece.upto < math.inf]
    edges = torch.cat([sizes, *(sizes * share for share in shares)])
    ends = [torch.nextafter(edges, torch.full_like(edges, end)) for end in (0.0, math.inf)]
    return torch.cat([edges, *ends, torch.logspace(-9, 9, 19)]).unique()


def _moved(side: SideRelease, carried: Public, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """`[n]` norms, groups, and how far each such record moves the statistic.

    Each record is put into a batch of two others. Then some of them are added one by one to a batch that begins empty.
    """
    others, ids = torch.tensor([0.3, 2.0]), torch.tensor([0, plan.groups - 1])
    without, found = side.statistic(others, ids, carried, plan), []
    for group in _groups(plan):
        norms, joined = _norms(side, carried, group), torch.cat([ids, torch.tensor([group])])
        within = [side.statistic(torch.cat([others, norm]), joined, carried, plan) for norm in norms.split(1)]
        found.append((norms, torch.full((len(norms),), group), torch.stack(within) - without))
    norms, groups, _ = (torch.cat(part) for part in zip(*found, strict=True))
    some = torch.randperm(len(norms), generator=torch.Generator().manual_seed(0))[:CROWD]
    crowd, ids = norms[some], groups[some]
    grown = [side.statistic(crowd[:size], ids[:size], carried, plan) for size in range(len(some) + 1)]
    found.append((crowd, ids, torch.stack(grown[1:]) - torch.stack(grown[:-1])))
    norms, groups, shifts = (torch.cat(part) for part in zip(*found, strict=True))
    return norms, groups, shifts.double().norm(dim=1)
