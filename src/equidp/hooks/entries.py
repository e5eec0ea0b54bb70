"""Entries: the catalog's entries, and refusals of a user's own entries that would lose or mix up results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kedro.io import CatalogConfigResolver, DataCatalog

from equidp.algorithms import ALGORITHMS, BASELINE
from equidp.config_loader import PLACES
from equidp.errors import EquidpError

ARTIFACTS = (
    "metrics", "privacy", "statement", "history", "report", "accuracy_figure", "cost_figure", "clip_norm_figure",
)  # fmt: skip
"""Results of a trained algorithm besides its model, by their names in the catalog."""

RELEASE = "release"
"""The name of the folder with everything that may be published with a model, in the catalog; and of the pipeline that
writes this folder again."""

RELEASED = "metrics_release"
"""The name of the figures with noise in the catalog; a run has them only if it was asked for them."""

RESULTS = (*ARTIFACTS, RELEASED, RELEASE)
"""Results that describe a model: they are removed before a new model replaces it."""

CHOICE = ("choice", "trials")
"""Results of a tuning about its choice, besides the results of the chosen model."""

AUDIT, COMPARISON, TUNE = "audit", "comparison", "tune"
SHARED_ARTIFACTS = {
    AUDIT: ("audit_findings", "audit_bounds", "audit_exposure", "audit_report"),
    COMPARISON: ("comparison.report", "comparison.table"),
    TUNE: ("tuned.choice", "tuned.privacy", "tuned.statement", "tuned.report", "tuned.metrics_release"),
}
"""Results that do not belong to the run of a single algorithm."""

LEDGER = "privacy_ledger"
"""The name of the ledger of all data sets in the catalog."""

FOLDERS = ("raw_folder", "records_cache", "features_cache", LEDGER)
"""Entries that load as a folder's path; so do workplaces."""

PREPARED = ("provenance", "groups", "group_counts")
"""Results that ingestion writes for each run."""

FINISHED = ("model", "privacy", "metrics", "metrics_release", "audit", RELEASE)
"""Results of a finished run that the pipeline `release` reads or writes."""


def is_result(name: str) -> bool:
    """Whether a run makes this entry from its own settings, so that another run's entry could be taken for it."""
    owner, _, kind = name.rpartition(".")
    if name == f"{BASELINE}.{RELEASED}":  # the baseline's page asks for it, but nothing makes it
        return False
    return name in PREPARED or (owner in (*ALGORITHMS, "tuned") and kind in ("model", "plan", *RESULTS, *CHOICE))


def refuse_lossy(algorithms: Iterable[str], catalog: DataCatalog) -> None:
    """Refuse a user's catalog in which a result is no local file of its own: results are read again, and logged."""
    kinds = [f"{algorithm}.{kind}" for algorithm in algorithms for kind in ("model", *RESULTS)]
    places: dict[str, str] = {}
    for name in [*kinds, *(name for names in SHARED_ARTIFACTS.values() for name in names), "provenance"]:
        entry = entry_of(catalog, name)
        path = str(entry.get("filepath", ""))
        if not path or "://" in path or entry.get("versioned"):
            raise EquidpError(
                f"{name!r} is no plain local file in the catalog: give it a filepath on this machine, without "
                "`versioned`, as it is read again and logged to MLflow (run_label=… keeps the results of several runs)."
            )
        if (other := places.setdefault(path, name)) != name:
            raise EquidpError(
                f"{other!r} and {name!r} are one file in the catalog, {path}: the second would replace the first. "
                "Write {algorithm} into the path."
            )


def refuse_shared(algorithms: Iterable[str], marked: Mapping[str, Any]) -> None:
    """Refuse results in a file that another run would write, too: a secure model that is lost cannot be made again.

    Args:
        marked: the catalog's entries, with `<seed>` where a path has the seed (`EquidpConfigLoader.marked_catalog`).
    """
    resolver = CatalogConfigResolver(_without_credentials(marked))
    own = [f"{name}.{kind}" for name in (*algorithms, "tuned") for kind in ("model", "plan", *RESULTS, *CHOICE)]
    own += [f"{name}.workplace" for name in (*algorithms, "tuned") if name != BASELINE]  # its files have digests
    shared = [name for names in SHARED_ARTIFACTS.values() for name in names]
    for name in (*own, *shared, *PREPARED, *(f"finished.{kind}" for kind in FINISHED)):
        path = str(_resolved(resolver, name).get("filepath", ""))
        if lacking := [f"${{setting:{place}}}" for place in PLACES if path and f"<{place}>" not in path]:
            raise EquidpError(
                f"{name!r} is one file for several runs in the catalog, {path}: the next would replace what this one "
                f"has made, or be taken for it. Write {', '.join(lacking)} into the path."
            )
    path = str(_resolved(resolver, LEDGER).get("filepath", ""))
    if any(f"<{place}>" in path for place in PLACES):
        raise EquidpError(
            f"{LEDGER!r} is another folder for each run in the catalog, {path}: no run would know what the others "
            "have spent. Give it one folder for all."
        )


def _without_credentials(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the names of credentials: no path depends on them, and Kedro would ask for what they stand for."""
    return {
        key: _without_credentials(value) if isinstance(value, dict) else value
        for key, value in entry.items()
        if key != "credentials"
    }


def refuse_no_folder(names: Iterable[str], catalog: DataCatalog) -> None:
    """Refuse an entry that is no folder of this machine but must be: half of its content would be elsewhere."""
    from equidp.pipelines.datasets import FolderDataset  # late: it imports the modules that write pages

    for name in names:
        if name not in FOLDERS and not name.endswith(".workplace"):
            continue
        if not isinstance(catalog.get(name), FolderDataset) or "://" in str(
            entry_of(catalog, name).get("filepath", "")
        ):
            raise EquidpError(
                f"{name!r} is no folder of this machine in the catalog: give it the type "
                "equidp.pipelines.datasets.FolderDataset, and a filepath here."
            )


def entry_of(catalog: DataCatalog, name: str) -> dict[str, Any]:
    """Return what the catalog's files say about a dataset; empty if they do not mention it."""
    return _resolved(catalog.config_resolver, name)


def _resolved(resolver: CatalogConfigResolver, name: str) -> dict[str, Any]:
    known = name in resolver.config or resolver.match_dataset_pattern(name) is not None
    return resolver.resolve_pattern(name) if known else {}


def written_to(catalog: DataCatalog, name: str) -> Path:
    """Return the path to which a dataset of the catalog is written."""
    return Path(entry_of(catalog, name)["filepath"])
