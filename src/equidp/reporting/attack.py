"""What the guarantee leaves an attacker: the share of members recognised at a rate of false alarms."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

ATTACKS = {"loss": "loss threshold", "reference": "reference models"}
"""Attacks of membership inference, in words."""

ALARMS = (0.001, 0.01, 0.05, 0.1)
"""Rates of false alarms in the documents."""


def recognised(privacy: Mapping[str, Any], alarms: float) -> float:
    """Return an upper bound on the rate of recognised members at a rate of false alarms.

    It follows from the statement's trade-off curve if there is one, else from (ε, δ) alone, which never gives a smaller
    bound. Every test obeys TPR ≤ e^ε·FPR + δ and, with members and others exchanged, TPR ≤ 1 − e^−ε·(1 − δ − FPR).
    """
    epsilon, delta = privacy["epsilon"], privacy["delta"]
    factor = math.exp(min(epsilon, 700))
    bound = min(1.0, factor * alarms + delta, 1 - (1 - delta - alarms) / factor)
    curve = privacy.get("trade_off")
    if not curve:
        return bound
    # misses fall as false alarms rise, so between two points of the curve the misses at the next point are a bound
    place = bisect_left(curve["false_alarms"], alarms)
    return min(bound, 1 - curve["misses"][place]) if place < len(curve["misses"]) else bound


def from_curve(privacy: Mapping[str, Any]) -> bool:
    """Whether `recognised` reads the statement's curve."""
    return bool(privacy.get("trade_off"))


def factor_text(epsilon: float) -> str:
    """e^ε in four digits, rounded up: the factor by which the probability of any result may differ."""
    factor = math.exp(min(epsilon, 700))
    digits = 4 if factor < 1e6 else 3
    place = 10.0 ** (math.floor(math.log10(factor)) + 1 - digits)
    factor = math.ceil(factor / place - 1e-9) * place
    return f"{factor:.4g}" if digits == 4 else f"{factor:.2e}"


def lower_text(epsilon: float) -> str:
    """A lower bound with four decimals, rounded down: rounding must not strengthen an accusation."""
    return f"{math.floor(epsilon * 1e4 + 1e-9) / 1e4:.4f}"


def share_text(share: float) -> str:
    """A share in per cent, rounded up to two digits after the point, in the attacker's favour."""
    return f"{math.ceil(share * 1e4 - 1e-9) / 100:.2f} %"
