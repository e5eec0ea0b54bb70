"""Nodes of the release."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from equidp.accounting.dataset_ledger import NAMES, Spent, spent
from equidp.errors import EquidpError
from equidp.models.weights import Weights, parameters_of
from equidp.parameters import Settings
from equidp.reporting.release import release_files, released_facts, wanted
from equidp.training.charging import ledger_of, unit_in_ledger

logger = logging.getLogger(__name__)


def write_release(model: Weights, privacy: dict[str, Any], *others: Any) -> dict[str, bytes]:
    """The files that may go out, by name; none for a run whose settings ask for none.

    It takes the arguments of `write_asked_release`.
    """
    return write_asked_release(model, privacy, *others) if wanted(others[-1].release, privacy) else {}


def write_tuned_release(
    model: Weights, privacy: dict[str, Any], metrics_release: dict[str, Any], ledgers: Path, settings: Settings
) -> dict[str, bytes]:
    """The files that may go out with a model that `tune` chose. It has neither exact figures nor an audit."""
    return write_release(model, privacy, {}, metrics_release, {}, ledgers, settings)


def write_asked_release(
    model: Weights,
    privacy: dict[str, Any],
    metrics: dict[str, Any],
    metrics_release: dict[str, Any],
    audit: dict[str, Any],
    ledgers: Path,
    settings: Settings,
) -> dict[str, bytes]:
    """The files that may go out, by name, whichever mode the run was made in.

    They give the total of the data set's ledger, this run included. The ledger may not have a run that was copied from
    elsewhere; the documents then say so. If the ledger has trials under a law, no number is given.
    """
    if not privacy:
        raise EquidpError("This run has no privacy.json, so its training did not finish: train first.")
    card, entries = model.card, ledger_of(ledgers, settings).entries()
    # the run's own unit, which the settings of a later command may not have: else another unit's total would be given
    unit = unit_in_ledger(privacy.get("unit") or "record", card.get("source", ""), card.get("source_options") or {})
    counted = spent(entries, privacy["delta"], unit)
    listed = any(entry.what != NAMES for entry in entries) and not (counted and _without(counted, privacy))
    if not listed:
        logger.warning(
            "The ledger of this data set has lost this run, or it is another project's%s: the documents say so, and "
            "tell no total. Write them where the run was made, or put a copy back.",
            f", as its total, ε = {counted.epsilon:.4g}, is below this run's own" if counted else "",
        )
        counted = None
    facts = released_facts(
        card,
        parameters_of(model),
        privacy,
        settings.release,
        metrics=metrics,
        released_metrics=metrics_release,
        audit=audit,
        counted=counted,
        listed=listed,
    )
    return release_files(facts, model.tensors)


def _without(counted: Spent, privacy: dict[str, Any]) -> bool:
    """Whether the ledger's total is below this run's own ε, so that the ledger does not have this run.

    Of a run with several declared trials this is not judged.
    """
    alone = privacy.get("secure") and (privacy.get("trials") or {}).get("max", 1) == 1
    return bool(alone) and counted.epsilon < privacy["epsilon"] * (1 - 1e-6)
