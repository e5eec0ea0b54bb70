"""Book-keeping: per-record gradient norms of a batch, then any weighted sum of its gradients (Bu et al. 2023).

It takes one forward pass, and one backward pass to the outputs of the trainable layers only. On the private path
autograd never forms parameter gradients. `layers.py` says how a layer's norms and weighted sum follow from its inputs
and backprops.
"""

from __future__ import annotations

import contextlib
import copy
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import chain
from typing import Any, Literal, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn

from equidp.errors import EquidpError
from equidp.gradients.blocks import Blocks
from equidp.gradients.layers import Call, fallback
from equidp.gradients.layout import channels_last, convolutions_for
from equidp.gradients.losses import KnowsGradient, Loss
from equidp.gradients.precision import refuse_autocast, refuse_half_on_cpu
from equidp.gradients.refusals import (
    BATCH_NORMS,
    Untrained,
    refuse_batch_statistics,
    refuse_mixing,
    refuse_trained_loss,
    refuse_unfit,
)
from equidp.gradients.sites import READ_VALUES, Site, sites
from equidp.gradients.tape import Tape
from equidp.gradients.terms import Gradients, Shared, Term
from equidp.gradients.together import Together
from equidp.gradients.units import Units, UnitSums
from equidp.gradients.workspace import Workspace

Precision = Literal["float32", "bf16"]

Iterate = tuple[Tensor | None, float]
"""A flat `[d]` vector of parameters, or None for the current ones, and the coefficient of the gradients there."""


class Asked(TypedDict, total=False):
    """Options of `norms`; `GradientEngine.norms` explains them."""

    owners: Tensor | None
    iterates: Sequence[Iterate] | None
    views: int


NOTHING = contextlib.nullcontext()
FEW_FLOATS = 1 << 17
"""Up to so many numbers in all, the views of a batch share one pass on a CPU."""


class BookKeeping:
    """Norms and sums of a model that was tried before; arguments and errors as of `GradientEngine`."""

    def __init__(self, model: nn.Module, loss: Loss, *, precision: Precision = "float32") -> None:
        if precision not in ("float32", "bf16"):
            raise EquidpError(f"Precision {precision!r} is not one of float32, bf16.")
        self.model, self.loss, self.precision = model, loss, precision
        self.parameters = tuple(p for p in model.parameters() if p.requires_grad)
        if not self.parameters:
            raise EquidpError(
                "The model has no trainable parameters. If an earlier trainer or engine has taken them, create the "
                "model anew: what it learnt from these records is not in a new trainer's ε. Else switch requires_grad "
                "on for at least one."
            )
        # the type of autocast on this device; the meta device has none, and counts as a CPU
        self.autocast_kind = self.device.type if torch.amp.is_autocast_available(self.device.type) else "cpu"
        refuse_unfit(model)
        refuse_half_on_cpu(model, precision)
        refuse_mixing(model)
        refuse_trained_loss(model, loss)
        self.sites = sites(model)
        self.blocks = Blocks()
        """Layers that see several rows of each record."""
        self.batch_norms = [(k, layer) for k, layer in model.named_modules() if isinstance(layer, BATCH_NORMS)]
        self._opaque = any(site.rule is fallback for site in self.sites)
        self._convolutions = convolutions_for(model)
        # not under autocast, which would give the loss half precision, nor with rules that read parameters
        alone = len(self.sites) == 1 and self.sites[0].rule not in READ_VALUES
        self._closed = alone and precision == "float32" and isinstance(loss, KnowsGradient)
        self._sizes = [p.numel() for p in self.parameters]
        self.dimension = sum(self._sizes)
        self._units: Units | None = None
        self._calls: dict[Site, list[Call]] | None = None  # of a pass whose norms were not computed yet
        self._kept: dict[nn.Parameter, Gradients] | None = None
        self._together: Together | None = None
        self._clean = True
        self._records, self._views = 0, 1
        self.keeps_outputs = False
        """Whether to keep `outputs_kept`."""
        self.outputs_kept: Tensor | None = None
        """The model's outputs `[b, …]` in the last pass of the last `norms`; None for an empty batch."""
        self.workspace = Workspace(self.device)
        self._tape: Tape | None = None
        self.watched = Untrained(model, loss).watched
        for parameter in self.parameters:
            parameter.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.parameters[0].device

    def norms(self, features: Tensor, labels: Tensor, **asked: Unpack[Asked]) -> Tensor:
        """As `GradientEngine.norms`, without trying the model out."""
        self.keep(features, labels, **asked)
        return self.kept_norms(asked.get("owners"))

    def kept_norms(self, owners: Tensor | None = None) -> Tensor:
        """Return the norms, of records or of units, for the passes that `keep` has made."""
        rows, kept = self._gradients(owners)
        if not self._records:
            return torch.zeros(rows, device=self.device)
        if self.device.type != "cpu" and self._units is None:
            terms = [kept.get(parameter) for parameter in self.parameters]
            self._together = Together(terms, self._sizes, rows, self.parameters[0], self.workspace)
            return self._norms(self._together.squared_norms())
        return self._norms(self._squared_norms(kept, rows))

    def norms_by_parameter(self, features: Tensor, labels: Tensor, **asked: Unpack[Asked]) -> Tensor:
        """As `GradientEngine.norms_by_parameter`, without trying the model out."""
        self.keep(features, labels, **asked)
        rows, kept = self._gradients(asked.get("owners"))
        nothing = torch.zeros(rows, device=self.device)
        with torch.inference_mode():
            found = [kept[p].squared_norms().float() if p in kept else nothing for p in self.parameters]
            squared = torch.stack(found)
        return self._norms(squared)

    def keep(self, features: Tensor, labels: Tensor, **asked: Unpack[Asked]) -> None:
        """Make the forward and backward passes of `norms`, which do not depend on units."""
        iterates, views = asked.get("iterates"), asked.get("views", 1)
        refuse_autocast(self.autocast_kind)
        self.clear()
        self._records, self._views = len(labels), views
        if not self._records:
            self._calls = {}
        else:
            refuse_batch_statistics(self.batch_norms)
            self._calls = self.watched(lambda: self.calls(features, labels, iterates or [(None, 1.0)], views))

    def _gradients(self, owners: Tensor | None) -> tuple[int, dict[nn.Parameter, Gradients]]:
        """Return the number of records (units) of the last passes, and what is kept of their gradients."""
        self._units = None if owners is None else Units.of(owners)
        rows = self._records if self._units is None else len(self._units.counts)
        calls, self._calls = self._calls, None
        if calls is None:
            raise EquidpError("Norms are asked for once, after the passes they are of; call keep first.")
        self._kept = self._kept_by(calls, rows)
        return rows, self._kept

    def _norms(self, squared: Tensor) -> Tensor:
        norms = squared.sqrt().float()
        self._clean = all_finite(norms)
        return norms if self._views == 1 else norms.div_(self._views)  # the books hold sums over a record's views

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """As `GradientEngine.weighted_sum`."""
        refuse_autocast(self.autocast_kind)
        if self._kept is None:
            raise EquidpError("weighted_sum needs what a preceding norms call kept; call norms first.")
        rows = self._records if self._units is None else len(self._units.counts)
        if not weights.dim() or weights.shape[-1] != rows:
            raise EquidpError(
                f"weighted_sum got {weights.shape[-1] if weights.dim() else 1} weights for {rows} "
                f"{'records' if self._units is None else 'units'}."
            )
        if weights.dim() > 1 and (self._together is not None or len(weights) != len(self.parameters)):
            raise EquidpError(
                f"Weights of {list(weights.shape)} follow norms_by_parameter, and are {[len(self.parameters), rows]}."
            )
        total = torch.empty(self.dimension, dtype=torch.float32, device=self.device)
        with torch.inference_mode():
            weights = weights if self._views == 1 else weights / self._views
            if self._together is not None:
                torch.cat(self._together.weighted_sums(weights), out=total)
            else:
                silent = None if self._clean else weights == 0
                shares = zip(self._by_parameter(weights), self._by_parameter(silent), strict=True)
                # each sum is copied while the caches hold it; all sums at once would take a model's memory more
                for p, room, (each, unheard) in zip(self.parameters, total.split(self._sizes), shares, strict=True):
                    room.copy_(self._kept[p].weighted_sum(each, unheard)) if p in self._kept else room.zero_()
        return total

    def _by_parameter(self, values: Tensor | None) -> Sequence[Any]:
        return [values] * len(self.parameters) if values is None or values.dim() == 1 else values.unbind()

    def overstatement(self) -> Tensor:
        """`[b]` (or `[U]`): by how much the squares of the last `norms` may be too large, where gradients cancel."""
        with torch.inference_mode():
            found = [gradients.overstatement() for gradients in (self._kept or {}).values()]
            total = reduce(operator.add, found) if found else torch.zeros(())
        return total / self._views**2

    def without_gradient(self) -> list[nn.Parameter]:
        """Return the parameters on which the losses of the last `norms` do not depend."""
        return [parameter for parameter in self.parameters if parameter not in (self._kept or {})]

    def plain_sum(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        owners: Tensor | None = None,
        weights: Tensor | None = None,
        views: int = 1,
    ) -> Tensor:
        """`[d]` float32: Σ w_i g_i by ordinary autograd, without privacy.

        Args:
            features, labels, owners, views: as of `norms`.
            weights: `[b]` (or `[U]`); 1 where None.
        """
        self.clear()
        if not len(features):
            return torch.zeros(self.dimension, device=self.device)
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        try:
            with self._autocast():
                losses = self.loss(self.outputs(features), repeated(labels, views))
            losses = one_each(losses, features)
            if not losses.requires_grad:  # they depend on no parameter
                return torch.zeros(self.dimension, device=self.device)
            if views > 1:
                losses = losses.unflatten(0, (views, -1)).mean(0)
            shares = torch.ones_like(losses) if owners is None else Units.of(owners).share()
            if weights is not None:
                shares = shares * (weights if owners is None else weights[owners])
            found = torch.autograd.grad(
                (losses * shares).sum(), self.parameters, allow_unused=True, materialize_grads=True
            )
        finally:
            for parameter in self.parameters:
                parameter.requires_grad_(False)
        return torch.cat([gradient.reshape(-1) for gradient in found])

    def clear(self) -> None:
        """Forget the last batch."""
        self._calls, self._kept, self._units, self._together, self.outputs_kept = None, None, None, None, None
        if self._tape is not None:  # an interrupted pass may have left its hooks
            self._tape.__exit__()
            self._tape = None

    def twin(self) -> BookKeeping:
        """Return another instance for the same model, with its own kept values and memory."""
        other = copy.copy(self)
        other.workspace = Workspace(self.device)
        other.clear()
        return other

    def views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split_with_sizes(self._sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bf16" else NOTHING

    @torch.no_grad()
    def outputs_at(self, features: Tensor, weights: Tensor | None) -> Tensor:
        """Return outputs `[b, …]` in the precision and layout of the passes, at `[d]` other parameters if given."""
        with NOTHING if weights is None else self.parameters_at(weights), self._autocast():
            return self.outputs(features)

    def outputs(self, features: Tensor) -> Tensor:
        """Return the model's outputs `[b, …]`, in the memory layout of the passes."""
        with channels_last(self._convolutions) if self._convolutions else NOTHING:
            outputs: Tensor = self.model(features)
        return outputs

    def together(self, numbers: int, views: int) -> int:
        """Return how many views share one pass: all if that is cheaper, else 1.

        It is cheaper on a GPU, and on a CPU if its caches hold all `numbers` of the features.
        """
        return views if self.device.type != "cpu" or numbers <= FEW_FLOATS else 1

    def calls(
        self, features: Tensor, labels: Tensor, iterates: Sequence[Iterate], views: int = 1
    ) -> dict[Site, list[Call]]:
        """Make the passes, and return the calls of each layer with their backprops.

        With m views a layer has m calls for each that it has with one. The gradients of all calls are added up.
        """
        calls: dict[Site, list[Call]] = defaultdict(list)
        together = self.together(features.numel(), views)
        labels = repeated(labels, together)
        parts = (features,) if together == views else features.chunk(views // together)
        for values, coefficient in iterates:
            with NOTHING if values is None else self.parameters_at(values):
                for site, call in chain.from_iterable(self._one_pass(part, labels) for part in parts):
                    calls[site] += (call if coefficient == 1 else call.times(coefficient)).parted(together)
        return calls

    @torch.enable_grad()  # whatever the loop around it has
    def _one_pass(self, features: Tensor, labels: Tensor) -> list[tuple[Site, Call]]:
        tape = self._tape = Tape(
            self.sites, len(features), blocks=self.blocks, kind=features.shape[1:], buffers=self._buffers()
        )
        with tape, self._autocast():
            outputs = self.outputs(features)
            if self.keeps_outputs:
                self.outputs_kept = outputs.detach()
            if self._closed and tape.ends_at(outputs):  # no autograd is needed for one layer before such a loss
                loss = cast(KnowsGradient, self.loss)  # asked when this was made: asking a protocol takes 5 µs
                if (backprop := loss.gradient(outputs.detach(), labels)) is not None:
                    return tape.ended_by(backprop)
            losses = self.loss(outputs, labels)
        ones = None
        if self.device.type != "cpu":
            ones = self.workspace.ones(len(losses), losses)
        return tape.calls(one_each(losses, features), ones)

    def _buffers(self) -> set[int]:
        """Return the ids of the model's buffers, if it has a layer without a rule, which may be given one by name."""
        return set(map(id, self.model.buffers())) if self._opaque else set()

    @contextlib.contextmanager
    def parameters_at(self, values: Tensor) -> Iterator[None]:
        """Within this context the parameters are views of another vector; no copy is made."""
        saved = [p.data for p in self.parameters]
        try:
            for parameter, view in zip(self.parameters, self.views(values.detach()), strict=True):
                parameter.data = view
            yield
        finally:
            for parameter, data in zip(self.parameters, saved, strict=True):
                parameter.data = data

    def _kept_by(self, calls: dict[Site, list[Call]], rows: int) -> dict[nn.Parameter, Gradients]:
        found: dict[nn.Parameter, list[Term]] = defaultdict(list)
        for site, site_calls in calls.items():
            # views cost less in inference mode, but torch.func does not support it
            with torch.no_grad() if site.rule is fallback else torch.inference_mode():
                for name, term in site.terms(site_calls, self.workspace).items():
                    found[site.parameters[name]].append(term)
        kept: dict[nn.Parameter, Gradients] = {}
        for parameter, terms in found.items():
            if self._units is not None:
                kept[parameter] = UnitSums(terms, self._units, parameter.numel())
            else:
                kept[parameter] = terms[0] if len(terms) == 1 else Shared(terms, rows, parameter.numel())
        return kept

    @torch.inference_mode()  # tensors that leave the engine are made outside of it
    def _squared_norms(self, kept: dict[nn.Parameter, Gradients], rows: int) -> Tensor:
        found = [gradients.squared_norms() for gradients in kept.values()]
        return reduce(operator.add, found) if found else torch.zeros(rows, device=self.device)


def one_each(losses: Tensor, features: Tensor) -> Tensor:
    """Return the losses `[b]`.

    Raises:
        EquidpError: there is not one loss for each record.
    """
    if losses.shape != (len(features),):
        records = "1 record" if len(features) == 1 else f"{len(features)} records"
        advice = ""
        if losses.dim() > 1:
            advice = (
                " Outputs [b, 1] beside labels [b] give [b, b]: squeeze(1) them. Several of one record are added up or "
                "averaged: loss.flatten(1).sum(1)."
            )
        elif len(features) == 1:
            advice = " A squeeze() drops the dimension of a single record: name one, as squeeze(1) does."
        raise EquidpError(
            f"The loss has shape {tuple(losses.shape)} for {records}; it must be one number per record "
            f"(reduction='none').{advice}"
        )
    return losses


def repeated(labels: Tensor, views: int) -> Tensor:
    """Return `[m·b, …]` labels for m views of b records."""
    return labels if views == 1 else labels.repeat(views, *[1] * (labels.dim() - 1))


def all_finite(norms: Tensor) -> bool:
    """Whether norms (none is negative) are known to be finite. On a GPU no: the answer would have to reach the CPU."""
    return norms.device.type == "cpu" and math.isfinite(norms.sum())
