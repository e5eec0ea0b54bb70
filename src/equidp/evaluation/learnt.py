"""Whether a classifier has learnt anything, by the figures that `metrics.evaluate` makes."""

from __future__ import annotations

import math
from collections.abc import Mapping


def diverged(figures: Mapping) -> bool:
    """Whether these results of `evaluate` have records but no loss: the model's scores are not finite."""
    return bool(figures["overall"]["count"]) and figures["overall"]["loss"] is None


RANKS = 0.6
"""AUROC above which a ranking has learnt something, however small the test part."""


ONE_IN_TWENTY = 1.645
"""What a standard normal number is above in one of twenty cases."""


def guessing(figures: Mapping) -> str | None:
    """What to say of a model whose classes are not correlated with the labels, as predicate of a sentence; else None.

    A model that puts every record into the most frequent class has an MCC of 0 exactly, however high its accuracy.
    Its scores may rank the records all the same: then it has learnt, and only its classes say nothing.
    """
    overall = figures.get("overall", {})
    mcc, auroc = overall.get("mcc"), overall.get("auroc")
    if mcc is None or mcc > 0 or diverged(figures):
        return None
    if auroc is not None and auroc > RANKS:
        return f"ranks the records (AUROC {auroc:.2f}), but its classes are guesses: its MCC is not above 0"
    return "has learnt nothing: its MCC is not above 0, as if all records were put into one class"


def hardly(figures: Mapping) -> str | None:
    """What to say of a model that has learnt no more than chance explains, as predicate of a sentence; else None.

    Guesses that do not depend on the labels have an MCC of spread 1/√n over test parts of two classes, and less of more
    classes. So one below 1.645/√n is reached by one guessing model in twenty. A model whose scores rank is spared.
    """
    overall = figures.get("overall", {})
    mcc, auroc, count = (overall.get(name) for name in ("mcc", "auroc", "count"))
    if mcc is None or not 0 < mcc < ONE_IN_TWENTY / math.sqrt(count) or (auroc is not None and auroc > RANKS):
        return None
    ranking = "" if auroc is None else f" and AUROC {auroc:.2f}"
    return f"is hardly better than guesses: MCC {mcc:.2f}{ranking} on {count:,} records can be chance"


def overshot(figures: Mapping) -> str | None:
    """What to say of a model whose loss is above that of equal probabilities, as predicate of a sentence; else None.

    Its classes may be right by half, but its steps are too long, or it went on too long: another rate would do better.
    """
    loss, classes = figures.get("overall", {}).get("loss"), len(figures.get("groups", {}).get("class", {}))
    if loss is None or classes < 2 or loss <= math.log(classes):
        return None
    return f"has a test loss of {loss:.2f}, above the {math.log(classes):.2f} of equal probabilities"
