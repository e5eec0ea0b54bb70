"""Handed: makes sure that nodes get the inputs that the run was checked with or has made itself.

In Kedro a hook, a user's own dataset or a node between ours can pass on something else. For example, if every record
were there three times, ε would be false; and all later runs would miss a ledger in another place.
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
"""How many records are compared with their original content, because a change in place mostly changes all of them."""

ASSIGNED = "assign"
"""The copy mode of entries that load as the same object that was saved."""


def is_ours(node: Node) -> bool:
    """Whether a node's function is of this package."""
    return str(getattr(node.func, "__module__", "")).startswith("equidp.")  # a method of str, for example, has none


def _makes_ours(node: Node) -> bool:
    """Whether a node's function is ours, and no user's function around ours that `functools.wraps` makes look so."""
    return is_ours(node) and str(getattr(node.func, "__globals__", {}).get("__name__", "")).startswith("equidp.")


def refuse_namespace(nodes: Iterable[Node]) -> None:
    """Refuse our pipelines in a user's namespace, because hooks know a model by its algorithm's name alone.

    Such a run would not be tracked, would not keep other runs from its files, and would leave an earlier run's figures
    beside its model.
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

    For example, with `inputs={"train": "test"}` the model would be trained on the test part, and its statement would be
    about other records. A model under another name would be in memory only, and its ε spent for nothing.
    """
    from equidp.pipeline_registry import register_pipelines  # late: it imports the modules that train

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
    """The outputs and inputs of the nodes of one run.

    Args:
        settings: the validated settings.
        catalog: the run's catalog.
    """

    def __init__(self, settings: object, catalog: DataCatalog) -> None:
        self._settings, self._catalog = settings, catalog
        self._made: dict[str, tuple[weakref.ref | None, str]] = {}

    def made(self, node: Node, outputs: Mapping[str, Any]) -> None:
        """Remember which records a node of ours has made, before other hooks see them."""
        from equidp.data.records import Records  # late: it imports torch

        for name, value in outputs.items() if _makes_ours(node) else ():
            if isinstance(value, Records):
                # no reference to the records themselves, so that Kedro can free them when no node needs them
                same = entry_of(self._catalog, name).get("copy_mode") == ASSIGNED
                self._made[name] = weakref.ref(value) if same else None, _digest(value, whole=not same)

    def refuse_others(self, node: Node, inputs: Mapping[str, Any], given: Iterable[Mapping[str, Any] | None]) -> None:
        """Refuse inputs and outputs of a node of ours that differ from those that were checked before the run.

        Args:
            node: any node.
            inputs: its inputs by their names in the catalog.
            given: for each hook, the inputs that it gave instead.

        Raises:
            EquidpError: an input or output was replaced; the message names it.
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
        # compared as paths, because an entry or raw_dir may have a "/" at its end
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
    """Return the sha256 of the records, or of `SAMPLED` of them, evenly spread."""
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
