"""The contract: what every registered algorithm must show.

An algorithm enters by being registered; one without golden values fails here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from torch import Tensor, nn

from equidp.accounting.events import Event, counted, fuse
from equidp.accounting.ledger import Ledger
from equidp.accounting.plan import segment_at
from equidp.algorithms import ALGORITHMS, algorithm_settings
from equidp.algorithms.custom import OWN_PARTS
from equidp.algorithms.dpsgd_f import GroupClipCounts
from equidp.algorithms.dpsgd_f_slack import SlackClipCounts
from equidp.algorithms.dpsgd_quantile import QuantileCount
from equidp.algorithms.naive import GroupSizeCounts
from equidp.algorithms.slaclip import Slack
from equidp.errors import EquidpError
from equidp.mechanism.parts import (
    Added,
    FlatClip,
    Public,
    Released,
    Update,
    Updating,
    per_record,
    scheduled,
    sensitivity,
    tensors,
)
from equidp.mechanism.sampling import Population
from equidp.mechanism.trainer import Trainer

PRIVATE = sorted(set(ALGORITHMS) - {"sgd"})


@dataclass(frozen=True)
class Golden:
    """Hand-computed values of one setting of one algorithm.

    Attributes:
        norms, groups, weights: one entry per record.
        sensitivity: Δ at that step.
        events: of the laboratory's run (q = 1/4, T = 4, σ = 1) after `plan` changes it.
        released: the noised side statistic that the weights wait for.
        later: public values of the next step that follow from `released`.
        step: the step that the weights are of.
        public: public values that a running part provides.
        updates: a coordinate of consecutive steps' noisy sums, and of what the optimiser is given of each.
        leaves: a parameter after consecutive steps, from 0 on, and what would leave the run after each.
    """

    norms: Sequence[float]
    weights: Sequence[float]
    sensitivity: float
    events: Sequence[Event]
    options: dict[str, Any] = field(default_factory=dict)
    groups: Sequence[int] = ()
    released: Sequence[float] | None = None
    later: dict[str, float | list[float]] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    public: dict[str, float] = field(default_factory=dict)
    updates: Sequence[tuple[float, float]] = ()
    leaves: Sequence[tuple[float, float]] = ()


QUARTER = 0.25
TENFOLD = (1 + 1 / 100) ** -0.5  # counts at 10·σ beside gradients at σ = 1

GOLDEN: dict[str, list[Golden]] = {
    "sgd": [Golden(norms=(), weights=(), sensitivity=0.0, events=[])],
    # C = 2: shorter gradients stay, 4 is halved, 8 quartered
    "dpsgd": [
        Golden(
            options={"clip_norm": 2.0},
            norms=(0, 1, 2, 4, 8),
            weights=(1, 1, 1, 0.5, 0.25),
            sensitivity=2.0,
            events=[Event(QUARTER, 1.0, 4)],
        )
    ],
    # B = 12, K = 3: B/K = 4; b̃ = (8, −3 → 1, 2) so θ = (1/2, 4, 2); C_0 = 1 halves a norm of 2; Δ = max θ·C_0 = 4
    "naive": [
        Golden(
            norms=(2, 2, 0.5),
            groups=(0, 1, 2),
            released=(8, -3, 2),
            weights=(0.25, 2, 2),
            sensitivity=4.0,
            plan={"batch_size": 12},
            events=[Event(0.3, TENFOLD, 3)],
        ),
        # a count noise given as a number stays one: (1 + 1/25)^(−1/2)
        Golden(
            options={"count_noise_multiplier": 5.0, "base_clip_norm": 2.0},
            norms=(4, 1),
            groups=(0, 2),
            released=(10 / 3, 10 / 3, 10 / 6),
            weights=(0.5, 2),
            sensitivity=4.0,
            events=[Event(QUARTER, 1.04**-0.5, 4)],
        ),
    ],
    # at the first step the average is that step's counts: C^k as for dpsgd_f, with ρ = 5/B = 0.5
    "dpsgd_f_smooth": [
        Golden(
            norms=(2.4, 2.6, 4),
            groups=(0, 1, 2),
            released=(1, 4, -2, 9, 1, 3),
            weights=(0.5, 1, 0.25),
            sensitivity=2.6,
            events=[Event(QUARTER, TENFOLD, 4)],
        ),
    ],
    # the first step's bounds are C_0; counts of 1/σ_f² = 1.01 come times h = σ_f/σ_m = 1.01^(−1/2)/10, C^k as before
    "dpsgd_f_slack": [
        Golden(
            norms=(0.5, 2, 4),
            groups=(0, 1, 2),
            released=[count * 1.01**-0.5 / 10 for count in (1, 4, -2, 9, 1, 3)],
            weights=(1, 0.5, 0.25),
            sensitivity=1.0,
            later={"clip_norm": [1.2, 2.6, 1.0]},
            events=[Event(QUARTER, TENFOLD, 4)],
        ),
        # C_0 = 0.5, σ_m = 0.75: 1/σ_f² = 1 + 16/9, σ_f = 0.6, σ_f/σ_m = 0.8; C_max = 1
        Golden(
            options={"base_clip_norm": 0.5, "max_clip_norm": 1.0, "count_noise_multiplier": 0.75},
            norms=(0.5, 2),
            groups=(0, 1),
            released=[count * 0.8 for count in (1, 4, -2, 9, 1, 3)],
            weights=(1, 0.25),
            sensitivity=0.5,
            later={"clip_norm": [0.6, 1.0, 0.5]},
            events=[Event(QUARTER, 0.6, 4)],
        ),
    ],
    # gradients of another loss, weighed alike; b̂ = m̃ + õ = (10, 5, 1), and at least σ_1·√2 = 7.07; 1.04: counts at 5
    "dpsgd_f_adjusted": [
        Golden(
            norms=(2.4, 2.6, 4),
            groups=(0, 1, 2),
            released=(1, 4, -2, 9, 1, 3),
            weights=(0.5, 1, 0.25),
            sensitivity=2.6,
            later={"group_shares": [0.41421356, 0.29289322, 0.29289322]},
            events=[Event(QUARTER, 1.04**-0.5, 4)],
        ),
    ],
    # one bound; b̂ as above, ρ = (1/10, 4/7.07, 0), and shares of b̂^k·exp(−4ρ^k)
    # b̂ as above, two of them noise, so that nothing is steered yet; ē = (1/10, 4/7.07, 0), κ = 2
    "dpsgd_minimax": [
        Golden(
            norms=(0.5, 2, 4),
            groups=(0, 1, 2),
            released=(1, 4, -2, 9, 1, 3),
            weights=(1, 0.5, 0.25),
            sensitivity=1,
            later={"shift": [-1.08137359, -2.35931803, -1.22794718]},
            events=[Event(QUARTER, 1.04**-0.5, 4)],
        ),
        # σ_1 = 0.75: b̂ = (10, 5, 1.06), v = 0.5625, r = (0.983, 0.934, 0), e = (1/10, 4/5, 0), m = 0.441, a third of b̂
        Golden(
            options={"count_noise_multiplier": 0.75},
            norms=(0.5, 2, 4),
            groups=(0, 1, 2),
            released=(1, 4, -2, 9, 1, 3),
            weights=(1, 0.5, 0.25),
            sensitivity=1,
            later={"shift": [-0.301243, -3.139478, -2.677966]},
            events=[Event(QUARTER, 0.6, 4)],
        ),
    ],
    "dpsgd_level": [
        Golden(
            norms=(0.5, 2, 4),
            groups=(0, 1, 2),
            released=(1, 4, -2, 9, 1, 3),
            weights=(1, 0.5, 0.25),
            sensitivity=1,
            later={"group_shares": [0.46196735, 0.05071283, 0.48731982]},
            events=[Event(QUARTER, 1.04**-0.5, 4)],
        ),
        # σ_1 = 0.75: b̂ = (10, 5, 1.06), ρ = (1/10, 4/5, 0), κ = 3; 1/σ² = 1 + 16/9
        Golden(
            options={"clip_norm": 0.5, "margin": 3.0, "count_noise_multiplier": 0.75},
            norms=(0.5, 2, 4),
            groups=(0, 1, 2),
            released=(1, 4, -2, 9, 1, 3),
            weights=(1, 0.25, 0.125),
            sensitivity=0.5,
            later={"group_shares": [0.83028731, 0.05083701, 0.11887568]},
            events=[Event(QUARTER, 0.6, 4)],
        ),
    ],
    # the same C^k = (1.2, 2.6, 1), and θ^k = ((10/3)/(10, 5, 3))^p
    "dpsgd_f_balanced": [
        Golden(
            norms=(2.4, 2.6, 4),
            groups=(0, 1, 2),
            released=(1, 4, -2, 9, 1, 3),
            weights=(0.5 * 3**-0.5, 1.5**-0.5, 0.25 * 0.9**-0.5),
            sensitivity=2.6 * 1.5**-0.5,
            events=[Event(QUARTER, TENFOLD, 4)],
        ),
        # p = 1: as in `naive` every group counts alike, and the rarest sets Δ
        Golden(
            options={"balance": 1},
            norms=(2.4, 2.6, 4),
            groups=(0, 1, 2),
            released=(1, 4, -2, 9, 1, 3),
            weights=(0.5 / 3, 2 / 3, 0.25 / 0.9),
            sensitivity=2.6 * 2 / 3,
            events=[Event(QUARTER, TENFOLD, 4)],
        ),
    ],
    # m̃ = (1, 4, −2 → 0), õ = (9, 1, 3): b̃ = (10, 5, 3), ρ^k = (0.1, 0.8, 0)
    "dpsgd_f": [
        # ρ = 5/B = 0.5: C^k = 1 + (0.2, 1.6, 0)
        Golden(
            norms=(2.4, 2.6, 4),
            groups=(0, 1, 2),
            released=(1, 4, -2, 9, 1, 3),
            weights=(0.5, 1, 0.25),
            sensitivity=2.6,
            events=[Event(QUARTER, TENFOLD, 4)],
        ),
        # ρ = 5/18: ρ^k/ρ = (0.36, 2.88, 0)
        Golden(
            options={"ratio_over": "counted"},
            norms=(2.72, 3.88, 4),
            groups=(0, 1, 2),
            released=(1, 4, -2, 9, 1, 3),
            weights=(0.5, 1, 0.25),
            sensitivity=3.88,
            events=[Event(QUARTER, TENFOLD, 4)],
        ),
        # C_0 = 0.5, C_max = 1: C^k = min(1, 0.5·(1.2, 2.6, 1))
        Golden(
            options={"base_clip_norm": 0.5, "max_clip_norm": 1.0},
            norms=(1.2, 2, 1),
            groups=(0, 1, 2),
            released=(1, 4, -2, 9, 1, 3),
            weights=(0.5, 0.5, 0.5),
            sensitivity=1.0,
            events=[Event(QUARTER, TENFOLD, 4)],
        ),
        # nobody above C_0: ρ = 0, so C^k = C_0 for all
        Golden(
            norms=(2, 0.5),
            groups=(0, 1),
            released=(-1, -4, -2, 9, 1, 3),
            weights=(0.5, 1),
            sensitivity=1.0,
            events=[Event(QUARTER, TENFOLD, 4)],
        ),
        # all counts noised below zero: nothing is divided by zero
        Golden(
            options={"ratio_over": "counted"},
            norms=(2, 0.5),
            groups=(0, 1),
            released=(-1, -1, -1, -1, -1, -1),
            weights=(0.5, 1),
            sensitivity=1.0,
            events=[Event(QUARTER, TENFOLD, 4)],
        ),
    ],
    "dpsgd_tanh": [
        Golden(norms=(0.5, 4), weights=(1, 0.25), sensitivity=1.0, events=[Event(QUARTER, 1.0, 4)]),
    ],
    "dpsgd_scatter": [
        Golden(norms=(0.5, 4), weights=(1, 0.25), sensitivity=1.0, events=[Event(QUARTER, 1.0, 4)]),
    ],
    # two epochs of four steps: σ_0 = 1, σ_1 = e^(−0.5) = 0.60653
    "dpsgd_decay": [
        Golden(
            options={"noise_decay": 0.5},
            norms=(0.5, 4),
            weights=(1, 0.25),
            sensitivity=1.0,
            plan={"epochs": 2},
            events=[Event(QUARTER, 1.0, 4), Event(QUARTER, 0.60653066, 4)],
        ),
    ],
    # C/Z = 1/50 = 0.02 up to and including Z, then nothing
    "dpsgd_global": [
        Golden(norms=(0, 50, 51), weights=(0.02, 0.02, 0), sensitivity=1.0, events=[Event(QUARTER, 1.0, 4)]),
    ],
    # C/max(50, n); b̃ = 3/10: Z' = 50·e^(0.3 − 0.1) = 61.0701; σ_b = 10
    "dpsgd_global_adapt": [
        Golden(
            norms=(0, 50, 100),
            weights=(0.02, 0.02, 0.01),
            sensitivity=1.0,
            released=(3,),
            later={"strict_clip_norm": 61.070138},
            events=[Event(QUARTER, TENFOLD, 4)],
        ),
        # nobody above: Z' = 20·e^(−0.5 − 0.2), and a count noise of 2: (1 + 1/4)^(−1/2)
        Golden(
            options={
                "clip_norm": 2.0,
                "strict_clip_norm": 20.0,
                "strict_clip_learning_rate": 0.2,
                "count_noise_multiplier": 2.0,
            },
            norms=(10, 40),
            weights=(0.1, 0.05),
            sensitivity=2.0,
            released=(-5,),
            later={"strict_clip_norm": 9.9317061},
            events=[Event(QUARTER, 1.25**-0.5, 4)],
        ),
        # those below: b̃ = 1 − 7/10, as above. A counted one adds τ·Δ: 0.36 + 1 > 1, and at 1.25: 0.36 + 0.64 = 1
        Golden(
            options={"counted": "below", "threshold": 0.6, "count_noise_multiplier": 1.0},
            norms=(0, 50, 100),
            weights=(0.02, 0.02, 0.01),
            sensitivity=1.0,
            released=(7,),
            later={"strict_clip_norm": 61.070138},
            events=[Event(QUARTER, 1.36**-0.5, 4)],
        ),
        Golden(
            options={"counted": "below", "threshold": 0.6, "count_noise_multiplier": 1.25},
            norms=(0, 50, 100),
            weights=(0.02, 0.02, 0.01),
            sensitivity=1.0,
            released=(7,),
            later={"strict_clip_norm": 61.070138},
            events=[Event(QUARTER, 1.0, 4)],
        ),
    ],
    # σ_b = B/20 = 0.5: σ^eff = (1 + 4)^(−1/2); b̃ = 8/10: C' = 1·e^(−0.2·0.3) = 0.941765
    "dpsgd_quantile": [
        Golden(
            norms=(0.5, 4),
            weights=(1, 0.25),
            sensitivity=1.0,
            released=(8,),
            later={"clip_norm": 0.94176453},
            events=[Event(QUARTER, 5**-0.5, 4)],
        ),
        # centred: σ_b counts double, (1 + 1)^(−1/2); b̃ = −1/10 + ½ = 0.4: C' = 2·e^(0.2·0.1)
        Golden(
            options={"centred": True, "clip_norm": 2.0},
            norms=(0.5, 4),
            weights=(1, 0.5),
            sensitivity=2.0,
            released=(-1,),
            later={"clip_norm": 2.0404027},
            events=[Event(QUARTER, 2**-0.5, 4)],
        ),
        # the floor holds: 1·e^(−0.2·(5 − 0.5)) = 0.407 < 0.9
        Golden(
            options={"min_clip_norm": 0.9, "count_noise_multiplier": "10x"},
            norms=(0.5, 4),
            weights=(1, 0.25),
            sensitivity=1.0,
            released=(50,),
            later={"clip_norm": 0.9},
            events=[Event(QUARTER, TENFOLD, 4)],
        ),
        # κ = 0.6: a counted gradient adds 0.6·Δ, 0.36 + 1 > 1; b̃ = 8/10 as above
        Golden(
            options={"counts_below": 0.6, "count_noise_multiplier": 1.0},
            norms=(0.5, 4),
            weights=(1, 0.25),
            sensitivity=1.0,
            released=(8,),
            later={"clip_norm": 0.94176453},
            events=[Event(QUARTER, 1.36**-0.5, 4)],
        ),
        # at σ_b = 1.25·σ the count is free; centred it is not, as those beyond move it too: 1 + 1/1.25²/4
        Golden(
            options={"counts_below": 0.6, "count_noise_multiplier": "1.25x"},
            norms=(0.5, 4),
            weights=(1, 0.25),
            sensitivity=1.0,
            released=(8,),
            later={"clip_norm": 0.94176453},
            events=[Event(QUARTER, 1.0, 4)],
        ),
        Golden(
            options={"counts_below": 0.6, "count_noise_multiplier": "1.25x", "centred": True},
            norms=(0.5, 4),
            weights=(1, 0.25),
            sensitivity=1.0,
            released=(-1,),
            later={"clip_norm": 1.0202013},
            events=[Event(QUARTER, 1.16**-0.5, 4)],
        ),
    ],
    # B = 10, φ̂ = (1·2/10)² = 0.04. m̂ = 0.6, v̂ = 0.36: 10·0.6/√0.32; then m̂ = 0.034/0.19, v̂ = 0.00039964/0.001999
    "dp_adambc": [
        Golden(
            options={"clip_norm": 2.0},
            norms=(0.5, 4),
            weights=(1, 0.5),
            sensitivity=2.0,
            events=[Event(QUARTER, 1.0, 4)],
            updates=[(6, 10.6066017), (-2, 4.4748036)],
        ),
        # β = 0.5, φ̂ = 0.01, γ' = 0.25: 10·0.6/√0.35; then m̂ = 0.2/0.75, v̂ − φ̂ = 0.0950/0.75 − 0.01 < γ': 10·m̂/0.5
        Golden(
            options={"first_decay": 0.5, "second_decay": 0.5, "variance_floor": 0.25},
            norms=(0.5, 4),
            weights=(1, 0.25),
            sensitivity=1.0,
            events=[Event(QUARTER, 1.0, 4)],
            updates=[(6, 10.1418511), (1, 5.3333333)],
        ),
    ],
    # as dpsgd_quantile, but σ_b = B/10 = 1 and centred: (1 + 1/4)^(−1/2); b̃ = −1/10 + ½: C' = 1·e^(0.2·0.1)
    "dpsgd_bounded": [
        Golden(
            norms=(0.5, 4),
            weights=(1, 0.25),
            sensitivity=1.0,
            released=(-1,),
            later={"clip_norm": 1.0202013},
            events=[Event(QUARTER, 1.25**-0.5, 4)],
        ),
        # the floor holds: 0.6·e^(−0.2·(5.5 − 0.5)) = 0.22
        Golden(
            options={"clip_norm": 0.6, "count_noise_multiplier": 0.5},
            norms=(0.5, 1.2),
            weights=(1, 0.5),
            sensitivity=0.6,
            released=(50,),
            later={"clip_norm": 0.5},
            events=[Event(QUARTER, 2**-0.5, 4)],
        ),
    ],
    # tanh(1/2)/(1/2), tanh(4)/4; σ_b = 0.5 as for dpsgd_quantile, and a counted gradient adds tanh(1)·Δ
    "soft_adaclip": [
        Golden(
            norms=(0, 0.5, 4),
            weights=(1, 0.92423431, 0.24983232),
            sensitivity=1.0,
            released=(8,),
            later={"clip_norm": 0.94176453},
            events=[Event(QUARTER, (math.tanh(1) ** 2 + 4) ** -0.5, 4)],
        ),
        # free: tanh(0.6)² + 1/1.25² = 0.93 < 1
        Golden(
            options={"clip_norm": 2.0, "counts_below": 0.6, "count_noise_multiplier": "1.25x"},
            norms=(4,),
            weights=(0.48201379,),
            sensitivity=2.0,
            released=(8,),
            later={"clip_norm": 1.8835291},
            events=[Event(QUARTER, 1.0, 4)],
        ),
    ],
    # K = 2, B = 10: ŝ = (√2, 2√2)·√2/10 = (0.2, 0.4), target 1 − 0.5·(1 − 0.4/2) = 0.6: C' = 2·e^(0.5·0.4)
    "slaclip": [
        Golden(
            options={"clip_norm": 2.0, "slots": 2},
            norms=(1, 8),
            weights=(1, 0.25),
            sensitivity=2.0,
            released=(2**0.5, 2 * 2**0.5),
            later={"clip_norm": 2.4428055},
            events=[Event(QUARTER, 1.0, 4)],
        ),
        # target 1 − 0.2·(1 − 0) = 0.8, η = 1: 0.5·e^0.8 = 1.11 is above C_max
        Golden(
            options={"clip_norm": 0.5, "clip_learning_rate": 1.0, "target_fall": 0.2, "max_clip_norm": 1.0},
            norms=(1,),
            weights=(0.5,),
            sensitivity=0.5,
            released=(0,) * 8,
            later={"clip_norm": 1.0},
            events=[Event(QUARTER, 1.0, 4)],
        ),
    ],
    # edges 0.01, 0.1, 1; of 8 counted 4 are reached in the last bin
    "dc_sgd_p": [
        Golden(
            options={"bins": 3, "largest_norm": 1.0},
            norms=(0.5, 4),
            weights=(1, 0.25),
            sensitivity=1.0,
            released=(1, 2, 5),
            later={"clip_norm": 1.0},
            events=[Event(QUARTER, 0.9**0.5, 4)],
        ),
        # 0.3 of 8 in the second; a histogram in steps 0 and 2
        Golden(
            options={"bins": 3, "largest_norm": 10.0, "quantile": 0.3, "count_noise_multiplier": 1.0, "every": 2},
            norms=(0.5, 4),
            weights=(1, 0.25),
            sensitivity=1.0,
            released=(1, 2, 5),
            later={"clip_norm": 1.0},
            events=[Event(QUARTER, 0.5**0.5, 2), Event(QUARTER, 1.0, 2)],
        ),
        # nothing is counted: C stays
        Golden(
            options={"clip_norm": 0.7},
            norms=(1.4,),
            weights=(0.5,),
            sensitivity=0.7,
            released=(-1,) * 20,
            later={"clip_norm": 0.7},
            events=[Event(QUARTER, 0.9**0.5, 4)],
        ),
    ],
    # d = 21, B = 10: noise 0.21·C². Counts above 6, those of the last bin: 2·(1 − C)² = 1.96, 1.62, 0
    "dc_sgd_e": [
        Golden(
            options={"bins": 3, "largest_norm": 1.0},
            norms=(0.5, 4),
            weights=(1, 0.25),
            sensitivity=1.0,
            released=(0, 4, 20),
            later={"clip_norm": 1.0},
            events=[Event(QUARTER, 0.9**0.5, 4)],
        ),
        # 3·(0.1 − 0.01)² = 0.0243 is taken off at C = 0.01; noise of 0.0021 at 0.1, and of 0.21 at 1
        Golden(
            options={"bins": 3, "largest_norm": 1.0, "count_noise_multiplier": 1.0},
            norms=(0.5, 4),
            weights=(1, 0.25),
            sensitivity=1.0,
            released=(30, 30, 2),
            later={"clip_norm": 0.1},
            events=[Event(QUARTER, 0.5**0.5, 4)],
        ),
    ],
    # σ_N = 0.01·40, σ_L = 0.02·40 in each epoch, steps at ρ·B/N = 1/2; rates and bounds by hand in test_asc.py
    "asc": [
        Golden(
            norms=(0.5, 4),
            weights=(1, 0.25),
            sensitivity=1.0,
            events=[Event(1.0, 0.4), Event(1.0, 0.8), Event(0.5, 1.0, 4)],
        ),
        Golden(
            options={"clip_norm": 2.0, "rate_limit": 1, "size_noise_fraction": 0.1, "loss_noise_fraction": 0.5},
            norms=(0.5, 4),
            weights=(1, 0.5),
            sensitivity=2.0,
            plan={"epochs": 2},
            events=[Event(1.0, 4.0), Event(1.0, 20.0, 2), Event(QUARTER, 1.0, 8)],
        ),
    ],
    # 1/(n + 0.01)
    "auto_s": [
        Golden(norms=(0, 0.09, 0.99), weights=(100, 10, 1), sensitivity=1.0, events=[Event(QUARTER, 1.0, 4)]),
    ],
    # C = 0.1, r = 0.01. n = 0: 0.1/(0 + 1). n = 0.09: 0.1/(0.09 + 0.01/0.1) = 0.1/0.19. n = 0.99: 0.1/(0.99 + 0.01)
    "psac": [
        Golden(
            options={"stability": 0.01},
            norms=(0, 0.09, 0.99),
            weights=(0.1, 0.1 / 0.19, 0.1),
            sensitivity=0.1,
            events=[Event(QUARTER, 1.0, 4)],
        ),
    ],
    # s = 0.5: 0.1/(0.045 + 0.1), 0.1/(0.495 + 0.01); Δ = 0.1/0.5
    "psasc": [
        Golden(
            options={"stability": 0.01, "scale": 0.5},
            norms=(0, 0.09, 0.99),
            weights=(0.1, 0.1 / 0.145, 0.1 / 0.505),
            sensitivity=0.2,
            events=[Event(QUARTER, 1.0, 4)],
        ),
    ],
    # T = 20, γ = 0.5: shares 1/7, 2/7, 4/7, boundaries round(2.86), round(8.57), 20: lengths 3, 6, 11, shortest first.
    # β = 0.8: σ = (0.64, 0.8, 1), rising. a = 2: C = (4, 2, 1), falling.
    "sad_dpsgd": [
        Golden(
            options={"phase_decay": 0.5, "clip_decay": 2.0},
            norms=(1, 2, 8),
            weights=(1, 4 / 4, 0.5),
            sensitivity=4.0,
            plan={"epochs": 5},
            events=[Event(QUARTER, 0.64, 3), Event(QUARTER, 0.8, 6), Event(QUARTER, 1.0, 11)],
            step=2,
        ),
        Golden(
            options={"phase_decay": 0.5, "clip_decay": 2.0},
            norms=(1, 2, 8),
            weights=(1, 1, 0.25),
            sensitivity=2.0,
            plan={"epochs": 5},
            events=[Event(QUARTER, 0.64, 3), Event(QUARTER, 0.8, 6), Event(QUARTER, 1.0, 11)],
            step=3,
        ),
    ],
    # ω = 0.5, bounds 0.5 and 1. n = 0.4: kept; 0.8: cut to 0.5; 1.6: to 0.8; 4: to 1. ρ = 0.4, E = 2: σ = 1, 0.8
    "auto_dpsgd_l": [
        Golden(
            norms=(0.4, 0.8, 1.6, 4),
            weights=(1, 0.625, 0.5, 0.25),
            sensitivity=1.0,
            plan={"epochs": 2},
            events=[Event(QUARTER, 1.0, 4), Event(QUARTER, 0.8, 4)],
        ),
    ],
    # 4 epochs in 3 phases: phase ⌊3e/4⌋ = 0, 0, 1, 2; R = 0.8
    "auto_dpsgd_s": [
        Golden(
            options={"min_clip_norm": 20.0, "max_clip_norm": 40.0},
            norms=(10, 30, 60, 160),
            weights=(1, 2 / 3, 0.5, 0.25),
            sensitivity=40.0,
            plan={"epochs": 4},
            events=[Event(QUARTER, 1.0, 8), Event(QUARTER, 0.8, 4), Event(QUARTER, 0.64, 4)],
        ),
    ],
    # K_0 = 1: weights are PSASC's, of ‖m‖; the event is PSASC's; M = 1, 0.8·1 + 1, 0.8·1.8 − 1
    "psasc_momentum": [
        Golden(
            options={"stability": 0.01, "scale": 0.5},
            norms=(0, 0.09, 0.99),
            weights=(0.1, 0.1 / 0.145, 0.1 / 0.505),
            sensitivity=0.2,
            events=[Event(QUARTER, 1.0, 4)],
            updates=[(1, 1), (1, 1.8), (-1, 0.44)],
        ),
    ],
    # B = N: T = E = 3 plain Gaussians
    "psasc_momentum_gd": [
        Golden(
            options={"stability": 0.01, "scale": 0.5},
            norms=(0, 0.09, 0.99),
            weights=(0.1, 0.1 / 0.145, 0.1 / 0.505),
            sensitivity=0.2,
            plan={"epochs": 3},
            events=[Event(1.0, 1.0, 3)],
        ),
    ],
    # T candidates, whether accepted or not
    "sa_dpsgd": [
        Golden(norms=(0.05, 0.4), weights=(1, 0.25), sensitivity=0.1, events=[Event(QUARTER, 1.0, 4)]),
        # private energy: q_J = 10/40, σ_J = 10·σ, one such release per candidate
        Golden(
            options={"energy": "private", "energy_records": 10},
            norms=(0.05, 0.4),
            weights=(1, 0.25),
            sensitivity=0.1,
            events=[Event(QUARTER, 1.0, 4), Event(QUARTER, 10.0, 4)],
        ),
    ],
    # K̃ = 20, Ñ = 40: everybody kept adds 1/2. σ_N = σ_K = 0.02·40; K̃ once per epoch, K* once per epoch but the last
    "dpis": [
        Golden(
            norms=(0, 0.25, 2),
            weights=(0, 2, 0.25),
            sensitivity=0.5,
            public={"contribution": 20 / 40},
            plan={"epochs": 2},
            events=[Event(1.0, 0.8, 3), Event(QUARTER, 1.0, 8)],
        ),
        Golden(
            options={"adaptive_clip": True, "sum_noise_fraction": 0.1, "declared_records": 80},
            norms=(0.5,),
            weights=(1,),
            sensitivity=0.5,
            public={"contribution": 20 / 40},
            plan={"epochs": 2},
            events=[Event(1.0, 1.6, 1), Event(1.0, 8.0, 3), Event(0.125, 1.0, 16)],
        ),
    ],
    # plain parts are dpsgd; with DPSGD-F's counts, PSASC's weight and SAD's noise: C^k = (1.2, 2.6, 1), s = 0.5,
    # w = C^k/(n/2 + 0.01/(n + 0.01)), Δ = 2.6/0.5; σ in two halves of T = 4: 0.8, 1, counts at 10
    "custom": [
        Golden(norms=(0.5, 4), weights=(1, 0.25), sensitivity=1.0, events=[Event(QUARTER, 1.0, 4)]),
        # γ_1 = 0.5: M = 2, 0.5·2 + 0; β = 0.2: β_1 = 2/11, β_2 = β: θ̄ = 9/11, 0.2·9/11 + 0.8·2
        Golden(
            options={
                "update": {"name": "outer_momentum", "outer_momentum": 0.5},
                "released_weights": {"name": "average", "decay": 0.2},
            },
            norms=(0.5, 4),
            weights=(1, 0.25),
            sensitivity=1.0,
            events=[Event(QUARTER, 1.0, 4)],
            updates=[(2, 2), (0, 1)],
            leaves=[(1, 9 / 11), (2, 1.8 / 11 + 1.6)],
        ),
        Golden(
            options={
                "weights": {"name": "psasc", "scale": 0.5, "stability": 0.01},
                "side_release": {"name": "group_clip_counts"},
                "schedule": {"name": "phases", "phases": 2, "phase_decay": 1.0, "clip_decay": 1.0},
                "initial": {"clip_norm": 1.0},
            },
            norms=(0, 0.09, 0.99),
            groups=(0, 1, 2),
            released=(1, 4, -2, 9, 1, 3),
            weights=(1.2, 2.6 / 0.145, 1 / 0.505),
            sensitivity=5.2,
            events=[Event(QUARTER, fuse(0.8, 10.0), 2), Event(QUARTER, fuse(1.0, 10.0), 2)],
        ),
    ],
}

STATISTICS: dict[str, list[tuple[dict[str, Any], Sequence[float], Sequence[int], Sequence[float]]]] = {
    # options, norms, groups, and b^k: how many are in each group
    "naive": [({}, (0.5, 1, 2, 3), (0, 1, 1, 1), (1, 3, 0))],
    # above C_0 = 1, then not above, per group
    "dpsgd_f": [({}, (0.5, 1, 2, 3), (0, 1, 1, 2), (0, 1, 1, 1, 1, 0))],
    "dpsgd_f_smooth": [({}, (0.5, 1, 2, 3), (0, 1, 1, 2), (0, 1, 1, 1, 1, 0))],
    "dpsgd_f_adjusted": [({}, (0.5, 1, 2, 3), (0, 1, 1, 2), (0, 1, 1, 1, 1, 0))],
    "dpsgd_level": [({"clip_norm": 2.0}, (0.5, 1, 2, 3), (0, 1, 1, 2), (0, 0, 1, 1, 2, 0))],
    # shares of wrong records in the place of norms
    "dpsgd_minimax": [({}, (0, 1, 1, 0.25), (0, 1, 1, 2), (0, 2, 0.25, 1, 0, 0.75))],
    # all C^k = C_0, nothing is left of Δ: a count comes times σ_f/σ_m = 0.6/0.75 at σ = 1
    "dpsgd_f_slack": [({"count_noise_multiplier": 0.75}, (0.5, 1, 2, 3), (0, 1, 1, 2), (0, 0.8, 0.8, 0.8, 0.8, 0))],
    "dpsgd_f_balanced": [({"base_clip_norm": 2.0}, (0.5, 1, 2, 3), (0, 1, 1, 2), (0, 0, 1, 1, 2, 0))],
    # within C = 1; centred: two of three, less a half each
    "dpsgd_quantile": [
        ({}, (0.5, 1, 2, 3, 4), (0, 1, 1, 2, 0), (2,)),
        ({"centred": True}, (0.5, 1, 2), (0, 1, 1), (0.5,)),
        ({"counts_below": 0.5}, (0.5, 0.6, 1, 2), (0, 1, 1, 0), (1,)),
        ({"counts_below": 0.5, "centred": True}, (0.5, 0.6, 1, 2), (0, 1, 1, 0), (-1,)),
    ],
    # within 2.5·C: two of three, less a half each
    "dpsgd_bounded": [({}, (2.4, 2.5, 2.6), (0, 1, 1), (0.5,))],
    "soft_adaclip": [({}, (0.5, 1, 2), (0, 1, 1), (2,))],
    # 2·(1 − n) slots are filled: 2, 1.5, 1, 0.5, 0; each of C/√2
    "slaclip": [({"slots": 2}, (0, 0.25, 0.5, 0.75, 2), (0, 1, 1, 2, 0), (3.5 / 2**0.5, 1.5 / 2**0.5))],
    # up to 0.01, up to 0.1, longer
    "dc_sgd_p": [({"bins": 3, "largest_norm": 1.0}, (0, 0.009, 0.02, 0.5, 7), (0, 1, 1, 2, 0), (2, 1, 2))],
    "dc_sgd_e": [({"bins": 2, "largest_norm": 1.0}, (0, 0.009, 0.02, 0.5, 7), (0, 1, 1, 2, 0), (2, 3))],
    # above τ·Z = 0.7·50, and 0.5·50: at it is not above
    "dpsgd_global_adapt": [
        ({"threshold": 0.7}, (20, 34, 36, 60), (0, 1, 1, 2), (2,)),
        ({"threshold": 0.5, "counted": "below"}, (20, 25, 26, 60), (0, 1, 1, 2), (2,)),
        ({"threshold": 0.5}, (25, 26), (0, 1), (1,)),
    ],
}

CASES = [pytest.param(name, case, id=f"{name}-{i}") for name, cases in GOLDEN.items() for i, case in enumerate(cases)]


def test_every_registered_algorithm_has_golden_values() -> None:
    own = {n for n in ALGORITHMS if type(algorithm_settings(n)).__module__.startswith("equidp.")}  # not other packages'
    assert set(GOLDEN) == own, "register an algorithm together with its golden values"
    released = {n for n in own if n != "custom" and algorithm_settings(n).build().side_release is not None}
    assert set(STATISTICS) == released, "and what it counts in a batch that can be counted by hand"
    for name, cases in GOLDEN.items():
        algorithm = algorithm_settings(name, cases[0].options).build()
        told = "a golden case of `updates`" if type(algorithm.update) is not Update else ""
        assert not told or any(case.updates for case in cases), f"{name} brings an update: give {told}"
        told = "a golden case of `leaves`" if type(algorithm.released_weights) is not Released else ""
        assert not told or any(case.leaves for case in cases), f"{name} releases other weights: give {told}"


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in STATISTICS.items() for case in cases])
def test_side_statistics_by_hand(lab: Any, name: str, case: tuple[dict[str, Any], Any, Any, Any]) -> None:
    options, norms, groups, expected = case
    algorithm, plan = algorithm_settings(name, options).build(), lab.plan()
    public, release = tensors(algorithm.initial, "cpu"), algorithm.side_release
    found = release.statistic(torch.tensor(norms), torch.tensor(groups), public, plan)
    assert found.tolist() == pytest.approx(list(expected), rel=1e-6)
    nobody = release.statistic(torch.zeros(0), torch.zeros(0, dtype=torch.long), public, plan)
    assert nobody.tolist() == [0.0] * len(expected)


@pytest.mark.parametrize("noised", [-1e30, 1e30])
@pytest.mark.parametrize("name", sorted(set(STATISTICS)))
def test_no_release_leads_a_bound_or_a_weight_out_of_float32(lab: Any, name: str, noised: float) -> None:
    algorithm, plan = algorithm_settings(name).build(), lab.plan()
    public, release = tensors(algorithm.initial, "cpu"), algorithm.side_release
    values = torch.full_like(release.statistic(torch.zeros(0), torch.zeros(0, dtype=torch.long), public, plan), noised)
    for _ in range(3):
        later, now = release.consequences(values, public, public, lab.facts(plan))
        public |= later
    public |= now
    delta, norms = sensitivity(algorithm.weights, public), torch.tensor([0.0, 1.0, 1e20])
    weights = algorithm.weights.weights(norms, per_record(public, torch.arange(3)))
    assert 0 < float(delta) < math.inf
    assert weights.isfinite().all()


@pytest.mark.parametrize(
    ("name", "noised", "bound"),
    [
        # edges 0.01, 0.1, 1; error of E with σ = 1, d = 21, B = 10: 0.21·C² + Σ h·max(e − C, 0)²/10
        ("dc_sgd_e", (30.0, 40.0, 5.0), 0.1),  # 5 is below 2·σ_H = 6 and dropped: 0.0324, 0.0021, 0.21
        ("dc_sgd_e", (30.0, 40.0, 7.0), 1.0),  # 0.72, 0.569, 0.21; over Σ h in the place of B, 0.1 would be best
        ("dc_sgd_e", (5.0, 5.0, 5.0), 3.0),  # nothing is left, and the bound stays
        ("dc_sgd_p", (-10.0, 4.0, 5.0), 1.0),  # 0, 4, 9 of 9
        ("dc_sgd_p", (2.0, 6.0, -50.0), 0.1),  # 2, 8 of 8
        ("dc_sgd_p", (-1.0, -2.0, 0.0), 3.0),
    ],
)
def test_the_bound_that_a_histogram_leads_to_by_hand(
    lab: Any, name: str, noised: tuple[float, ...], bound: float
) -> None:
    side = algorithm_settings(name, {"bins": 3, "largest_norm": 1.0}).build().side_release
    led = side.later(torch.tensor(noised), tensors({"clip_norm": 3.0}, "cpu"), lab.facts())
    assert float(led["clip_norm"]) == pytest.approx(bound)


@pytest.mark.parametrize(("name", "case"), [c for c in CASES if c.values[0] != "sgd"])
class TestGolden:
    """Point 0: the right rule, not just a bounded one."""

    def public(self, lab: Any, name: str, case: Golden) -> tuple[Any, dict[str, Tensor], Any]:
        algorithm = algorithm_settings(name, case.options).build()
        plan = algorithm.adapt(lab.plan(**case.plan))
        segment = segment_at(algorithm.schedule.segments(plan), case.step)
        public = scheduled(tensors({**algorithm.initial, **case.public}, "cpu"), segment)
        if case.released is not None:
            noised = torch.tensor(case.released, dtype=torch.float32)
            public |= algorithm.side_release.consequences(noised, public, public, lab.facts(plan))[1]
        return algorithm, public, plan

    def test_weights_and_sensitivity(self, lab: Any, name: str, case: Golden) -> None:
        algorithm, public, _ = self.public(lab, name, case)
        trainer = lab.trainer(name, algorithm=algorithm)
        groups = torch.tensor(case.groups or [0] * len(case.norms))
        weights = trainer.weights(torch.tensor(case.norms, dtype=torch.float32), groups, public)
        torch.testing.assert_close(weights, torch.tensor(case.weights, dtype=torch.float32), rtol=1e-5, atol=0)
        assert float(sensitivity(algorithm.weights, public)) == pytest.approx(case.sensitivity)

    def test_events(self, lab: Any, name: str, case: Golden) -> None:
        algorithm, _, plan = self.public(lab, name, case)
        found = algorithm.events(plan)
        assert [(e.sampling_rate, e.count) for e in found] == [(e.sampling_rate, e.count) for e in case.events]
        assert [e.noise_multiplier for e in found] == pytest.approx([e.noise_multiplier for e in case.events])

    def test_what_holds_from_the_next_step_on(self, lab: Any, name: str, case: Golden) -> None:
        algorithm, public, plan = self.public(lab, name, case)
        release = algorithm.side_release
        noised = torch.tensor(case.released or (), dtype=torch.float32)
        later = {} if release is None else release.later(noised, public, lab.facts(plan))
        kept = set() if release is None else release.keeps
        assert later.keys() - kept == case.later.keys()
        for value, expected in case.later.items():
            assert later[value].tolist() == pytest.approx(expected, rel=1e-5)


class TestGoldenOfAStep:
    """What becomes of a noisy sum, and of the parameters, in each algorithm's golden cases."""

    @pytest.mark.parametrize(("name", "case"), CASES)
    def test_what_the_optimiser_is_given(self, lab: Any, name: str, case: Golden) -> None:
        algorithm = algorithm_settings(name, case.options).build()
        trainer = lab.trainer(name, algorithm=algorithm)
        facts = lab.facts(sensitivity=torch.tensor(case.sensitivity))
        plain = ((3, 3), (-1, -1)) if type(algorithm.update) is Update else ()
        for step, (noisy_sum, expected) in enumerate(case.updates or plain):
            given = trainer.updating.direction(torch.full((21,), float(noisy_sum)), replace(facts, step=step))
            assert given.tolist() == pytest.approx([expected] * 21, rel=1e-5)

    @pytest.mark.parametrize(("name", "case"), CASES)
    def test_what_leaves_the_run(self, lab: Any, name: str, case: Golden) -> None:
        algorithm, model = algorithm_settings(name, case.options).build(), nn.Linear(6, 3)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        trainer = lab.trainer(name, algorithm=algorithm, model=model)
        for parameters, expected in case.leaves or ((1, 1), (2, 2)):
            trainer.engine.load_(torch.full((21,), float(parameters)))
            trainer.releasing.follow()
            for left in trainer.released_model().parameters():
                assert left.flatten().tolist() == pytest.approx([expected] * left.numel(), rel=1e-5)


STATEFUL = ("sampling", "contributing", "updating", "accepting", "given", "releasing")
REMEMBERING: dict[str, list[dict[str, Any]]] = {
    "custom": [
        {
            "update": "outer_momentum",
            "released_weights": {"name": "average", "decay": 0.9},
            "side_release": {"name": "group_clip_counts", "every": 5},
        }
    ]
}
"""Settings, besides the defaults, with which more parts remember something."""


def remembering(name: str) -> str | None:
    """An optimiser with a state, where the algorithm takes one."""
    return "adam" if algorithm_settings(name).build().optimizer is None else None


def at_its_beginning(lab: Any, name: str) -> Trainer:
    """A new trainer at the beginning of its first epoch."""
    trainer: Trainer = lab.trainer(name)
    trainer.begin_epoch(0)
    return trainer


@pytest.fixture(scope="module")
def begun(lab: Any) -> Callable[[str], Trainer]:
    """A trainer of each algorithm at the beginning of its first epoch, made once: no test takes a step with it."""
    return functools.cache(functools.partial(at_its_beginning, lab))


@pytest.fixture(scope="module")
def plain(lab: Any) -> Callable[[str], Any]:
    """What a training of each algorithm with its defaults ends in, trained once."""
    return functools.cache(lambda name: lab.trained(name))


@pytest.fixture(scope="module")
def watched(lab: Any) -> Callable[[str], Any]:
    """How a longer training of each algorithm is set up, with a state and diagnostics, and what it ends in, once."""

    @functools.cache
    def of(name: str) -> Any:
        full_batch = name == "psasc_momentum_gd"  # its every step ends an epoch, whose row is wanted before it is left
        plan = lab.plan(epochs=8 if full_batch else 3)
        how = {"plan": plan, "optimizer": remembering(name), "diagnostics": not full_batch}
        return how, lab.trained(name, **how)

    return of


SIZES = st.sampled_from([0.0, 1e-30, 1e-8, 0.1, 1.0, 3.0, 1e8, 1e30]) | st.floats(0, 2.0**99, width=32)


@pytest.mark.parametrize("name", PRIVATE)
class TestSensitivity:
    """Point 1: whoever joins or leaves moves the sum by at most Δ, and nobody else's weight."""

    def released(self, lab: Any, trainer: Any, values: Sequence[float]) -> dict[str, Tensor]:
        """Public values of a step after an arbitrary noised side statistic."""
        algorithm, plan = trainer.algorithm, trainer.plan
        public = trainer.public_values(trainer.segments[0])
        if algorithm.side_release is not None:
            exact = algorithm.side_release.statistic(torch.zeros(0), torch.zeros(0, dtype=torch.long), public, plan)
            noised = torch.tensor([values[i % len(values)] for i in range(len(exact))], dtype=torch.float32)
            public |= algorithm.side_release.consequences(noised, public, public, lab.facts(plan))[1]
        return public

    @settings(max_examples=60)
    @given(norm=SIZES, values=st.lists(st.floats(-50, 50), min_size=1, max_size=6))
    def test_weighted_norms_stay_within_the_bound(
        self, lab: Any, begun: Any, name: str, norm: float, values: list[float]
    ) -> None:
        trainer = begun(name)
        public = self.released(lab, trainer, values)
        groups = torch.arange(3)
        weights = trainer.weights(torch.full((3,), norm), groups, public)
        delta = float(sensitivity(trainer.algorithm.weights, public))
        assert weights.isfinite().all()
        assert (weights >= 0).all()
        assert math.isfinite(delta)
        assert delta > 0
        assert (weights.double() * norm <= delta * (1 + 1e-5)).all()

    @settings(max_examples=20)
    @given(values=st.lists(st.floats(-50, 50), min_size=1, max_size=6))
    def test_non_finite_norms_weigh_nothing(self, lab: Any, begun: Any, name: str, values: list[float]) -> None:
        trainer = begun(name)
        norms = torch.tensor([math.inf, math.nan, 1.0])
        weights = trainer.weights(norms, torch.arange(3), self.released(lab, trainer, values))
        assert weights[:2].tolist() == [0.0, 0.0]
        assert weights[2] >= 0

    def test_a_record_moves_the_sum_by_at_most_the_sensitivity(self, lab: Any, name: str) -> None:
        records = lab.records(40)
        for row, value in enumerate((1e-30, 1e8, math.inf, math.nan, 0.0, 1e19)):  # adversarial inputs
            records.features[row] = value
        trainer = lab.trainer(name, records=records, plan=lab.plan(epochs=3))
        trainer.run_steps(2)  # what a part remembers of records must not widen their influence either
        trainer.begin_epoch(0)
        everyone = torch.arange(40)
        for values in ((0.0,), (5.0, -2.0, 30.0), (-9.0,), (50.0, 0.5)):
            public = self.released(lab, trainer, values)
            delta = float(sensitivity(trainer.algorithm.weights, public))
            whole = trainer.weighted_sum([trainer.population.batch(everyone)], public)
            assert whole.isfinite().all()
            for out in (0, 1, 2, 3, 4, 5, 20, 39):
                rest = trainer.weighted_sum([trainer.population.batch(everyone[everyone != out])], public)
                assert float((whole - rest).norm()) <= delta * (1 + 1e-4)

    def test_no_weight_depends_on_the_others(self, lab: Any, begun: Any, name: str) -> None:
        trainer = begun(name)
        public = self.released(lab, trainer, (3.0, 1.0))
        norms, groups = torch.logspace(-3, 3, 20), torch.arange(20) % 3
        together = trainer.weights(norms, groups, public)
        alone = torch.cat([trainer.weights(norms[i : i + 1], groups[i : i + 1], public) for i in range(20)])
        assert torch.equal(together, alone)

    def test_rate_steps_and_denominator_follow_from_the_declared_size(self, lab: Any, name: str) -> None:
        full, plan = lab.records(40), lab.plan()
        fewer = full.take(torch.arange(39))
        trainers = [lab.trainer(name, records=r, plan=plan) for r in (full, fewer)]
        assert trainers[0].plan == trainers[1].plan
        assert trainers[0].algorithm.events(plan) == trainers[1].algorithm.events(plan)


JOINT: dict[str, list[dict[str, Any]]] = {
    "dpsgd_quantile": [
        {"counts_below": kappa, "count_noise_multiplier": level, "centred": centred}
        for kappa, level in ((0.6, 1.25), (0.6, 1.0), (0.99, "2x"), (0.01, 0.3))
        for centred in (False, True)
    ],
    "dpsgd_global_adapt": [
        {"counted": "below", "threshold": tau, "count_noise_multiplier": level}
        for tau, level in ((0.6, 1.25), (0.6, 1.0), (1.0, 1.0), (1.5, 1.0))
    ],
    "dpsgd_bounded": [{"count_noise_multiplier": 1.0}, {"counts_below": 0.5}],
    "soft_adaclip": [
        {"counts_below": kappa, "count_noise_multiplier": level}
        for kappa, level in ((0.6, 1.25), (0.6, 1.0), (1.5, 1.1))
    ],
    "slaclip": [{"slots": 2}, {"slots": 64}],
    "dc_sgd_p": [{"count_noise_multiplier": 1.0, "bins": 3}],
    "dpsgd_f_slack": [{"count_noise_multiplier": level, "memory": 0.5} for level in (0.75, "2x", "100x")],
    "custom": [
        {"weights": rule, "side_release": {"name": "slack", "slots": 3}} for rule in ("soft", "psasc", "own_threshold")
    ]
    + [
        {"weights": rule, "side_release": {"count_noise_multiplier": 1.1, **release}, "schedule": "phases"}
        for rule, release in (
            ("scale_or_drop", {"name": "strict_bound", "counted": "below", "threshold": 0.8}),
            ("scale_or_clip", {"name": "strict_bound", "counted": "below", "threshold": 0.8}),
            ("scale_or_clip", {"name": "quantile", "counts_below": 0.5}),
            ("own_threshold", {"name": "quantile", "counts_below": 0.5}),
            ("psasc", {"name": "quantile", "counts_below": 0.5}),
            ("flat", {"name": "quantile", "counts_below": 0.5}),
            ("flat", {"name": "balanced_clip_counts"}),
        )
    ],
}
"""Settings of side releases whose joint bound depends on what a short gradient adds."""
BESIDE = [
    pytest.param(name, options, id=f"{name}-{number}")
    for name in STATISTICS
    for number, options in enumerate([{}, *JOINT.get(name, [])])
] + [pytest.param("custom", options, id=f"custom-{number}") for number, options in enumerate(JOINT["custom"])]


def edges(values: list[float]) -> list[float]:
    """Each value in float32, and its two neighbours."""
    exact = torch.tensor(values)
    ends = [torch.nextafter(exact, torch.tensor(towards)) for towards in (0.0, math.inf)]
    return torch.cat([exact, *ends]).tolist()


def furthest(algorithm: Any, plan: Any, carried: dict[str, Tensor], facts: Any, noise: float) -> tuple[float, float]:
    """The largest (w·n/Δ)²/σ² + h²/σ_1² that a search over records finds, and the norm it is found at.

    The record is put into a batch; its statistic and weight are read off, and nothing that the parts say of themselves.
    """
    release, rule, worst = algorithm.side_release, algorithm.weights, (0.0, 0.0)
    seen = [value for name, value in carried.items() if name not in release.keeps]
    sizes = sorted({1.0, *algorithm.initial.values(), *torch.cat([value.reshape(-1) for value in seen]).tolist()})
    shares = [0.0, 0.01, 0.5, 0.6, 0.8, 0.99, 1.0, 1.5, 1e-30, 1e9]
    shares += [10 ** (power / 8) for power in range(-32, 33)]
    norms = torch.tensor(edges([size * share for size in sizes for share in shares]))
    others, of_others = torch.tensor([0.3, 2.0, 0.0]) * sizes[-1], torch.tensor([0, 1, 1])
    without = release.statistic(others, of_others, carried, plan)
    for group in range(plan.groups):
        ids = torch.cat([of_others, torch.tensor([group])])
        moved = torch.stack([release.statistic(torch.cat([others, n]), ids, carried, plan) for n in norms.split(1)])
        moved = (moved - without).double().norm(dim=1) / release.noise(plan)
        for noised in (without, torch.zeros_like(without), torch.linspace(40, -5, len(without))):
            public = carried | release.consequences(noised, carried, carried, facts)[1]
            seen = per_record(public, torch.full((len(norms),), group))
            added = (rule.weights(norms, seen) * seen["scale"]).double() * norms
            joint = (added / (float(sensitivity(rule, public)) * noise)) ** 2 + moved**2
            worst = max(worst, (float(joint.max()), float(norms[joint.argmax()])))
    return worst


def remembered(algorithm: Any, carried: dict[str, Tensor], facts: Any) -> list[dict[str, Tensor]]:
    """Values to be carried into a step: those given, and what releases make of them, likely ones and others."""
    release, states = algorithm.side_release, [carried]
    nobody = release.statistic(torch.zeros(0), torch.zeros(0, dtype=torch.long), carried, facts.plan)
    for noised in (torch.linspace(3, 1, len(nobody)), torch.linspace(-5, 40, len(nobody))):
        states.append(states[-1] | release.consequences(noised, states[-1], states[-1], facts)[0])
    return states


class TestJointBound:
    """A side release and the weighted sum beside it: no record moves both by more than the step is charged for."""

    @pytest.mark.parametrize(("name", "options"), BESIDE)
    @pytest.mark.parametrize("size", [1.0, *(pytest.param(size, marks=pytest.mark.slow) for size in (1e-6, 3e4))])
    def test_no_record_is_found_that_moves_both_by_more(
        self, lab: Any, name: str, options: dict[str, Any], size: float
    ) -> None:
        algorithm, plan = lab.trainer(name, options).algorithm, lab.plan()
        start = tensors(algorithm.initial, "cpu")
        led = {key: value * size for key, value in start.items() if key in algorithm.side_release.steers - {"scale"}}
        for segment in algorithm.schedule.segments(plan):
            noise = plan.noise_multiplier * segment.noise
            charged = algorithm.step_event(plan, QUARTER, noise).noise_multiplier
            facts, states = lab.facts(plan), [start | led]
            if size == 1.0 and algorithm.side_release.tied and algorithm.side_release.keeps:
                states = remembered(algorithm, start, facts)
            tries = [furthest(algorithm, plan, scheduled(state, segment), facts, noise) for state in states]
            found, norm = max(tries)
            assert found * charged**2 <= 1 + 1e-5, norm
            loose = ("ScaleOrClip", "OwnThreshold", "AdaptiveScaling", "SoftClip")
            tight = type(algorithm.weights).__name__ not in loose or name == "soft_adaclip"
            assert found * charged**2 > (0.99 if tight else 0.5), "far from tight"

    @pytest.mark.parametrize("name", sorted(OWN_PARTS["weights"].keys() - {"unit"}))
    @pytest.mark.parametrize("unit", ["clip_norm", "strict_clip_norm", "another"])
    def test_a_record_that_is_short_by_any_unit_adds_no_more_than_its_rule_says(self, name: str, unit: str) -> None:
        """Whatever the public values are: a release may lead the unit, and not the bound."""
        rule = OWN_PARTS["weights"][name]()
        values = dict.fromkeys(sorted({unit, *rule.reads, "scale"}), 1.0)
        for number, upto in itertools.product(range(64), (0.01, 0.6, 1.0, 3.0)):
            drawn = torch.rand(len(values), generator=torch.Generator().manual_seed(number)) * 8 - 4
            public = {key: 10**power for key, power in zip(values, drawn, strict=True)}
            norms = torch.cat([torch.tensor([1.0]), torch.logspace(-6, 0, 200)]) * upto * public[unit]
            added = float((rule.weights(norms, public) * norms).max() / rule.bound(public).max())
            assert added <= rule.reach(unit, upto) * (1 + 1e-5)

    @pytest.mark.parametrize(("name", "options"), BESIDE)
    def test_a_record_moves_a_statistic_by_no_more_than_its_sensitivity(
        self, lab: Any, name: str, options: dict[str, Any]
    ) -> None:
        algorithm, plan = lab.trainer(name, options).algorithm, lab.plan()
        side, public = algorithm.side_release, tensors(algorithm.initial, "cpu")
        norms = torch.tensor([0.0, 1e-30, 0.3, 0.99, 1.0, 1.01, 5.0, 60.0, 1e30, 0.5])
        groups = torch.arange(len(norms)) % plan.groups
        whole, moved = side.statistic(norms, groups, public, plan), []
        for k in range(len(norms)):
            left = torch.arange(len(norms)) != k
            moved.append(float((whole - side.statistic(norms[left], groups[left], public, plan)).norm()))
        assert 0 < max(moved) <= side.sensitivity() * (1 + 1e-6)

    def test_a_release_without_a_bound_of_its_own_is_charged_as_if_one_record_moved_both(self, lab: Any) -> None:
        plan = lab.plan()
        for name in sorted(set(STATISTICS) - {"soft_adaclip", "slaclip", "dpsgd_f_slack"}):
            algorithm = algorithm_settings(name).build()
            side = algorithm.side_release
            assert algorithm.step_event(plan, 0.5, 0.9) == Event(0.5, fuse(0.9, side.noise(plan) / side.sensitivity()))

    def test_a_count_that_is_free_leaves_events_and_published_figure_as_they_are_without_it(self, lab: Any) -> None:
        plan, plain = lab.plan(epochs=3), algorithm_settings("dpsgd").build()
        slack = algorithm_settings("slaclip").build()
        assert slack.events(plan) == plain.events(plan)
        assert slack.published_epsilon(plan) == plain.published_epsilon(plan)
        for name in ("dpsgd_quantile", "dpsgd_global_adapt"):
            free = algorithm_settings(name, JOINT[name][0]).build()
            assert free.events(plan) == plain.events(plan)
            assert free.published_epsilon(plan) == plain.published_epsilon(plan)
            louder = algorithm_settings(name, {**JOINT[name][0], "count_noise_multiplier": 1.2}).build()
            assert louder.events(plan)[0].noise_multiplier < 1.0
            assert "left out" in louder.published_epsilon(plan).formula

    def test_epsilon_of_one_joint_release_by_hand(self, lab: Any) -> None:
        # one step on everybody: a Gaussian of μ² = 0.6²/1 + 1/1² = 1.36, δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ)
        release = {"name": "quantile", "counts_below": 0.6, "count_noise_multiplier": 1.0}
        algorithm = algorithm_settings("custom", {"sampler": "full_batch", "side_release": release}).build()
        mu = 1.36**0.5

        def delta(epsilon: float) -> float:
            far = stats.norm.cdf(-mu / 2 - epsilon / mu)
            return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * far - 1e-5

        expected = optimize.brentq(delta, 0, 50)
        assert algorithm.epsilon(lab.plan()).value == pytest.approx(expected, rel=1e-3)
        assert expected == pytest.approx(5.2351, abs=1e-4)

    @pytest.mark.parametrize("chunk", [None, 3])
    def test_a_model_that_draws_is_weighed_at_the_norm_it_was_counted_at(self, lab: Any, chunk: int | None) -> None:
        model = nn.Sequential(nn.Linear(6, 20), nn.Dropout(0.5), nn.Linear(20, 3))
        options = {"counts_below": 0.6, "count_noise_multiplier": 1.25}
        trainer = lab.trainer("dpsgd_quantile", options, model=model, physical_batch_size=chunk)
        seen, norms = [], trainer.contributing.norms
        trainer.contributing.norms = lambda batch: seen.append(norms(batch).clone()) or seen[-1]
        for _ in range(4):
            seen.clear()
            trainer.run_steps(1)
            if chunk is None:
                assert len(seen) == 1
                continue
            counted, weighed = torch.cat(seen[: len(seen) // 2]), torch.cat(seen[len(seen) // 2 :])
            assert len(counted) > chunk
            assert torch.equal(counted, weighed)

    def test_a_record_that_the_model_writes_into_is_weighed_at_the_norm_it_was_counted_at(self, lab: Any) -> None:
        class Lowering(nn.Module):
            """Seldom enough for no trial of the model to show it."""

            def forward(self, features: Tensor) -> Tensor:
                features[features > 2] -= 2
                return features

        records = lab.records(40)
        records.features.clamp_(-2, 2)
        records.features[10::4, 0] = 9.0
        trainer = lab.trainer(
            "dpsgd_quantile",
            {"counts_below": 0.6, "count_noise_multiplier": 1.25},
            records=records,
            model=nn.Sequential(Lowering(), nn.Linear(6, 3)),
            physical_batch_size=3,
        )
        seen, norms = [], trainer.contributing.norms
        trainer.contributing.norms = lambda batch: seen.append(norms(batch).clone()) or seen[-1]
        for _ in range(4):
            seen.clear()
            trainer.run_steps(1)
            counted, weighed = torch.cat(seen[: len(seen) // 2]), torch.cat(seen[len(seen) // 2 :])
            assert len(counted) > 3
            assert torch.equal(counted, weighed)

    def test_a_bound_of_ones_own_is_taken_to_rest_on_the_norm(self) -> None:
        class Own(GroupSizeCounts):
            def joint_noise(self, rule: Any, plan: Any, noise_multiplier: float) -> float:
                return noise_multiplier

        assert Own().tied
        assert not GroupSizeCounts().tied

    def test_a_part_that_changes_what_it_adds_does_not_inherit_the_bound(self, lab: Any) -> None:
        class Longer(FlatClip):
            def weights(self, norms: Tensor, public: Any) -> Tensor:
                return public["clip_norm"] / norms.clamp(min=1e-12)

        class Everyone(QuantileCount):
            def statistic(self, norms: Tensor, groups: Tensor, public: Any, plan: Any) -> Tensor:
                return torch.full((1,), float(len(norms)))

        class Later(QuantileCount):
            every: int = 2

        free = algorithm_settings("dpsgd_quantile", {"counts_below": 0.6, "count_noise_multiplier": 1.25}).build()
        settings = free.side_release.model_dump()
        full, plan = fuse(1.0, 1.25), lab.plan()
        for changed, expected in (
            ({"weights": Longer()}, full),
            ({"side_release": Everyone(**settings)}, full),
            ({"side_release": Later(**settings)}, 1.0),
        ):
            assert replace(free, **changed).step_event(plan, 0.5, 1.0).noise_multiplier == pytest.approx(expected)

    @pytest.mark.parametrize("times", [0.5, 1.0, 2.0])
    def test_slack_beside_gradients_of_another_noise_is_charged_by_whichever_is_less(
        self, lab: Any, times: float
    ) -> None:
        """A record without a gradient moves the slots alone, and one as long as the bound the sum alone."""
        plan, side = lab.plan(), Slack()
        noise = side.noise(plan)
        charged = side.joint_noise(FlatClip(), plan, times * noise)
        assert charged == pytest.approx(min(times, 1.0) * noise)
        slots = side.statistic(
            torch.zeros(1), torch.zeros(1, dtype=torch.int64), tensors({"clip_norm": 1.0}, "cpu"), plan
        )
        assert float(slots.norm()) == pytest.approx(1.0)

    def test_a_bound_by_a_unit_that_records_are_not_weighed_by_is_not_used(self, lab: Any) -> None:
        """A record that is counted as short of one bound may add all of Δ by another."""

        class Gives(QuantileCount):
            gives: ClassVar[frozenset[str]] = frozenset({"clip_norm"})

            def now(self, noised: Tensor, public: Any, facts: Any) -> dict[str, Tensor]:
                return {"clip_norm": public["clip_norm"] / 2}

        class GivesBesideSlack(Slack):
            gives: ClassVar[frozenset[str]] = frozenset({"clip_norm"})

            def now(self, noised: Tensor, public: Any, facts: Any) -> dict[str, Tensor]:
                return {"clip_norm": public["clip_norm"] / 2}

        class Elsewhere(Slack):
            def added(self) -> tuple[Added, ...]:
                return tuple(replace(piece, unit="scale") for piece in super().added())

            def statistic(self, norms: Tensor, groups: Tensor, public: Any, plan: Any) -> Tensor:
                return super().statistic(norms, groups, {"clip_norm": public["scale"]}, plan)

        plan = lab.plan()
        sides = (Gives(counts_below=0.6, count_noise_multiplier=1.25), GivesBesideSlack(), Elsewhere())
        for side in sides:
            both = fuse(plan.noise_multiplier, side.noise(plan))
            assert side.joint_noise(FlatClip(), plan, plan.noise_multiplier) == pytest.approx(both)

    def test_a_release_of_ones_own_is_not_charged_by_the_proof_of_the_one_it_is_made_of(self, lab: Any) -> None:
        class Unshared(SlackClipCounts):
            """Counts each record in full, whatever the gradient leaves of Δ."""

            def statistic(self, norms: Tensor, groups: Tensor, public: Any, plan: Any) -> Tensor:
                return GroupClipCounts.statistic(self, norms, groups, self._base(public), plan)

        plan, slack = lab.plan(), algorithm_settings("dpsgd_f_slack").build()
        own = replace(slack, side_release=Unshared(**slack.side_release.model_dump()))
        sigma, noise = plan.noise_multiplier, slack.side_release.noise(plan)
        assert slack.step_event(plan, 0.5, sigma).noise_multiplier == pytest.approx(noise)
        assert own.step_event(plan, 0.5, sigma).noise_multiplier == pytest.approx(fuse(sigma, noise))
        assert slack.side_release.additive
        assert not own.side_release.additive  # it may be no sum over records any more

    def test_a_bound_that_leaves_long_gradients_out_is_refused(self, lab: Any) -> None:
        class Short(QuantileCount):
            def added(self) -> tuple[Added, ...]:
                return super().added()[:1]

        algorithm = algorithm_settings("dpsgd_quantile").build()
        with pytest.raises(ValueError, match=r"Short\.added must end with a piece for every norm"):
            replace(algorithm, side_release=Short(counts_below=0.5)).events(lab.plan())


def heard(part: Any, method: str) -> list[Tensor]:
    """What this part's method is called with from now on."""
    call, given = getattr(part, method), []

    def listen(value: Tensor, *others: Any) -> Tensor:
        given.append(value.clone())
        return call(value, *others)

    setattr(part, method, listen)
    return given


@pytest.mark.parametrize("name", PRIVATE)
class TestNoise:
    """Point 2: what is added is N(0, σ²Δ²) in every coordinate, also when nobody was sampled."""

    def test_its_delta_is_that_of_the_values_by_which_records_are_weighed(
        self, lab: Any, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer = lab.trainer(name, plan=lab.plan(epochs=3))
        honest, seen = trainer.weighted_sum, list[Public]()

        def weighted(batches: Any, public: Public, *more: Any, **how: Any) -> Tensor:
            seen.append(dict(public))
            return honest(batches, public, *more, **how)

        monkeypatch.setattr(trainer, "weighted_sum", weighted)
        for _ in range(3):
            seen.clear()
            trainer.run_steps(1)
            (delta,) = {float(sensitivity(trainer.algorithm.weights, public)) for public in seen}
            assert float(trainer.shown["sensitivity"]) == delta

    @pytest.mark.parametrize("coins", [None, False], ids=["sampled", "empty_batch"])
    def test_with_zero_gradients_only_noise_is_left(self, lab: Any, name: str, coins: bool | None) -> None:
        records = lab.records(40, features=400)
        plan = lab.plan(noise_multiplier=0.7)
        trainer = lab.trainer(
            name,
            records=records,
            plan=plan,
            loss=lab.zero_loss,
            model=nn.Linear(400, 3, bias=False),
            random=lab.random(5, coins=coins),
            learning_rate=1.0,
        )
        before, sums = trainer.engine.flatten(), heard(trainer.updating, "direction")
        trainer.run_steps(1)
        moved = before - trainer.engine.flatten()
        taken = trainer.algorithm.acceptance.always or bool(moved.any())
        if type(trainer.updating) is Updating and taken:  # others are held to what they promise in tests of their own
            torch.testing.assert_close(moved, sums[0] / trainer.plan.batch_size, rtol=1e-4, atol=1e-5)
        sigma = trainer.shown["noise_multiplier"]
        scaled = sums[0] / float(trainer.shown["sensitivity"])
        assert stats.kstest(scaled.numpy(), stats.norm(0, float(sigma)).cdf).pvalue > 1e-3

    def test_an_empty_batch_is_charged_like_any_other(self, lab: Any, name: str) -> None:
        run = lab.trained(name, random=lab.random(coins=False))
        assert run.trainer.algorithm.covers(run.trainer.plan, run.trainer.ledger.events)
        assert run.trainer.steps_done == run.trainer.plan.steps

    def test_two_seeds_differ_only_in_their_randomness(self, lab: Any, plain: Any, name: str) -> None:
        first = plain(name).parameters
        again, other = (lab.trained(name, random=lab.random(seed)).parameters for seed in (0, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
class TestSampling:
    """Point 3: every unit enters on its own coin, at the rate that is charged."""

    def test_inclusion_rates_and_independence(self, lab: Any, name: str) -> None:
        trainer = lab.trainer(name)
        trainer.begin_epoch(0)
        rates, drawn = trainer.sampling.rates().double(), torch.zeros(2000, 40, dtype=torch.float64)
        for row in drawn:
            row[trainer.draw().units] = 1
        for rate, total in zip(rates.tolist(), drawn.sum(0).tolist(), strict=True):
            assert stats.binomtest(int(total), len(drawn), rate).pvalue > 1e-3 / 40
        if (rates == 1).all():
            return
        correlation = torch.corrcoef(drawn.T).nan_to_num().fill_diagonal_(0)
        assert correlation.abs().max() < 5 / math.sqrt(len(drawn))
        spread = float((rates * (1 - rates)).sum())  # of a sum of independent coins; 0 for a fixed batch size
        assert float(drawn.sum(1).var()) == pytest.approx(spread, rel=0.2)


@pytest.mark.parametrize("name", PRIVATE)
class TestLedger:
    """Point 4: what is charged is what was announced, before anybody sees the step."""

    def test_a_run_charges_what_was_announced(self, lab: Any, name: str) -> None:
        plan = lab.plan(epochs=3)
        run = lab.trained(name, plan=plan)
        algorithm, spent = run.trainer.algorithm, run.trainer.ledger.events
        assert algorithm.covers(plan, spent)
        assert not algorithm.covers(plan, [*spent] * 30)
        if algorithm.fixed and not algorithm.acceptance.candidate_events(plan):
            # in any order: releases at chosen steps stand between others, which epochs divide
            assert counted(spent) == counted(algorithm.events(plan))
        assert len(run.history) == 3

    def test_a_step_is_charged_before_it_is_seen(self, lab: Any, name: str) -> None:
        def refuse(event: Event) -> None:
            raise RuntimeError("the journal cannot be written")

        trainer = lab.trainer(name, ledger=Ledger(journal=refuse))
        before = trainer.engine.flatten()
        with pytest.raises(RuntimeError, match="journal"):
            trainer.train(progress=False)
        assert torch.equal(before, trainer.engine.flatten())
        assert not trainer.shown

    def test_the_published_figure_names_its_formula(self, lab: Any, name: str) -> None:
        published = algorithm_settings(name).build().published_epsilon(lab.plan())
        assert published is not None
        assert published.value > 0
        assert len(published.formula) > 20

    def test_says_how_it_samples_and_what_it_releases(self, name: str) -> None:
        algorithm = algorithm_settings(name).build()
        assert algorithm.name == name
        assert "lesion" in algorithm.sampler.description("lesion")
        releases = [part.released for part in algorithm.parts if part.released]
        charged = algorithm.side_release is not None or algorithm.sampler.gives or not algorithm.acceptance.always
        assert bool(releases) == bool(charged), "side release, acceptance that refuses: say in `released` what is told"

    def test_more_noise_costs_less(self, lab: Any, name: str) -> None:
        algorithm = algorithm_settings(name).build()
        costs = [algorithm.published_epsilon(lab.plan(noise_multiplier=s)).value for s in (0.8, 1.6)]
        assert costs[0] > costs[1]


RELEASING = [*((name, {}) for name in PRIVATE), ("sa_dpsgd", {"energy": "private"}), ("dpis", {"adaptive_clip": True})]


@pytest.mark.parametrize(("name", "options"), RELEASING)
def test_nothing_is_noised_before_its_event_is_in_the_ledger(lab: Any, name: str, options: dict[str, Any]) -> None:
    """A crash between the two would leave a release that nobody has charged."""
    charges, noised = list[Event](), list[int]()

    class Watching(lab.random):
        def perturb(self, values: Tensor, **how: Any) -> Tensor:
            noised.append(len(charges))
            return super().perturb(values, **how)

    ledger = Ledger(journal=charges.append)
    trainer = lab.trainer(name, options, plan=lab.plan(epochs=2), random=Watching(), ledger=ledger)
    trainer.train(progress=False)
    each = 1 if trainer.algorithm.side_release is None else 2  # of a step: its statistic, and its sum
    assert len(noised) >= len(charges) == ledger.count > 0
    for number, charged in enumerate(noised, start=1):
        assert number <= each * charged


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
class TestTraining:
    """What holds for the loop whichever algorithm runs in it."""

    @pytest.mark.parametrize("size", [1, 7])
    def test_chunking_does_not_change_the_result(self, lab: Any, plain: Any, name: str, size: int) -> None:
        chunked = lab.trained(name, physical_batch_size=size).parameters
        torch.testing.assert_close(chunked, plain(name).parameters, rtol=1e-4, atol=1e-5)

    def test_units_of_several_records_train(self, lab: Any, name: str) -> None:
        records = replace(lab.records(40), unit=torch.arange(40) // 2)
        population = Population(records, records.groups["class"], by_unit=True)
        run = lab.trained(name, records=records, population=population, plan=lab.plan(records=20, batch_size=5))
        assert run.parameters.isfinite().all()
        if name == "sgd":  # a unit's gradient is the mean over its records, with privacy or without
            private = lab.trained(
                "dpsgd",
                {"clip_norm": 1e6},
                random=lab.random(noise=0.0),
                records=records,
                population=population,
                plan=run.trainer.plan.__class__(20, 5, 1, 3, 1e-5, 1.0),
            )
            torch.testing.assert_close(run.parameters, private.parameters, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
    def test_every_optimiser_steps_or_is_refused_beside_another(self, lab: Any, name: str, optimizer: str) -> None:
        if algorithm_settings(name).build().optimizer not in (None, optimizer):
            with pytest.raises(
                EquidpError, match=f"{name} brings its own optimiser, and training.optimizer={optimizer}"
            ):
                lab.trainer(name, optimizer=optimizer)
            return
        run = lab.trained(name, optimizer=optimizer)
        assert run.parameters.isfinite().all()
        assert len(run.history) == 1

    def test_diagnostics_do_not_change_the_run_and_say_what_they_are(self, lab: Any, plain: Any, name: str) -> None:
        run, watched = plain(name), lab.trained(name, diagnostics=True)
        assert torch.equal(run.parameters, watched.parameters)
        extra = set(watched.history[0]) - set(run.history[0])
        assert extra
        assert all(column.startswith("nonprivate/") for column in extra)

    @pytest.mark.parametrize("stop_after", [1, 6])
    def test_a_resumed_run_is_bit_identical(self, lab: Any, watched: Any, name: str, stop_after: int) -> None:
        how, whole = watched(name)

        class Stop(Exception):  # noqa: N818
            pass

        def leave() -> None:
            if first.steps_done == stop_after:
                raise Stop

        first = lab.trainer(name, **how)
        with pytest.raises(Stop):
            first.train(on_step=leave, progress=False)
        saved, spent = first.state_dict(), first.ledger.events
        first.engine.load_(torch.zeros_like(first.engine.flatten()))  # the copy must not follow the original
        second = lab.trainer(name, **how, model_seed=7, random=lab.random(99), ledger=Ledger(spent))
        second.load_state_dict(saved)
        history = second.train(progress=False)
        assert torch.equal(second.engine.flatten(), whole.parameters)
        assert second.ledger.events == whole.trainer.ledger.events
        assert history == whole.history[-len(history) :]

    @pytest.mark.parametrize("stop_after", [3, 6])
    def test_what_a_part_remembers_reaches_what_is_released_through_a_resume(
        self, lab: Any, name: str, stop_after: int
    ) -> None:
        """Also the other way round: a run that forgot any part's state would leave other weights, and fail this."""
        for options in ({}, *REMEMBERING.get(name, ())):
            how: dict[str, Any] = {
                "plan": lab.plan(epochs=12 if name == "psasc_momentum_gd" else 4),
                "learning_rate": 2.0,
            }
            whole, first = lab.trained(name, options, **how), lab.trainer(name, options, **how)
            fresh = first.state_dict()
            first.run_steps(stop_after)
            saved, spent = first.state_dict(), first.ledger.events

            def left(state: dict[str, Any], options: dict[str, Any] = options, how: dict[str, Any] = how,
                     spent: Sequence[Event] = spent) -> list[float]:  # fmt: skip
                again = lab.trainer(name, options, **how, ledger=Ledger(spent))
                again.load_state_dict(state)
                again.train(progress=False)
                return [v for p in again.released_model().parameters() for v in p.flatten().tolist()]

            assert left(saved) == whole.released.tolist()
            for part in STATEFUL:
                if saved.get(part):
                    with contextlib.suppress(ZeroDivisionError):  # of sums that were never released
                        assert left({**saved, part: fresh.get(part, {})}) != whole.released.tolist(), part

    def test_the_state_is_made_of_tensors_and_plain_values(self, lab: Any, name: str) -> None:
        def check(value: Any) -> None:
            if isinstance(value, dict):
                assert all(isinstance(key, str) for key in value)
                list(map(check, value.values()))
            elif isinstance(value, list | tuple):
                list(map(check, value))
            else:
                assert value is None or isinstance(value, Tensor | bool | int | float | str)

        check(lab.trained(name, optimizer=remembering(name), diagnostics=True).trainer.state_dict())

    def test_an_epoch_callback_sees_every_epoch_and_adds_columns(self, lab: Any, name: str) -> None:
        trainer = lab.trainer(name, plan=lab.plan(epochs=2))
        history = trainer.train(lambda row, model: {"accuracy": row["epoch"] / 10}, progress=False)
        assert [row["accuracy"] for row in history] == [0.1, 0.2]


class TestLimits:
    """Point 5: where two algorithms coincide, they coincide exactly."""

    def test_dpsgd_f_with_one_group_is_dpsgd_at_twice_the_base(self, lab: Any) -> None:
        # m̃ > 0: ρ^k = ρ, so C = 2·C_0; the count costs σ^eff
        release = algorithm_settings("dpsgd_f", {"ratio_over": "counted"}).build().side_release
        plan = lab.plan(groups=1)
        public = tensors({"clip_norm": 1.0}, "cpu")
        assert release.now(torch.tensor([3.2, 5.1]), public, lab.facts(plan))["clip_norm"].tolist() == [2.0]
        algorithm = algorithm_settings("dpsgd_f").build()
        assert algorithm.events(plan) == (Event(QUARTER, fuse(1.0, 10.0), 4),)

    def test_dpsgd_level_without_margin_is_dpsgd_f_adjusted_with_one_bound(self, lab: Any) -> None:
        level = lab.trained("dpsgd_level", {"margin": 0.0})
        adjusted = lab.trained("dpsgd_f_adjusted", {"max_clip_norm": 1.0})
        assert torch.equal(level.parameters, adjusted.parameters)
        assert level.trainer.ledger.events == adjusted.trainer.ledger.events

    def test_psasc_at_scale_one_is_psac(self, lab: Any) -> None:
        assert torch.equal(lab.trained("psasc", {"scale": 1.0}).parameters, lab.trained("psac").parameters)

    def test_sad_dpsgd_without_decay_is_dpsgd(self, lab: Any) -> None:
        sad = lab.trained("sad_dpsgd", {"noise_decay": 1.0, "clip_decay": 1.0})
        plain = lab.trained("dpsgd")
        assert torch.equal(sad.parameters, plain.parameters)
        assert sad.trainer.ledger.events == plain.trainer.ledger.events

    @pytest.mark.parametrize("name", ["dpsgd_tanh", "dpsgd_scatter"])
    def test_model_and_feature_changes_leave_the_mechanism(self, lab: Any, name: str) -> None:
        changed, plain = lab.trained(name), lab.trained("dpsgd")
        assert torch.equal(changed.parameters, plain.parameters)
        assert changed.trainer.ledger.events == plain.trainer.ledger.events

    def test_psasc_momentum_without_memory_is_psasc(self, lab: Any) -> None:
        forgetful = lab.trained("psasc_momentum", {"momentum_length": 0, "outer_momentum": 1.0})
        assert torch.equal(forgetful.parameters, lab.trained("psasc").parameters)

    def test_psasc_momentum_gd_with_all_weight_on_the_newest_is_full_batch_psasc(self, lab: Any) -> None:
        options = {"sampler": "full_batch", "weights": {"name": "psasc", "scale": 0.8}, "initial": {"clip_norm": 0.1}}
        newest = lab.trained("psasc_momentum_gd", {"momentum": 1.0}, plan=lab.plan(epochs=3))
        plain = lab.trained("custom", options, plan=lab.plan(epochs=3))
        torch.testing.assert_close(newest.parameters, plain.parameters, rtol=1e-5, atol=1e-7)
        assert newest.trainer.ledger.events == plain.trainer.ledger.events

    def test_dp_adambc_without_noise_to_take_out_is_adam(self, lab: Any) -> None:
        corrected = lab.trained("dp_adambc", {"variance_floor": 1e-12}, random=lab.random(noise=0.0),
                                plan=lab.plan(noise_multiplier=1e-4))  # fmt: skip
        plain = lab.trained("dpsgd", optimizer="adam", random=lab.random(noise=0.0))
        torch.testing.assert_close(corrected.parameters, plain.parameters, rtol=1e-3, atol=1e-3)

    def test_asc_without_steepness_is_dpsgd_at_a_higher_charge(self, lab: Any) -> None:
        level = lab.trainer("asc", {"steepness": 0.0, "size_noise_fraction": 1e-4})
        level.begin_epoch(0)
        assert level.sampling.rates().tolist() == pytest.approx([QUARTER] * 40)
        assert level.public_values(level.segments[0])["clip_norm"].tolist() == [1.0] * 3

    def test_soft_adaclip_at_a_long_bound_is_dpsgd(self, lab: Any) -> None:
        soft = lab.trained("soft_adaclip", {"clip_norm": 1e6, "clip_learning_rate": 1e-9}, random=lab.random(noise=0.0))
        plain = lab.trained("dpsgd", {"clip_norm": 1e6}, random=lab.random(noise=0.0))
        torch.testing.assert_close(soft.parameters, plain.parameters, rtol=1e-5, atol=1e-6)

    def test_sa_dpsgd_that_always_accepts_is_dpsgd(self, lab: Any) -> None:
        annealed = lab.trained("sa_dpsgd", {"max_rejections": 0, "clip_norm": 1.0})
        plain = lab.trained("dpsgd")
        assert torch.equal(annealed.parameters, plain.parameters)
        assert annealed.trainer.ledger.events == plain.trainer.ledger.events

    def test_dpis_of_long_gradients_is_dpsgd(self, lab: Any) -> None:
        # every n_i ≥ C, Ñ = N, K̃ = N·C: rate b/N, contribution C, noise σ·C, event (b/N, σ)
        records = lab.records(40)
        trainer = lab.trainer("dpis", {"clip_norm": 1e-3}, records=records, random=lab.random(noise=0.0))
        trainer.begin_epoch(0)
        segment = trainer.segments[0]
        assert trainer.sampling.rate == pytest.approx(QUARTER)
        assert trainer.sampling.noise(segment) == pytest.approx(1.0, rel=1e-5)
        public = trainer.public_values(segment)
        assert float(sensitivity(trainer.algorithm.weights, public)) == pytest.approx(1e-3)
        draw = trainer.draw()
        norms = trainer.norms_of_all()
        assert norms.min() > 1e-3
        # inclusion: b·ĝ/K̃ times n̄/ĝ is b·C/K̃ = b/N for everyone
        proposals = trainer.sampling.proposals
        final = trainer.sampling.rates() * (norms.double().clamp(max=1e-3) / proposals)
        torch.testing.assert_close(final, torch.full_like(final, QUARTER), rtol=1e-6, atol=0)
        weights = trainer.weights(norms, torch.zeros(40, dtype=torch.long), public)
        torch.testing.assert_close(weights * norms, torch.full((40,), 1e-3), rtol=1e-5, atol=0)
        assert len(draw.units) > 0

    def test_a_huge_bound_and_no_noise_is_sgd(self, lab: Any) -> None:
        private = lab.trained("dpsgd", {"clip_norm": 1e6}, random=lab.random(noise=0.0)).parameters
        torch.testing.assert_close(private, lab.trained("sgd").parameters, rtol=1e-5, atol=1e-6)
