"""What nodes are handed: what this run was checked with and has made itself, and nothing that a hook put in its place.

Kedro lets a hook, a dataset of the user's own or a node between ours hand on something else. Of records that are there
three times ε would be false; a ledger elsewhere would be missed by all later runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Node

from equidp.errors import EquidpError
from equidp.hooks.entries import entry_of

SAMPLED = 256
"""How many records are compared with how they were made: a change in place is mostly of all of them."""

ASSIGNED = "assign"
"""The copy mode of entries that load as the very object that was saved."""


def is_ours(node: Node) -> bool:
    """Whether a node's function is of this package."""
    return str(getattr(node.func, "__module__", "")).startswith("equidp.")  # a method of str, say, has none


def _makes_ours(node: Node) -> bool:
    """Whether its function is none of a user's own around one of ours, which `functools.wraps` names as ours."""
    return is_ours(node) and str(getattr(node.func, "__globals__", {}).get("__name__", "")).startswith("equidp.")


def refuse_namespace(nodes: Iterable[Node]) -> None:
    """Refuse our pipelines in a namespace of the user's own: hooks know a model by its algorithm's name alone.

    Such a run was not tracked, kept no other run from its files, and left an earlier run's figures beside its model.
    """
    for node in nodes:
        if is_ours(node) and "." in (node.namespace or ""):
            outer = str(node.namespace).rpartition(".")[0]
            raise EquidpError(
                f"The node {node.name} is in the namespace {outer!r}, in which equidp does not know its results: they "
                "would not be tracked, nor kept from another run. Take its pipeline without a namespace; run_label=… "
                "keeps the results of several runs."
            )


def refuse_rewired(nodes: Iterable[Node]) -> None:
    """Refuse a node of ours that reads or writes other entries than in our own pipelines.

    Trained on the test part by `inputs={"train": "test"}` a statement would be of other records; a model under another
    name is in memory only, and its ε spent for nothing.
    """
    from equidp.pipeline_registry import register_pipelines  # late: it imports what trains

    ours, known = [node for node in nodes if is_ours(node)], register_pipelines()
    spaces = {str(node.namespace) for node in ours} & known.keys()
    wired = {node.name: node for space in spaces for node in known[space].nodes}
    for node in ours:
        own = wired.get(node.name)
        if own is None or (node.inputs, node.outputs) == (own.inputs, own.outputs):
            continue
        pairs = zip((*node.inputs, *node.outputs), (*own.inputs, *own.outputs), strict=True)
        other, name = next(pair for pair in pairs if pair[0] != pair[1])
        raise EquidpError(
            f"The node {node.name} is given {other!r} in the place of {name!r}, which statements, tracking and files "
            "are of: take the pipeline without inputs=… or outputs=…; nodes of your own may read what it makes."
        )


class Handed:
    """What the nodes of one run make and take.

    Args:
        settings: those that were validated.
        catalog: of the run.
    """

    def __init__(self, settings: object, catalog: DataCatalog) -> None:
        self._settings, self._catalog = settings, catalog
        self._made: dict[str, tuple[weakref.ref | None, str]] = {}

    def made(self, node: Node, outputs: Mapping[str, Any]) -> None:
        """Remember which records a node of ours has made, before other hooks see them."""
        from equidp.data.records import Records  # late: it imports torch

        for name, value in outputs.items() if _makes_ours(node) else ():
            if isinstance(value, Records):
                # never the records themselves: Kedro frees them once nobody needs them
                same = entry_of(self._catalog, name).get("copy_mode") == ASSIGNED
                self._made[name] = weakref.ref(value) if same else None, _digest(value, whole=not same)

    def refuse_others(self, node: Node, inputs: Mapping[str, Any], given: Iterable[Mapping[str, Any] | None]) -> None:
        """Refuse what a node of ours would take or write elsewhere than was checked before the run.

        Args:
            inputs: by the names of the catalog.
            given: what hooks gave in their place.

        Raises:
            EquidpError: naming the entry.
        """
        if not is_ours(node):
            return
        for one in given:
            for name, value in (one or {}).items():
                if value is not inputs.get(name):
                    raise _refusal(node, name, "a hook gives another one in its place (before_node_run)")
        for name, value in inputs.items():
            self._refuse_other(node, name, value)
        for name in node.outputs:
            kept = "filepath" in entry_of(self._catalog, name)
            if kept and isinstance(self._catalog.get(name), MemoryDataset):
                raise _refusal(node, name, "its file was replaced by memory, with which it would be lost")

    def _refuse_other(self, node: Node, name: str, value: object) -> None:
        from equidp.data.records import Records
        from equidp.parameters import Settings

        if isinstance(value, Settings) and value is not self._settings:
            raise _refusal(node, name, "it is not what was validated before the run")
        # a path drops the "/" at the end that an entry or raw_dir may have
        if isinstance(value, Path) and value != Path(entry_of(self._catalog, name).get("filepath", "")):
            raise _refusal(node, name, f"{value} is not the folder that the catalog's files say")
        if isinstance(value, Records) and not self._is_made(name, value):
            raise _refusal(node, name, "these records are not those that equidp's own nodes have made")

    def _is_made(self, name: str, value: Any) -> bool:
        if name not in self._made:
            return False
        made, content = self._made[name]
        return (made is None or made() is value) and _digest(value, whole=made is None) == content


def _digest(records: Any, *, whole: bool) -> str:
    """sha256 of the records, or of some of them, evenly spread."""
    import torch

    from equidp.training.digests import fingerprint

    if not whole and len(records) > SAMPLED:
        records = records.take(torch.arange(SAMPLED) * len(records) // SAMPLED)
    return fingerprint(records, viewed=True)


def _refusal(node: Node, name: str, what: str) -> EquidpError:
    return EquidpError(
        f"The node {node.name} would not work on the {name!r} that this run tells of: {what}. What a run states, ε "
        "among it, would be false. Take that hook, dataset or node out: settings belong in conf/ or --params, and "
        "records are changed in a source of your own or by training.augmentations."
    )
