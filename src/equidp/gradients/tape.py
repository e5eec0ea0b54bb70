"""Tape: the calls of the trainable layers in one forward pass, and what came back to their outputs."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from equidp.errors import EquidpError
from equidp.gradients.blocks import Blocks, by_record
from equidp.gradients.layers import Call, embedding, fallback, only_tensor
from equidp.gradients.sites import READ_VALUES, Site, held


@dataclass(frozen=True, eq=False)
class Entry:
    """A call of a layer: its inputs, the place of its output in autograd's graph, and how many rows each record has."""

    site: Site
    inputs: tuple[Tensor, ...]
    edge: GradientEdge
    named: Mapping[str, Any]
    names: tuple[str, ...] = ()
    each: int = 1

    def calls(self, backprop: Tensor, parameters: Mapping[str, Tensor]) -> list[tuple[Site, Call]]:
        """Return the call with its backprop; several calls if the rule takes one row of a record at a time."""
        call = Call(self.inputs, backprop, parameters, self.named, self.names)
        return [(self.site, one) for one in by_record(self.site, call, self.each)]


class Tape:
    """Keeps the calls of the trainable layers during one forward pass, and their backprops afterwards.

    Args:
        sites: the trainable layers and their rules.
        records: the number of records in the pass.
        blocks: which layers see several rows of each record; None if every layer sees one row.
        kind: the shape of a record.
        buffers: ids (`id()`) of the model's buffers, which are the same for all records.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        records: int,
        *,
        blocks: Blocks | None = None,
        kind: Hashable = (),
        buffers: Collection[int] = (),
    ) -> None:
        self._sites, self._records = sites, records
        self._blocks, self._kind, self._buffers = Blocks() if blocks is None else blocks, kind, buffers
        self._entries: list[Entry] = []
        self._called: Counter[Site] = Counter()
        self._hooks: list[Any] = []
        self._given: list[tuple[nn.Module, str]] = []

    def __enter__(self) -> Tape:
        for site in self._sites:
            if site.rule is held:
                self._give_to_each(site)
                continue
            self._hooks.append(site.layer.register_forward_pre_hook(self._open))
            self._hooks.append(site.layer.register_forward_hook(self._following(site), with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks. It may be called twice, because Ctrl-C may have cut the first call short."""
        for layer, name in self._given:
            layer.__dict__.pop(name, None)
        for hook in self._hooks:
            hook.remove()

    def _give_to_each(self, site: Site) -> None:
        """Give the layer its parameter `[1, …]` as `[b, …]` during the pass, a copy for each record.

        The copy is an attribute of the object, which Python finds before a registered parameter.
        """
        ((name, parameter),) = site.parameters.items()
        each = parameter.detach().expand(self._records, *parameter.shape[1:]).requires_grad_()
        self._given.append((site.layer, name))
        site.layer.__dict__[name] = each
        self._entries.append(Entry(site, (), get_gradient_edge(each), {}))

    @staticmethod
    def _open(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Begin autograd's graph at the first trainable layer: its input requires a gradient, so its output has one."""
        if not torch.is_grad_enabled() or any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return None
        return tuple(
            x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
        )

    def _following(self, site: Site) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]:
        def follow(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], given: Any) -> Any:
            if not torch.is_grad_enabled():
                return None
            names: tuple[str, ...] = ()
            output = given
            if site.rule is not fallback:
                named = {}
            else:
                inputs, named, names = self._by_name(layer, inputs, named)
                output = only_tensor(given)
            if self._records > 1 and site.rule is embedding and len(output) == 1 and not output.requires_grad:
                # a look-up made once for all records, such as positions: each record is given its own copy
                inputs = tuple(x.expand(self._records, *x.shape[1:]) for x in inputs)
                output = output.detach().expand(self._records, *output.shape[1:])
            each = self._rows_of_each(site, inputs, output)
            fresh = None if output.requires_grad else output.detach().requires_grad_()
            kept = tuple(x.detach() for x in inputs)
            edge = get_gradient_edge(output if fresh is None else fresh)
            self._entries.append(Entry(site, kept, edge, named, names, each))
            if fresh is None:
                return None
            begun = fresh.clone()  # the next operation may be in place, which torch forbids on a leaf of the graph
            return tuple(x if x is None else begun for x in given) if isinstance(given, tuple) else begun

        return follow

    def ends_at(self, outputs: Tensor) -> bool:
        """Whether the outputs are what the only call returned. Any operation on it, even in place, has its own node."""
        if len(self._entries) != 1 or not outputs.requires_grad:
            return False
        edge, end = self._entries[0].edge, get_gradient_edge(outputs)
        return self._entries[0].each == 1 and edge.node is end.node and edge.output_nr == end.output_nr

    def ended_by(self, backprop: Tensor) -> list[tuple[Site, Call]]:
        """Return the only call, with the gradient at its output."""
        return self._entries[0].calls(backprop, {})

    def calls(self, losses: Tensor, ones: Tensor | None = None) -> list[tuple[Site, Call]]:
        """Return all calls, after one backward pass to the layers' outputs.

        `ones`: `[b]` ones, given on a GPU, which saves two operations there.
        """
        if not self._entries:
            return []
        edges = [entry.edge for entry in self._entries]
        backprops: Sequence[Tensor | None] = []
        if losses.requires_grad:
            # on a CPU the sum is differentiated: torch would import sympy to check the shape of given ones
            end = losses.sum() if ones is None else losses
            backprops = torch.autograd.grad(end, edges, grad_outputs=ones, allow_unused=True)
        return [
            one
            for entry, backprop in zip(self._entries, backprops, strict=False)
            if backprop is not None
            for one in entry.calls(backprop, _snapshot(entry.site))
        ]

    def _by_name(
        self, layer: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[str, ...]]:
        """Sort the arguments of a layer without a rule into those of each record and those that all records share.

        Tensors are taken as one row (or more) for each record, except for buffers of the model. A call with tensors
        inside lists or dicts is refused. Otherwise no trial would notice a mask there that hides nothing at first.

        Returns:
            The tensors of records, those given by name last; the other arguments by name; the names of those tensors
            that were given by name.
        """
        if not all(isinstance(x, Tensor) for x in inputs):
            inputs, named = _all_by_name(layer, inputs, named)
        tensors = {k: x for k, x in named.items() if isinstance(x, Tensor) and id(x) not in self._buffers}
        rest = {k: x for k, x in named.items() if k not in tensors}
        if any(_has_tensors(x) for x in rest.values() if id(x) not in self._buffers):
            return (), {}, ()
        return (*inputs, *tensors.values()), rest, tuple(tensors)

    def _rows_of_each(self, site: Site, inputs: tuple[Any, ...], output: Any) -> int:
        """Return how many rows of each record a layer sees.

        Raises:
            EquidpError: the call cannot be followed, or does not have equally many rows of each record.
        """
        if not inputs or not all(isinstance(x, Tensor) for x in (*inputs, output)):
            raise EquidpError(
                f"Layer {site.name!r} ({type(site.layer).__name__}) must map tensors, given one by one, to one tensor; "
                "write it from Linear, Conv2d, GroupNorm, LayerNorm or Embedding layers, or freeze its parameters by "
                "requires_grad_(False)."
            )
        each = 0
        if output.dim() and all(x.dim() and len(x) == len(output) for x in inputs):
            row = tuple(x.shape[1:] for x in inputs)
            each = self._blocks.fit(site, len(output), self._records, (self._kind, row, self._called[site]))
            self._called[site] += 1
        if not each:
            odd = next((x for x in (*inputs, output) if not x.dim() or len(x) != self._records), inputs[0])
            asked = "" if self._blocks.asking is None else self._blocks.asking.name
            told = (
                f" Torch's {asked!r} comes before that layer: what it reads in the records may say how many "
                "rows there are. Leave it out of the forward; what is logged stays a tensor, values.mean().detach()."
            )
            raise EquidpError(
                f"Layer {site.name!r} ({type(site.layer).__name__}) sees {tuple(odd.shape)} for {self._records} "
                "records; records must stay along the first dimension, each with as many rows as the others, in every "
                "pass and whatever its numbers. Let them (batch_first=True, say; no x[mask]; all rows in one call, not "
                "in pieces), or freeze its parameters by requires_grad_(False), as of positions that all records share."
                + (told if asked else "")
            )
        return each


def _all_by_name(
    layer: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return positional arguments by name instead, if the layer's `forward` has a name for each."""
    signature = inspect.signature(layer.forward)
    if any(
        p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in signature.parameters.values()
    ):
        return inputs, named
    return (), {**dict(zip(signature.parameters, inputs, strict=False)), **named}


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    return any(map(_has_tensors, value)) if isinstance(value, tuple | list) else isinstance(value, Tensor)


def _snapshot(site: Site) -> dict[str, Tensor]:
    return {k: p.detach() for k, p in site.parameters.items()} if site.rule in READ_VALUES else {}
