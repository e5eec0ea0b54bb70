"""Gradients: per-record gradient norms of a batch, then any weighted sum of its gradients.

One forward pass and one backward pass with respect to the outputs of the trainable layers only; parameter gradients
are never formed by autograd on the private path. What a layer's norm and weighted sum are made of is in `layers.py`.
"""

from __future__ import annotations

import contextlib
import copy
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from equidp.errors import EquidpError
from equidp.gradients.layers import Call, Site, fallback, sites
from equidp.gradients.losses import KnowsGradient, Loss
from equidp.gradients.probe import probe
from equidp.gradients.recording import Recorder, Recordings
from equidp.gradients.terms import Gradients, Shared, Term, Units, UnitSums, refuse_autocast, refuse_short_products
from equidp.gradients.workspace import Workspace

Precision = Literal["float32", "bf16"]
Iterate = tuple[Tensor | None, float]

NOTHING = contextlib.nullcontext()
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


class GradientEngine:
    """Per-record gradient norms of a batch, then any weighted sum of its gradients, from one forward and one backward.

    The model's trainable parameters stop requiring gradients for autograd; `parameters` remembers them in order.
    Every layer must keep records apart and have them along its first dimension.

    Args:
        model: maps features `[b, …]` to outputs `[b, …]`.
        loss: per-record losses of outputs and labels.
        precision: `bf16` runs forward and backward under autocast; norms and sums stay in float32.
        new_recorder: makes what the passes are recorded with, and replayed; None: they are computed afresh every time.
        limit: no batch that is recorded will have more records; None where that is not known.

    Raises:
        EquidpError: for a model without trainable parameters, with some that are no float32, or with a layer that mixes
            records.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        precision: Precision = "float32",
        new_recorder: Callable[[], Recorder] | None = None,
        limit: int | None = None,
    ) -> None:
        if precision not in ("float32", "bf16"):
            raise EquidpError(f"Precision {precision!r} is not one of float32, bf16.")
        self.model, self.loss, self.precision = model, loss, precision
        self.parameters = tuple(p for p in model.parameters() if p.requires_grad)
        if not self.parameters:
            raise EquidpError("The model has no trainable parameters; switch requires_grad on for at least one.")
        # of the device; one without autocast of its own (meta) has none to be asked about
        self.autocast_kind = self.device.type if torch.amp.is_autocast_available(self.device.type) else "cpu"
        _refuse_unfit(model)
        _refuse_mixing(model)
        self.sites = sites(model)
        self._batch_norms = [(k, layer) for k, layer in model.named_modules() if isinstance(layer, _BATCH_NORMS)]
        self._convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
        if self.device.type != "cpu" or any(isinstance(layer, nn.GroupNorm) for layer in model.modules()):
            self._convolutions = []  # torch's GroupNorm is up to ten times slower on channels-last images
        # autocast would give the loss half precision, and a fallback rule wants snapshots
        alone = len(self.sites) == 1 and self.sites[0].rule is not fallback
        self._closed = alone and precision == "float32" and isinstance(loss, KnowsGradient)
        self._sizes = [p.numel() for p in self.parameters]
        self.dimension = sum(self._sizes)
        self._gradient: Tensor | None = None
        self._units: Units | None = None
        self._books: dict[nn.Parameter, Gradients] | None = None
        self._clean = True
        self._probed = False
        self._records = 0
        self._workspace = Workspace(self.device)
        self._recordings = None if new_recorder is None else Recordings(self, new_recorder, limit)
        for parameter in self.parameters:
            parameter.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.parameters[0].device

    def train(self) -> None:
        """Put the model into training mode, its BatchNorms excepted: they were frozen when they were let in."""
        self.model.train()
        for _, layer in self._batch_norms:
            layer.eval()

    def norms(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        owners: Tensor | None = None,
        iterates: Sequence[Iterate] | None = None,
    ) -> Tensor:
        """Per-record l2 norms over all trainable parameters; keeps what `weighted_sum` needs.

        Args:
            features: `[b, …]`; b may be 0.
            labels: `[b, …]`.
            owners: `[b]` int64 ids 0…U−1, ascending, of the unit each record belongs to. Norms and weights are then per
                unit, and a unit's gradient is the mean of its records' gradients.
            iterates: replaces each gradient by `Σ c·∇f(θ; x)` over the `(θ, c)` given; θ is a flat `[d]` vector of
                parameters or None for the current ones. The parameters are as before afterwards.

        Returns:
            `[b]` (or `[U]`) float32. What is not finite stays so: the caller masks it.

        Raises:
            EquidpError: for features or labels that are no tensors, where torch would take norms and sums in fewer
                digits, for a layer called in a way that the books cannot hold, or if a model's first batch shows that
                its gradients would be wrong (`probe.py`).
        """
        self.try_out(features, labels)
        if self._recordings is not None and self._probed and len(features) and owners is None and iterates is None:
            return self._recordings.norms(features, labels)
        return self.unprobed_norms(features, labels, owners=owners, iterates=iterates)

    def try_out(self, features: Tensor, labels: Tensor) -> None:
        """Before a model is first used on private records: is each one's gradient its own? The books are cleared.

        Raises:
            EquidpError: as `norms`.
        """
        if not (isinstance(features, Tensor) and isinstance(labels, Tensor)):
            raise EquidpError(
                f"Features and labels must be one tensor each, not {type(features).__name__} and "
                f"{type(labels).__name__}: put what a record has of several kinds side by side (torch.cat), and let "
                "the model split it."
            )
        if not self._probed and len(features):
            refuse_short_products(self.device)
            with torch.enable_grad():
                self._probed = probe(self, features, labels)

    def unprobed_norms(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        owners: Tensor | None = None,
        iterates: Sequence[Iterate] | None = None,
    ) -> Tensor:
        """`norms` for a model that is trusted; `norms` tries two records of the first batch before it trusts any."""
        refuse_autocast(self.autocast_kind)
        self.clear()
        self._records = len(features)
        self._units = None if owners is None else Units.of(owners)
        rows = self._records if self._units is None else len(self._units.counts)
        if not self._records:
            self._books = {}
            return torch.zeros(rows, device=self.device)
        self._refuse_training_batch_norm()
        calls = self._calls(features, labels, iterates or [(None, 1.0)])
        self._books = self._book(calls, rows)
        norms = self._squared_norms(self._books, rows).sqrt().float()
        self._clean = all_finite(norms)
        return norms

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """`[d]` float32: Σ w_i g_i for the records (units) of the last `norms` call.

        A record of weight 0 contributes exactly 0, whatever its gradient. May be called more than once.

        Raises:
            EquidpError: without a preceding `norms` call, or inside `torch.autocast`.
        """
        if self._recordings is not None and self._recordings.current is not None:
            return self._recordings.weighted_sum(weights)
        return self.booked_sum(weights)

    def booked_sum(self, weights: Tensor) -> Tensor:
        """`weighted_sum` from this engine's own books, where norms were computed afresh."""
        refuse_autocast(self.autocast_kind)
        if self._books is None:
            raise EquidpError("weighted_sum needs the books of a preceding norms call; call norms first.")
        rows = self._records if self._units is None else len(self._units.counts)
        if len(weights) != rows:
            raise EquidpError(
                f"weighted_sum got {len(weights)} weights for {rows} {'records' if self._units is None else 'units'}."
            )
        with torch.inference_mode():
            silent = None if self._clean else weights == 0
            sums = [
                self._books[p].weighted_sum(weights, silent).float()
                if p in self._books
                else torch.zeros(p.numel(), device=self.device)
                for p in self.parameters
            ]
        return torch.cat(sums)

    def plain_sum(self, features: Tensor, labels: Tensor, *, owners: Tensor | None = None) -> Tensor:
        """`[d]` float32: Σ g_i by ordinary autograd, without privacy; over units where `owners` are given."""
        self.clear()
        if not len(features):
            return torch.zeros(self.dimension, device=self.device)
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        try:
            losses = self._forward(features, labels)
            shares = 1.0 if owners is None else Units.of(owners).share()
            found = torch.autograd.grad(
                (losses * shares).sum(), self.parameters, allow_unused=True, materialize_grads=True
            )
        finally:
            for parameter in self.parameters:
                parameter.requires_grad_(False)
        return torch.cat([gradient.reshape(-1) for gradient in found])

    def clear(self) -> None:
        """Forget the last batch."""
        self._books, self._units = None, None
        if self._recordings is not None:
            self._recordings.current = None

    def twin(self) -> GradientEngine:
        """Another engine on the same model, with books and room of its own, and without recordings."""
        other = copy.copy(self)
        other._workspace, other._recordings = Workspace(self.device), None
        other.clear()
        return other

    def flatten(self) -> Tensor:
        """`[d]`: a copy of the current parameters."""
        return torch.cat([p.detach().reshape(-1) for p in self.parameters])

    @torch.no_grad()
    def load_(self, flat: Tensor) -> None:
        """Overwrite the parameters by a `[d]` vector."""
        for parameter, view in zip(self.parameters, self._views(flat), strict=True):
            parameter.copy_(view)

    def apply_gradient(self, flat: Tensor, over: float = 1.0) -> None:
        """Let every parameter's `.grad` hold its part of a `[d]` vector divided by `over`, for an optimiser's step."""
        if self._gradient is None:
            self._gradient = torch.empty_like(flat)
        if self.parameters[0].grad is None:  # the first time, and after an optimiser's `zero_grad`
            for parameter, view in zip(self.parameters, self._views(self._gradient), strict=True):
                parameter.grad = view
        torch.div(flat, over, out=self._gradient)

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split_with_sizes(self._sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def _forward(self, features: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bf16" else NOTHING:
            losses = self.loss(self._outputs(features), labels)
        if losses.shape != (len(features),):
            raise EquidpError(
                f"The loss has shape {tuple(losses.shape)} for {len(features)} records; it must be one number per "
                "record (reduction='none')."
            )
        return losses

    def _outputs(self, features: Tensor) -> Tensor:
        with self._channels_last() if self._convolutions else NOTHING:
            outputs: Tensor = self.model(features)
        return outputs

    @contextlib.contextmanager
    def _channels_last(self) -> Iterator[None]:
        """Give convolutions channels-last images on the CPU: up to twice as fast there, and what the books need."""
        hooks = [layer.register_forward_pre_hook(_to_channels_last) for layer in self._convolutions]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _calls(self, features: Tensor, labels: Tensor, iterates: Sequence[Iterate]) -> dict[Site, list[Call]]:
        calls: dict[Site, list[Call]] = defaultdict(list)
        for values, coefficient in iterates:
            with NOTHING if values is None else self._parameters_at(values):
                for site, call in self._one_pass(features, labels):
                    calls[site].append(call if coefficient == 1 else call.times(coefficient))
        return calls

    def _one_pass(self, features: Tensor, labels: Tensor) -> list[tuple[Site, Call]]:
        found = self._closed_pass(features, labels) if self._closed else None
        if found is not None:
            return found
        tape = _Tape(self.sites, len(features))
        with tape, torch.enable_grad():
            losses = self._forward(features, labels)
        return tape.calls(losses)

    def _closed_pass(self, features: Tensor, labels: Tensor) -> list[tuple[Site, Call]] | None:
        """The calls without autograd, for a model of one trainable layer whose output goes straight to the loss.

        None, once and for all, where it goes elsewhere.
        """
        loss = cast(KnowsGradient, self.loss)  # asked when the engine was made: asking a protocol takes 5 µs
        (site,) = self.sites
        seen: list[tuple[tuple[Tensor, ...], tuple[int, ...], Tensor, int]] = []

        def book(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if torch.is_grad_enabled():  # elsewhere the model asks for no gradient
                _check_call(site, inputs, output, len(features))
                seen.append((inputs, _versions(inputs), output, output._version))

        hook = site.layer.register_forward_hook(book)
        try:
            with torch.enable_grad():
                outputs = self._outputs(features)
        finally:
            hook.remove()
        if len(seen) == 1:
            inputs, versions, output, version = seen[0]
            if output is outputs and version == outputs._version:
                _refuse_changed(site, inputs, versions)
                if (backprop := loss.gradient(outputs, labels)) is not None:
                    return [(site, Call(inputs, backprop, {}))]
        self._closed = False
        return None

    @contextlib.contextmanager
    def _parameters_at(self, values: Tensor) -> Iterator[None]:
        """Point the parameters at another vector for one pass; no copy is made."""
        saved = [p.data for p in self.parameters]
        try:
            for parameter, view in zip(self.parameters, self._views(values.detach()), strict=True):
                parameter.data = view
            yield
        finally:
            for parameter, data in zip(self.parameters, saved, strict=True):
                parameter.data = data

    def _book(self, calls: dict[Site, list[Call]], rows: int) -> dict[nn.Parameter, Gradients]:
        found: dict[nn.Parameter, list[Term]] = defaultdict(list)
        for site, site_calls in calls.items():
            # inference mode spares every view its book-keeping; torch.func cannot do without
            with torch.no_grad() if site.rule is fallback else torch.inference_mode():
                for name, term in site.terms(site_calls, self._workspace).items():
                    found[site.parameters[name]].append(term)
        books: dict[nn.Parameter, Gradients] = {}
        for parameter, terms in found.items():
            if self._units is not None:
                books[parameter] = UnitSums(terms, self._units, parameter.numel())
            else:
                books[parameter] = terms[0] if len(terms) == 1 else Shared(terms, rows, parameter.numel())
        return books

    @torch.inference_mode()  # what leaves the engine is made outside
    def _squared_norms(self, books: dict[nn.Parameter, Gradients], rows: int) -> Tensor:
        found = [gradients.squared_norms() for gradients in books.values()]
        return reduce(operator.add, found) if found else torch.zeros(rows, device=self.device)

    def _refuse_training_batch_norm(self) -> None:
        for name, layer in self._batch_norms:
            if _mixes(layer):
                raise EquidpError(_batch_norm_message(name))


class _Tape:
    """Books the calls of the trainable layers during one forward pass, and their backprops afterwards."""

    def __init__(self, booked: Sequence[Site], records: int) -> None:
        self._sites, self._records = booked, records
        self._entries: list[tuple[Site, tuple[Tensor, ...], tuple[int, ...], GradientEdge]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> _Tape:
        for site in self._sites:
            self._hooks.append(site.layer.register_forward_pre_hook(self._open))
            self._hooks.append(site.layer.register_forward_hook(self._booking(site)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @staticmethod
    def _open(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Let the graph begin at the first trainable layer: its input asks for a gradient, so its output has one."""
        if not torch.is_grad_enabled() or any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            return None
        return tuple(
            x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
        )

    def _booking(self, site: Site) -> Callable[[nn.Module, tuple[Any, ...], Any], Tensor | None]:
        def book(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor | None:
            if not torch.is_grad_enabled():
                return None
            _check_call(site, inputs, output, self._records)
            fresh = None if output.requires_grad else output.detach().requires_grad_()
            kept = tuple(x.detach() for x in inputs)
            edge = get_gradient_edge(output if fresh is None else fresh)
            self._entries.append((site, kept, _versions(kept), edge))
            return fresh

        return book

    def calls(self, losses: Tensor) -> list[tuple[Site, Call]]:
        """One backward pass to the layers' outputs."""
        if not self._entries:
            return []
        edges = [entry[3] for entry in self._entries]
        # of the sum: torch would import sympy to look at the shape of given ones
        backprops = torch.autograd.grad(losses.sum(), edges, allow_unused=True) if losses.requires_grad else []
        found = []
        for (site, inputs, versions, _), backprop in zip(self._entries, backprops, strict=False):
            _refuse_changed(site, inputs, versions)
            if backprop is not None:
                found.append((site, Call(inputs, backprop, _snapshot(site))))
        return found


def _check_call(site: Site, inputs: tuple[Any, ...], output: Any, records: int) -> None:
    if not inputs or not all(isinstance(x, Tensor) for x in (*inputs, output)):
        raise EquidpError(
            f"Layer {site.name!r} ({type(site.layer).__name__}) must map tensors given by position to one tensor; "
            "write it from Linear, Conv2d, GroupNorm, LayerNorm or Embedding layers."
        )
    if any(not x.dim() or len(x) != records for x in (*inputs, output)):
        raise EquidpError(
            f"Layer {site.name!r} ({type(site.layer).__name__}) sees {tuple(inputs[0].shape)} for {records} "
            "records; records must stay along the first dimension."
        )


def _versions(inputs: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple(x._version for x in inputs)


def _refuse_changed(site: Site, inputs: tuple[Tensor, ...], versions: tuple[int, ...]) -> None:
    if _versions(inputs) != versions:
        raise EquidpError(f"The input of layer {site.name!r} is changed in place after use; copy it first.")


def all_finite(norms: Tensor) -> bool:
    """Whether norms, which are not negative, are known to be finite. On a GPU the answer would have to travel: no."""
    return norms.device.type == "cpu" and math.isfinite(norms.sum())


def _to_channels_last(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x = inputs[0]
    if x.dim() == 4 and x.shape[1] == 1 and x.is_contiguous():
        # with one channel both layouts are the same memory; the strides have to say which is meant
        return (x.as_strided(x.shape, (x.stride(0), 1, x.stride(2), 1)), *inputs[1:])
    return (x.contiguous(memory_format=torch.channels_last), *inputs[1:]) if x.dim() == 4 else inputs


def _snapshot(site: Site) -> dict[str, Tensor]:
    return {k: p.detach() for k, p in site.parameters.items()} if site.rule is fallback else {}


def _refuse_unfit(model: nn.Module) -> None:
    """Refuse, by name, trainable parameters that a flat float32 vector cannot hold."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if isinstance(parameter, nn.UninitializedParameter):
            raise EquidpError(f"Parameter {name!r} has no shape before the first batch; give its layer all its sizes.")
        if parameter.dtype != torch.float32:
            raise EquidpError(
                f"Parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}, and gradients are summed and "
                "noised in float32: make every trainable parameter one of that type (model.float() does); for cheaper "
                "passes there is training.precision=bf16."
            )


def _refuse_mixing(model: nn.Module) -> None:
    """Refuse, by name, every layer in which one record can reach another's output."""
    for name, layer in model.named_modules():
        if isinstance(layer, _BATCH_NORMS):
            if _mixes(layer):
                raise EquidpError(_batch_norm_message(name))
            continue
        if isinstance(layer, nn.Embedding) and (layer.scale_grad_by_freq or layer.max_norm is not None):
            raise EquidpError(
                f"Layer {name!r}: an Embedding with scale_grad_by_freq or max_norm mixes records; switch both off."
            )
        trained = any(p.requires_grad for p in layer.parameters())
        if trained and isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            raise EquidpError(
                f"Layer {name or 'model'!r} ({type(layer).__name__}) cannot be trained privately, as torch does not "
                "show what happens inside; write it from Linear layers, as models/bilstm.py does an LSTM and "
                "docs/pytorch.md attention."
            )
        if trained and getattr(layer, "track_running_stats", False):
            raise EquidpError(
                f"Layer {name or 'model'!r} ({type(layer).__name__}) keeps statistics of the records, which would "
                "leave with the model, without noise; switch track_running_stats off."
            )


def _mixes(layer: nn.Module) -> bool:
    """Whether a BatchNorm takes the batch's own statistics: in training, and always where it keeps no others."""
    return layer.training or layer.running_mean is None


def _batch_norm_message(name: str) -> str:
    return (
        f"Layer {name!r} is a BatchNorm that takes the batch's statistics, which mixes records; use GroupNorm, or "
        "freeze it, with the running statistics it has, by eval() before training."
    )
