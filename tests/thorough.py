"""Which cases of a test over all algorithms, models or networks `make test` runs; `make slow` runs the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

ONE_OF_EACH = (
    "dpsgd", "dpsgd_f", "dpsgd_level", "dpsgd_quantile", "dc_sgd_e", "dp_adambc", "psasc_momentum",
    "psasc_momentum_gd", "auto_dpsgd_l", "sa_dpsgd", "dpis", "asc",
)  # fmt: skip
"""Algorithms of which no two have the same kinds of parts."""

FEW = ("dpsgd", "dpsgd_f", "dpsgd_quantile", "psasc_momentum_gd", "sa_dpsgd", "dpis", "asc")
"""Between them all that a step may do besides summing: releases, rates, decisions, a memory."""

LARGE = ("wrn16_4", "resnet9", "scatter_cnn", "scatter_linear", "tramer_boneh_mnist", "tramer_boneh_cifar10")
"""Models that take a second or more where others take a tenth."""


def first(names: Iterable[str], kept: Iterable[str]) -> list[Any]:
    """All names, those that are not kept marked as slow."""
    chosen = frozenset(kept)
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.slow) for name in names]


def small(names: Iterable[str]) -> list[Any]:
    """All models, the large ones marked as slow."""
    return first(names, set(names) - set(LARGE))
