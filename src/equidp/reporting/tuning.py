"""What choosing the best of several private trainings costs: ε of the choice and the chosen model together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import dp_accounting as dp
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant

from equidp.accounting.epsilon import epsilon
from equidp.accounting.events import Event
from equidp.errors import EquidpError, unknown_name

Trials = Literal["fixed", "poisson", "geometric", "logarithmic"]
"""How the number of trials came about."""

_SHAPES: Mapping[str, float] = {"poisson": math.inf, "geometric": 1.0, "logarithmic": 0.0}
"""η of the truncated negative binomial law of the number of trials; the Poisson law is its limit."""


def tuning_epsilon(ledger: Sequence[Mapping], delta: float, trials: float, *, distribution: Trials = "fixed") -> float:
    """ε of the best of several trainings, each with the given ledger, at the same δ.

    Args:
        ledger: events of one training, as in `privacy.json`; they must have been fixed before training.
        delta: δ of the result.
        trials: number of trainings, this one included. For a random number, its mean.
        distribution: how the number of trials was chosen. `fixed`: decided beforehand, or simply counted afterwards;
            the trials are composed, which also covers publishing all of them. `poisson`, `geometric`, `logarithmic`:
            drawn from that law before the first trial, and nothing but the best trial's output is ever shown.

    The random laws use Papernot & Steinke, "Hyperparameter Tuning with Rényi Differential Privacy" (ICLR 2022):
    Theorem 6 for the Poisson law, and Theorem 2 for the truncated negative binomial of shape η, whose case η = 1 is
    the geometric law and η = 0 the logarithmic one. With Q of Rényi curve R(α) and an expected number E[K] of trials,
    Theorem 2 bounds the selected output's curve by

        R(α) + ln E[K]/(α−1) + (1 + η)·min_β [(1 − 1/β)·R(β) + ln(1/γ)/β].

    Both need the score that selects the best to be part of what each trial releases: measured under its guarantee, or
    on records that it does not protect. A fixed number of trials has no better bound than composition in general
    (their Section 3.4), so `fixed` composes.

    Raises:
        EquidpError: for fewer than one trial, a fixed number that is not whole, or an unknown law.
    """
    if not trials >= 1 or not math.isfinite(trials):
        raise EquidpError(f"The number of trials must be at least 1, not {trials}: count the reported run too.")
    events = [Event.from_dict(dict(entry)) for entry in ledger]
    if distribution == "fixed":
        if trials != int(trials):
            raise EquidpError(f"A fixed number of trials must be whole, not {trials}; give the law it was drawn from.")
        return epsilon(events * int(trials), delta).value
    if distribution not in _SHAPES:
        raise unknown_name("law of the number of trials", distribution, ["fixed", *_SHAPES])
    one = dp.ComposedDpEvent([event.as_dp_event() for event in events])
    selected = RepeatAndSelectDpEvent(one, float(trials), _SHAPES[distribution])
    return float(RdpAccountant().compose(selected).get_epsilon(delta))
