"""Layers: what one layer adds to every record's gradient, from its inputs and the gradient at its outputs.

A layer's rule turns its calls (activation, backprop) into one `Term` per parameter. A term knows three things about the
per-record gradients it stands for: their squared norms, their weighted sum, and, only where nothing cheaper exists,
the gradients themselves. Books are kept on *positions*: a linear layer's gradient is `Σ_p B[p]ᵀ A[p]` over the
positions p of a record (time steps, pixels, repeated calls), so that calling a layer twice only adds positions.

The tricks are those of Goodfellow (2015, norms from activations and backprops), Li et al. (2022, Gram matrices) and
Bu et al. (2023, "book-keeping"); shapes are written as b records, P positions, i inputs, o outputs.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrize

from equidp.errors import EquidpError

_CANCELLATION = 1e-3  # a Gram sum below this share of its terms' size has lost digits
_SLACK = 1e-6  # and is raised by this share: a norm may be overstated, never understated (Δ depends on it)
_CHUNK_FLOATS = 1 << 24  # gradients held at once while only their norms are wanted (64 MiB)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer on b records.

    Attributes:
        inputs: its positional arguments, `[b, …]` each, detached.
        backprop: gradient of the summed losses at its output, `[b, …]`, already scaled by the iterate's coefficient.
        parameters: the trainable parameters' values during this call (only a fallback rule needs them).
    """

    inputs: tuple[Tensor, ...]
    backprop: Tensor
    parameters: Mapping[str, Tensor]


@dataclass(frozen=True)
class Units:
    """Which records belong to which unit of privacy; a unit's gradient is the mean of its records' gradients.

    Attributes:
        owners: `[b]` int64, record to unit.
        counts: `[U]` records per unit.
        slots: `[U, R]` record numbers, `b` where a unit has fewer than R records.
    """

    owners: Tensor
    counts: Tensor
    slots: Tensor

    @classmethod
    def of(cls, owners: Tensor) -> Units:
        """Index the records of each unit. Reads the largest count back from the device."""
        counts = torch.bincount(owners)
        order = torch.argsort(owners, stable=True)
        starts = counts.cumsum(0) - counts
        rank = torch.arange(len(owners), device=owners.device) - starts[owners[order]]
        widest = int(counts.max()) if len(counts) else 0
        slots = torch.full((len(counts), widest), len(owners), device=owners.device)
        slots[owners[order], rank] = order
        return cls(owners, counts, slots)

    def share(self) -> Tensor:
        """`[b]`: a record's share in its unit's mean."""
        return 1 / self.counts[self.owners].to(torch.float32)

    def gather(self, values: Tensor, fill: float = 0) -> Tensor:
        """`[b, P, …]` to `[U, R·P, …]`: the positions of a unit's records side by side, `fill` where there are none."""
        padded = torch.cat([values, values.new_full((1, *values.shape[1:]), fill)])
        return padded[self.slots].flatten(1, 2)

    def spread(self, values: Tensor) -> Tensor:
        """`[b, …]` values, each scaled by its record's share."""
        return values * self.share().view(-1, *[1] * (values.dim() - 1)).to(values.dtype)


class Term(ABC):
    """The b per-record gradients of one parameter, in whatever form is cheap."""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """`[b]` squared l2 norms."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor, clean: bool) -> Tensor:
        """`[numel]`: Σ w_i g_i. With `clean` false a zero weight must silence even a gradient that is not finite."""

    @abstractmethod
    def gradients(self, start: int, stop: int) -> Tensor:
        """`[stop − start, numel]`: the gradients of some records, materialised."""

    @abstractmethod
    def grouped(self, units: Units) -> Term:
        """The same for units: each the mean of its records' gradients."""


def _silence(values: Tensor, weights: Tensor) -> Tensor:
    """`values` `[b, …]` with zeros where a record has no weight, since 0·NaN is NaN."""
    return values.masked_fill((weights == 0).view(-1, *[1] * (values.dim() - 1)), 0)


@dataclass(frozen=True)
class Vectors(Term):
    """Gradients that are there already: `[b, numel]`."""

    values: Tensor

    def squared_norms(self) -> Tensor:
        return self.values.square().sum(1)

    def weighted_sum(self, weights: Tensor, clean: bool) -> Tensor:
        return weights.to(self.values.dtype) @ (self.values if clean else _silence(self.values, weights))

    def gradients(self, start: int, stop: int) -> Tensor:
        return self.values[start:stop]

    def grouped(self, units: Units) -> Term:
        sums = self.values.new_zeros(len(units.counts), self.values.shape[1])
        return Vectors(sums.index_add_(0, units.owners, units.spread(self.values)))


class Products(Term):
    """Gradients `B[b]ᵀ A[b]` of shape `[o, i]`, from `A [b, P, i]` and `B [b, P, o]`."""

    def __init__(self, inputs: Tensor, backprops: Tensor) -> None:
        self.inputs, self.backprops = inputs, backprops

    def squared_norms(self) -> Tensor:
        b, positions, i = self.inputs.shape
        o = self.backprops.shape[2]
        if positions == 1:
            return self.inputs.square().sum((1, 2)) * self.backprops.square().sum((1, 2))
        if positions * (i + o) < i * o:
            return self._gram()
        return materialised_norms(self, b, i * o)

    def _gram(self) -> Tensor:
        left = self.inputs @ self.inputs.transpose(1, 2)
        right = self.backprops @ self.backprops.transpose(1, 2)
        trace = left.diagonal(dim1=1, dim2=2).sum(1) * right.diagonal(dim1=1, dim2=2).sum(1)
        return _never_below(left.mul_(right).sum((1, 2)), trace)

    def weighted_sum(self, weights: Tensor, clean: bool) -> Tensor:
        inputs, backprops = self.inputs, self.backprops * weights.view(-1, 1, 1).to(self.backprops.dtype)
        if not clean:
            inputs, backprops = _silence(inputs, weights), _silence(backprops, weights)
        return (backprops.flatten(0, 1).T @ inputs.flatten(0, 1)).flatten()

    def gradients(self, start: int, stop: int) -> Tensor:
        return (self.backprops[start:stop].transpose(1, 2) @ self.inputs[start:stop]).flatten(1)

    def grouped(self, units: Units) -> Term:
        return Products(units.gather(self.inputs), units.gather(units.spread(self.backprops)))


class GroupedProducts(Term):
    """One product per group of channels: `A [b, g, P, i]`, `B [b, g, P, o]`, gradients `[g, o, i]`."""

    def __init__(self, inputs: Tensor, backprops: Tensor) -> None:
        self.inputs, self.backprops = inputs, backprops

    def squared_norms(self) -> Tensor:
        b, groups, _, i = self.inputs.shape
        return materialised_norms(self, b, groups * i * self.backprops.shape[3])

    def weighted_sum(self, weights: Tensor, clean: bool) -> Tensor:
        inputs, backprops = self.inputs, self.backprops * weights.view(-1, 1, 1, 1).to(self.backprops.dtype)
        if not clean:
            inputs, backprops = _silence(inputs, weights), _silence(backprops, weights)
        inputs, backprops = inputs.transpose(0, 1).flatten(1, 2), backprops.transpose(0, 1).flatten(1, 2)
        return (backprops.transpose(1, 2) @ inputs).flatten()

    def gradients(self, start: int, stop: int) -> Tensor:
        return (self.backprops[start:stop].transpose(2, 3) @ self.inputs[start:stop]).flatten(1)

    def grouped(self, units: Units) -> Term:
        inputs = units.gather(self.inputs.transpose(1, 2)).transpose(1, 2)
        backprops = units.gather(units.spread(self.backprops).transpose(1, 2)).transpose(1, 2)
        return GroupedProducts(inputs, backprops)


class Lookups(Term):
    """Gradients of a table `[rows, D]` read at `ids [b, P]`: row r gets `Σ_{p: ids[p]=r} B[p]`, `B [b, P, D]`."""

    def __init__(self, ids: Tensor, backprops: Tensor, rows: int) -> None:
        self.ids, self.backprops, self.rows = ids, backprops, rows

    def squared_norms(self) -> Tensor:
        products = self.backprops @ self.backprops.transpose(1, 2)
        trace = products.diagonal(dim1=1, dim2=2).sum(1) * self.ids.shape[1]
        same = self.ids.unsqueeze(2) == self.ids.unsqueeze(1)
        return _never_below(products.mul_(same).sum((1, 2)), trace)

    def weighted_sum(self, weights: Tensor, clean: bool) -> Tensor:
        scaled = self.backprops * weights.view(-1, 1, 1).to(self.backprops.dtype)
        scaled = scaled if clean else _silence(scaled, weights)
        table = scaled.new_zeros(self.rows, scaled.shape[2])
        return table.index_add_(0, self.ids.flatten(), scaled.flatten(0, 1)).flatten()

    def gradients(self, start: int, stop: int) -> Tensor:
        backprops, ids = self.backprops[start:stop], self.ids[start:stop]
        tables = backprops.new_zeros(len(ids), self.rows, backprops.shape[2])
        return tables.scatter_add_(1, ids.unsqueeze(2).expand_as(backprops), backprops).flatten(1)

    def grouped(self, units: Units) -> Term:
        return Lookups(units.gather(self.ids), units.gather(units.spread(self.backprops)), self.rows)


def _never_below(sums: Tensor, size: Tensor) -> Tensor:
    """Squared norms from Gram sums, raised where cancellation may have made them too small. `size` bounds the terms."""
    return torch.where(sums < _CANCELLATION * size, sums.clamp(min=0) + _SLACK * size, sums)


def materialised_norms(term: Term, records: int, numel: int) -> Tensor:
    """`[b]` squared norms of gradients that are formed a few records at a time and forgotten."""
    chunk = max(1, _CHUNK_FLOATS // max(numel, 1))
    starts = range(0, records, chunk)
    return torch.cat([term.gradients(s, min(s + chunk, records)).square_().sum(1) for s in starts])


def tied_norms(terms: Sequence[Term], records: int, numel: int) -> Tensor:
    """`[b]` squared norms of a parameter that several layers share: their gradients add before the norm is taken."""
    chunk = max(1, _CHUNK_FLOATS // max(numel, 1))
    norms = []
    for start in range(0, records, chunk):
        parts = [term.gradients(start, min(start + chunk, records)) for term in terms]
        norms.append(torch.stack(parts).sum(0).square_().sum(1))
    return torch.cat(norms)


def _exact(values: Tensor) -> Tensor:
    """Half precisions become float32, in which all products and sums are taken."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _along_positions(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


Rule = Callable[[nn.Module, Sequence[Call], frozenset[str]], dict[str, Term]]
"""`(layer, its calls, names of its trainable parameters)` to one term per name."""


def linear(layer: nn.Linear, calls: Sequence[Call], names: frozenset[str]) -> dict[str, Term]:
    """`y = x Wᵀ + c` on `x [b, …, i]`: every place between the first and last dimension is a position."""
    b = len(calls[0].backprop)
    backprops = _along_positions([_exact(call.backprop).reshape(b, -1, layer.out_features) for call in calls])
    terms: dict[str, Term] = {}
    if "weight" in names:
        inputs = [_exact(call.inputs[0]).reshape(b, -1, layer.in_features) for call in calls]
        terms["weight"] = Products(_along_positions(inputs), backprops)
    if "bias" in names:
        terms["bias"] = Vectors(backprops.sum(1))
    return terms


def convolution(layer: nn.Conv1d | nn.Conv2d, calls: Sequence[Call], names: frozenset[str]) -> dict[str, Term]:
    """A convolution is a linear map of windows: its positions are the pixels of the output."""
    groups = layer.groups
    backprops = _along_positions([_exact(call.backprop).flatten(2) for call in calls], 2).transpose(1, 2)  # [b, P, o]
    terms: dict[str, Term] = {}
    if "weight" in names:
        inputs = _along_positions([windows(layer, _exact(call.inputs[0])) for call in calls])  # [b, P, c·k]
        if groups == 1:
            terms["weight"] = Products(inputs, backprops)
        else:
            inputs = inputs.unflatten(2, (groups, -1)).transpose(1, 2)
            terms["weight"] = GroupedProducts(inputs, backprops.unflatten(2, (groups, -1)).transpose(1, 2))
    if "bias" in names:
        terms["bias"] = Vectors(backprops.sum(1))
    return terms


def windows(layer: nn.Conv1d | nn.Conv2d, values: Tensor) -> Tensor:
    """`[b, c, H, W]` (or `[b, c, W]`) to `[b, P, c·kernel]`: what each output pixel sees, padding included."""
    stride, dilation, kernel = layer.stride, layer.dilation, layer.kernel_size
    values = padded(layer, values)
    if values.dim() == 3:
        values, stride, dilation, kernel = values.unsqueeze(2), (1, *stride), (1, *dilation), (1, *kernel)
    return F.unfold(values, kernel, dilation=dilation, stride=stride).transpose(1, 2)


def padded(layer: nn.Conv1d | nn.Conv2d, values: Tensor) -> Tensor:
    """The input with the layer's own padding made explicit, whatever its mode."""
    widths: list[int] = []
    for axis in reversed(range(len(layer.kernel_size))):
        if layer.padding == "same":  # the odd one goes to the right, as in torch
            total = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
            widths += [total // 2, total - total // 2]
        else:
            widths += [0, 0] if layer.padding == "valid" else [int(layer.padding[axis])] * 2
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(values, widths, mode=mode) if any(widths) else values


def group_norm(layer: nn.GroupNorm, calls: Sequence[Call], names: frozenset[str]) -> dict[str, Term]:
    """Scale and shift per channel of group-normalised activations."""
    return _channels(calls, names, lambda x: F.group_norm(x, layer.num_groups, eps=layer.eps))


def frozen_batch_norm(
    layer: nn.modules.batchnorm._BatchNorm, calls: Sequence[Call], names: frozenset[str]
) -> dict[str, Term]:
    """BatchNorm in evaluation mode: a fixed map per channel, then scale and shift."""

    def normalise(x: Tensor) -> Tensor:
        return F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)

    return _channels(calls, names, normalise)


def _channels(calls: Sequence[Call], names: frozenset[str], normalise: Callable[[Tensor], Tensor]) -> dict[str, Term]:
    terms: dict[str, Term] = {}
    backprops = [_exact(call.backprop) for call in calls]
    if "weight" in names:
        scaled = [normalise(_exact(call.inputs[0])) * d for call, d in zip(calls, backprops, strict=True)]
        terms["weight"] = Vectors(_sum([s.reshape(*s.shape[:2], -1).sum(2) for s in scaled]))
    if "bias" in names:
        terms["bias"] = Vectors(_sum([d.reshape(*d.shape[:2], -1).sum(2) for d in backprops]))
    return terms


def layer_norm(layer: nn.LayerNorm, calls: Sequence[Call], names: frozenset[str]) -> dict[str, Term]:
    """Scale and shift per normalised element."""
    numel = math.prod(layer.normalized_shape)
    backprops = [_exact(call.backprop) for call in calls]
    terms: dict[str, Term] = {}
    if "weight" in names:
        scaled = [
            F.layer_norm(_exact(call.inputs[0]), layer.normalized_shape, eps=layer.eps) * d
            for call, d in zip(calls, backprops, strict=True)
        ]
        terms["weight"] = Vectors(_sum([s.reshape(len(s), -1, numel).sum(1) for s in scaled]))
    if "bias" in names:
        terms["bias"] = Vectors(_sum([d.reshape(len(d), -1, numel).sum(1) for d in backprops]))
    return terms


def _sum(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)


def embedding(layer: nn.Embedding, calls: Sequence[Call], names: frozenset[str]) -> dict[str, Term]:
    """A table read at the record's tokens; the padding token's row has no gradient."""
    b = len(calls[0].backprop)
    ids = _along_positions([call.inputs[0].reshape(b, -1) for call in calls])
    backprops = _along_positions([_exact(call.backprop).reshape(b, -1, layer.embedding_dim) for call in calls])
    if layer.padding_idx is not None:
        backprops = backprops.masked_fill((ids == layer.padding_idx).unsqueeze(2), 0)
    return {"weight": Lookups(ids, backprops, layer.num_embeddings)}


def fallback(layer: nn.Module, calls: Sequence[Call], names: frozenset[str]) -> dict[str, Term]:
    """Any other layer: a vector-Jacobian product per record through `torch.func`, materialised."""
    summed: dict[str, Tensor] = {}
    for call in calls:
        for name, gradient in _vjp_per_record(layer, call).items():
            summed[name] = summed[name] + gradient if name in summed else gradient
    return {name: Vectors(_exact(gradient).flatten(1)) for name, gradient in summed.items() if name in names}


def _vjp_per_record(layer: nn.Module, call: Call) -> dict[str, Tensor]:
    def one(backprop: Tensor, *inputs: Tensor) -> dict[str, Tensor]:
        def forward(parameters: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(layer, parameters, tuple(x.unsqueeze(0) for x in inputs)).squeeze(0)

        return torch.func.vjp(forward, dict(call.parameters))[1](backprop)[0]

    return torch.func.vmap(one, randomness="error")(call.backprop, *call.inputs)


RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Conv1d: convolution,
    nn.Conv2d: convolution,
    nn.GroupNorm: group_norm,
    nn.BatchNorm1d: frozen_batch_norm,
    nn.BatchNorm2d: frozen_batch_norm,
    nn.LayerNorm: layer_norm,
    nn.Embedding: embedding,
}


def rule_for(layer: nn.Module) -> Rule | None:
    """The rule of a layer's class, or of the class whose `forward` it inherits unchanged; None where there is none."""
    if parametrize.is_parametrized(layer) or any(True for _ in layer.children()):
        return None
    return next((rule for kind, rule in RULES.items() if type(layer).forward is kind.forward
                 and isinstance(layer, kind)), None)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Site:
    """A layer whose calls are booked: its name in the model, its rule, its trainable parameters by their name in it."""

    name: str
    layer: nn.Module
    rule: Rule
    parameters: Mapping[str, nn.Parameter]

    def terms(self, calls: Sequence[Call]) -> dict[str, Term]:
        """One term per trainable parameter."""
        return self.rule(self.layer, calls, frozenset(self.parameters))


def sites(model: nn.Module) -> list[Site]:
    """Every place where trainable parameters enter the computation.

    A layer without a rule becomes one place together with everything inside it, and a warning names it.

    Raises:
        EquidpError: for a layer inside such a place that is also used outside it.
    """
    found = list(_walk(model, "", set()))
    _refuse_reuse(model, [site for site in found if site.rule is fallback])
    return found


def _walk(layer: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[Site]:
    if layer in seen or not any(p.requires_grad for p in layer.parameters()):
        return
    seen.add(layer)
    own = {k: p for k, p in layer.named_parameters(recurse=False) if p.requires_grad}
    rule = rule_for(layer)
    if own and rule:
        yield Site(name, layer, rule, own)
    elif own or parametrize.is_parametrized(layer):
        warnings.warn(
            f"Layer {name or 'model'!r} ({type(layer).__name__}) has no gradient rule; it goes through torch.func, "
            "which is correct but slower.",
            stacklevel=2,
        )
        yield Site(name, layer, fallback, {k: p for k, p in layer.named_parameters() if p.requires_grad})
    else:
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
