"""Sites: where trainable parameters enter a model's computation, and by which rule their gradients are taken.

A layer has the rule of its class, or of the class whose `forward` it inherits. Some layers of timm and transformers are
torch's layers written anew: they have rules by name, so that neither library is needed here. A parameter `[1, …]` that
a model holds beside its layers (class tokens, positions) is copied for each record. A layer without a rule goes through
`torch.func` as a whole, and a warning says so.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

from equidp.errors import EquidpError
from equidp.gradients import libraries
from equidp.gradients.layers import (
    Call,
    Page,
    Rule,
    convolution,
    embedding,
    exact,
    fallback,
    frozen_batch_norm,
    group_norm,
    layer_norm,
    linear,
    prelu,
    standardised_convolution,
)
from equidp.gradients.standardised import StandardisedConv2d
from equidp.gradients.terms import Term, Vectors
from equidp.gradients.volumes import transposed_convolution, volume_convolution
from equidp.gradients.workspace import Workspace

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.Conv3d: volume_convolution,
    nn.ConvTranspose1d: transposed_convolution,
    nn.ConvTranspose2d: transposed_convolution,
    nn.ConvTranspose3d: transposed_convolution,
    StandardisedConv2d: standardised_convolution,
    nn.GroupNorm: group_norm,
    nn.BatchNorm1d: frozen_batch_norm,
    nn.BatchNorm2d: frozen_batch_norm,
    nn.BatchNorm3d: frozen_batch_norm,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: layer_norm,
    nn.PReLU: prelu,
    nn.Embedding: embedding,
}

OF_DEVICES = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors of a device, for which neither records nor model are to blame."""

READ_VALUES = frozenset({fallback, standardised_convolution, libraries.batch_norm_act})
"""Rules that read the values of parameters. For other rules these are not kept."""


def rule_for(layer: nn.Module) -> Rule | None:
    """Return the rule of a layer's class, or of the class whose `forward` it inherits; None if there is no rule."""
    name = f"{type(layer).__module__}.{type(layer).__qualname__}"
    if not parametrize.is_parametrized(layer) and (named := libraries.NAMED.get(name)):
        return named
    if parametrize.is_parametrized(layer) or any(True for _ in layer.children()):
        return None
    return next((rule for kind, rule in RULES.items() if type(layer).forward is kind.forward
                 and isinstance(layer, kind)), None)  # fmt: skip


def held(page: Page) -> dict[str, Term]:
    """The rule of a parameter `[1, …]` of which each record was given a copy."""
    (name,) = page.names
    backprops = [exact(call.backprop).flatten(1) for call in page.calls]
    return {name: Vectors(backprops[0] if len(backprops) == 1 else torch.stack(backprops).sum(0))}


@dataclass(frozen=True, eq=False)
class Site:
    """A layer whose calls are kept: its name in the model, its rule, and its trainable parameters by name."""

    name: str
    layer: nn.Module
    rule: Rule
    parameters: Mapping[str, nn.Parameter]

    def terms(self, calls: Sequence[Call], workspace: Workspace) -> dict[str, Term]:
        """Return one term for each trainable parameter.

        Raises:
            EquidpError: the layer has no rule, and `torch.func` cannot take it record by record.
        """
        try:
            return self.rule(Page(self.layer, calls, frozenset(self.parameters), workspace))
        except RuntimeError as error:
            reason = str(error).partition(". ")[0]
            if self.rule is not fallback or isinstance(error, OF_DEVICES):
                raise
            raise EquidpError(
                f"Layer {self.name or 'model'!r} ({type(self.layer).__name__}) has no gradient rule, and torch.func "
                f"cannot take it record by record ({reason}); give its own parameters layers of their own, so that the "
                f"rest of it, dropout above all, stays outside them.{_as_held(self.layer)}"
            ) from error


def sites(model: nn.Module) -> list[Site]:
    """Return every place where trainable parameters enter the computation.

    A layer without a rule becomes one place together with all layers inside it, and a warning names it.

    Raises:
        EquidpError: a layer inside such a place is also used outside it.
    """
    found = list(_walk(model, "", set()))
    _refuse_reuse(model, [site for site in found if site.rule is fallback])
    return found


def _walk(layer: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[Site]:
    if layer in seen or not any(p.requires_grad for p in layer.parameters()):
        return
    seen.add(layer)
    own = {k: p for k, p in layer.named_parameters(recurse=False) if p.requires_grad}
    for key, child in layer.named_children():
        if isinstance(child, nn.ParameterList | nn.ParameterDict):  # never called: the layer that holds it uses them
            own |= {f"{key}.{k}": p for k, p in child.named_parameters() if p.requires_grad}
    rule = rule_for(layer)
    if own and rule:
        yield Site(name, layer, rule, own)
    # `[1, …]` with two more dimensions, as tokens and positions have: the first one is for the records
    elif own and all(_is_held(k, p) for k, p in own.items()) and any(True for _ in layer.children()):
        for key, parameter in own.items():
            yield Site(f"{name}.{key}" if name else key, layer, held, {key: parameter})
        yield from _inside(layer, name, seen)
    elif own or parametrize.is_parametrized(layer):
        parameters = f" for {', '.join(own)}" if own else ""
        numel = sum(p.numel() for p in layer.parameters() if p.requires_grad)
        warnings.warn(
            f"Layer {name or 'model'!r} ({type(layer).__name__}) has no gradient rule{parameters}; it goes through "
            f"torch.func, which is correct but slower, and holds {numel:,} numbers for each record of a chunk."
            f"{_as_held(layer)}",
            stacklevel=_level_of_the_caller(),
        )
        yield Site(name, layer, fallback, {k: p for k, p in layer.named_parameters() if p.requires_grad})
    else:
        yield from _inside(layer, name, seen)


def _is_held(key: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() >= 3 and len(parameter) == 1 and "." not in key


def _as_held(layer: nn.Module) -> str:
    """Return advice for a layer whose parameter, such as positions `[places, width]`, would fit the rule `held`."""
    own = [(k, p) for k, p in layer.named_parameters(recurse=False) if p.dim() >= 2 and not _is_held(k, p)]
    if not own or not any(True for _ in layer.children()):
        return ""
    name, parameter = own[0]
    shape = [1, *parameter.shape]
    return (
        f" If {name} is added to every record's values, as positions are, or multiplies them entry by entry, it is "
        f"enough to give it the shape {shape}."
    )


def _level_of_the_caller() -> int:
    """Return the `stacklevel` of the line that called this package, which a warning should show."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__.partition(".")[0]:
        frame, level = frame.f_back, level + 1
    return level


def _inside(layer: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[Site]:
    for child_name, child in layer.named_children():
        yield from _walk(child, f"{name}.{child_name}" if name else child_name, seen)


def _refuse_reuse(model: nn.Module, opaque: Sequence[Site]) -> None:
    for site in opaque:
        inside = {
            m for m in site.layer.modules() if m is not site.layer and any(p.requires_grad for p in m.parameters())
        }
        for path, module in model.named_modules(remove_duplicate=False):
            if module in inside and path != site.name and not path.startswith(f"{site.name}." if site.name else ""):
                raise EquidpError(
                    f"Layer {path!r} is used both inside and outside {site.name!r}, which has no gradient rule of its "
                    "own; give each its own layer."
                )
