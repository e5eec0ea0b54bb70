"""Tape: the calls of the trainable layers in one forward pass, and what came back to their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from equidp.errors import EquidpError
from equidp.gradients.layers import Call, embedding, fallback
from equidp.gradients.sites import READ_VALUES, Site, held


class Tape:
    """Keeps the calls of the trainable layers during one forward pass, and their backprops afterwards."""

    def __init__(self, sites: Sequence[Site], records: int) -> None:
        self._sites, self._records = sites, records
        self._entries: list[tuple[Site, tuple[Tensor, ...], Mapping[str, Any], GradientEdge]] = []
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
        """May be called again: where Ctrl-C came between, something was left."""
        for layer, name in self._given:
            layer.__dict__.pop(name, None)
        for hook in self._hooks:
            hook.remove()

    def _give_to_each(self, site: Site) -> None:
        """During the pass the layer finds its parameter `[1, …]` as one of each record `[b, …]`, with the same values.

        An attribute of the object comes before a registered parameter.
        """
        ((name, parameter),) = site.parameters.items()
        each = parameter.detach().expand(self._records, *parameter.shape[1:]).requires_grad_()
        self._given.append((site.layer, name))
        site.layer.__dict__[name] = each
        self._entries.append((site, (), {}, get_gradient_edge(each)))

    @staticmethod
    def _open(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Let the graph begin at the first trainable layer: its input asks for a gradient, so its output has one."""
        if not torch.is_grad_enabled() or any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return None
        return tuple(
            x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
        )

    def _following(self, site: Site) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Tensor | None]:
        def follow(layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> Tensor | None:
            if not torch.is_grad_enabled():
                return None
            if site.rule is not fallback:
                named = {}
            elif _has_tensors(named):
                inputs = ()  # not mapped over records: no trial would miss a mask that hides nothing at first
            if self._records > 1 and site.rule is embedding and len(output) == 1 and not output.requires_grad:
                # looked up once for all records, such as positions: each is given its own
                inputs = tuple(x.expand(self._records, *x.shape[1:]) for x in inputs)
                output = output.detach().expand(self._records, *output.shape[1:])
            _check_call(site, inputs, output, self._records)
            fresh = None if output.requires_grad else output.detach().requires_grad_()
            kept = tuple(x.detach() for x in inputs)
            edge = get_gradient_edge(output if fresh is None else fresh)
            self._entries.append((site, kept, named, edge))
            return fresh

        return follow

    def ends_at(self, outputs: Tensor) -> bool:
        """Whether these are what the only call gave, unchanged: an operation on it, in place too, has its own node."""
        if len(self._entries) != 1 or not outputs.requires_grad:
            return False
        edge, end = self._entries[0][-1], get_gradient_edge(outputs)
        return edge.node is end.node and edge.output_nr == end.output_nr

    def ended_by(self, backprop: Tensor) -> list[tuple[Site, Call]]:
        """The only call, with the gradient at its output."""
        site, inputs, named, _ = self._entries[0]
        return [(site, Call(inputs, backprop, {}, named))]

    def calls(self, losses: Tensor, ones: Tensor | None = None) -> list[tuple[Site, Call]]:
        """One backward pass to the layers' outputs; on a GPU with `[b]` ones, which saves it two operations."""
        if not self._entries:
            return []
        edges = [edge for *_, edge in self._entries]
        backprops: Sequence[Tensor | None] = []
        if losses.requires_grad:
            # on a CPU of the sum: torch would import sympy to look at the shape of given ones
            end = losses.sum() if ones is None else losses
            backprops = torch.autograd.grad(end, edges, grad_outputs=ones, allow_unused=True)
        return [
            (site, Call(inputs, backprop, _snapshot(site), named))
            for (site, inputs, named, _), backprop in zip(self._entries, backprops, strict=False)
            if backprop is not None
        ]


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    return any(map(_has_tensors, value)) if isinstance(value, tuple | list) else isinstance(value, Tensor)


def _check_call(site: Site, inputs: tuple[Any, ...], output: Any, records: int) -> None:
    if not inputs or not all(isinstance(x, Tensor) for x in (*inputs, output)):
        raise EquidpError(
            f"Layer {site.name!r} ({type(site.layer).__name__}) must map tensors given by position to one tensor; "
            "write it from Linear, Conv2d, GroupNorm, LayerNorm or Embedding layers, or freeze its parameters by "
            "requires_grad_(False)."
        )
    if any(not x.dim() or len(x) != records for x in (*inputs, output)):
        raise EquidpError(
            f"Layer {site.name!r} ({type(site.layer).__name__}) sees {tuple(inputs[0].shape)} for {records} "
            "records; records must stay along the first dimension. Let them (batch_first=True, say), or freeze its "
            "parameters by requires_grad_(False), as of positions that all records share."
        )


def _snapshot(site: Site) -> dict[str, Tensor]:
    return {k: p.detach() for k, p in site.parameters.items()} if site.rule in READ_VALUES else {}
