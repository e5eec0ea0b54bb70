"""Names of groupings that are products of others. Settings are checked by them before torch is imported."""

from __future__ import annotations

PRODUCT = "*"
"""Sign that joins groupings into a product grouping: `sex*race`; its groups are named `Female*White`."""


def factors_of(grouping: str) -> list[str]:
    """Return the groupings that a product joins; for a plain grouping, only itself."""
    return [factor.strip() for factor in grouping.split(PRODUCT)]


def within_classes(grouping: str) -> bool:
    """Whether each of its groups is of one class: the classes themselves, or a product with them."""
    return "class" in factors_of(grouping)
