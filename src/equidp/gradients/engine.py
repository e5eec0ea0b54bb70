"""Gradients: the engine that a step asks. It tries a model out before it trusts it, and may replay recorded passes.

The work is done in `bookkeeping.py`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Unpack

import torch
from torch import Tensor, nn

from equidp.errors import EquidpError
from equidp.gradients.bookkeeping import Asked, BookKeeping, Precision, repeated
from equidp.gradients.counted import refuse_counted
from equidp.gradients.digits import compare_digits
from equidp.gradients.losses import Loss
from equidp.gradients.misfit import FAILURES, raise_told
from equidp.gradients.precision import refuse_around, refuse_short_products
from equidp.gradients.probe import SEVERAL, look_again, probe
from equidp.gradients.recording import Recorder, Recordings
from equidp.gradients.refusals import Trained
from equidp.gradients.shape import FixedRows, padded, weighed_nothing
from equidp.gradients.shared import refuse_shared_draws
from equidp.gradients.shares import WholeShares
from equidp.gradients.used import of_others

logger = logging.getLogger(__name__)

LOOKS_APART = 61
"""At most so many passes lie between two looks at a model or a loss of others; the first looks follow more closely.

It is a prime, so that every chunk of a step has its turn. The last chunk may be a single record, which shows nothing.
"""


EARLIER = 3
"""So many states of the model are remembered, beside the present one, in which it was tried already."""


class Looks:
    """Says when to look again at a model or a loss of others: at once, then after 1, 3, 7, … passes, at most 61.

    After a refusal the next pass is looked at again, because a notebook's cell may be run again.
    """

    def __init__(self) -> None:
        self._left, self._apart, self._number = 1, 1, 0

    def due(self) -> bool:
        """Whether it is time for a look. Ask once for each pass."""
        self._left -= 1
        return self._left <= 0

    def held(self) -> None:
        """Note that the last look found nothing wrong."""
        self._left, self._apart = self._apart, min(2 * self._apart + 1, LOOKS_APART)
        self._number += 1

    def also_at_draws(self) -> bool:
        """Whether this look is also at what the model draws, which takes as long as four others: every fourth is."""
        return self._number % 4 == 2


class GradientEngine:
    """Per-record gradient norms of a batch, then any weighted sum of its gradients, from one forward and one backward.

    The model's trainable parameters stop requiring gradients for autograd; `parameters` remembers them in order.
    Every layer must keep records apart and have them along its first dimension.

    Args:
        model: maps features `[b, …]` to outputs `[b, …]`.
        loss: per-record losses of outputs and labels.
        precision: `bf16` runs forward and backward under autocast, on a GPU; norms and sums stay in float32.
        new_recorder: makes what the passes are recorded with, and replayed; None: they are computed afresh every time.
        rows: public number of rows that every private pass has (`shape.py`); None: as many as the batch has.
        exact: whether a model or a loss of others must give each record the same last bits beside any other records.

    Raises:
        EquidpError: for a model without trainable parameters, with some that are no float32, or with a layer that mixes
            records; on a CPU for half precision.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        precision: Precision = "float32",
        new_recorder: Callable[[], Recorder] | None = None,
        rows: int | None = None,
        exact: bool = False,
    ) -> None:
        self._trained = Trained(model, loss)
        self.passes = BookKeeping(model, loss, precision=precision)
        self.model, self.loss, self.precision = model, loss, precision
        self.parameters, self.dimension = self.passes.parameters, self.passes.dimension
        self.autocast_kind = self.passes.autocast_kind
        self.rows, self.exact = rows, exact
        self.in_pieces = rows is not None
        """Whether the records of one batch may come in several passes, so that they must share no random numbers."""
        self._shares = WholeShares(model, loss)
        self._asked: BookKeeping | Recordings | FixedRows
        self.record_passes(new_recorder)
        self._probed_in: object = None  # what `here` gave when the model was tried
        self._beside = self._trained.beside()
        self._told = False  # that hooks have changed
        self._tried = 0  # records in the largest batch that was tried in this state
        self._earlier: list[tuple[object, int]] = []  # other states that were tried, and with how many records
        self._others = of_others(model, loss)
        self._looks = Looks()  # in passes
        self._looked_at = 0  # rows of the largest pass that was looked at
        self._gradient: Tensor | None = None
        self._held: list[Tensor] = []  # its parts, one for each parameter

    def __repr__(self) -> str:
        return f"<GradientEngine of {type(self.model).__name__}: {self.dimension} trained parameters, {self.precision}>"

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.passes.device

    def record_passes(self, new_recorder: Callable[[], Recorder] | None) -> None:
        """Replay passes from here on; with None compute them afresh."""
        self._new_recorder = new_recorder
        work = self.passes if new_recorder is None else Recordings(self.passes, new_recorder)
        self._asked = work if self.rows is None else FixedRows(work, self.rows, self._shares)

    def train(self) -> None:
        """Put the model into training mode, except for its BatchNorms, which must be frozen."""
        self.model.train()
        for _, layer in self.passes.batch_norms:
            layer.eval()

    def norms(self, features: Tensor, labels: Tensor, **asked: Unpack[Asked]) -> Tensor:
        """Per-record l2 norms over all trainable parameters; keeps what `weighted_sum` needs.

        Args:
            features: `[b, …]`, or with m views of every record `[m·b, …]`, a first view of all b, then a second one; b
                may be 0.
            labels: `[b, …]`.
            asked: `owners`, `[b]` int64 ids 0…U−1, ascending, of the unit each record belongs to: norms and weights are
                then per unit, and a unit's gradient is the mean of its records' gradients. `iterates`: replaces each
                gradient by `Σ c·∇f(θ; x)` over the `(θ, c)` given; θ is a flat `[d]` vector of parameters or None for
                the current ones; the parameters are as before afterwards. `views`, m: a record's gradient is then the
                mean of its views' gradients.

        Returns:
            `[b]` (or `[U]`) float32. What is not finite stays so: the caller masks it.

        Raises:
            EquidpError: for features or labels that are no tensors or that model or loss does not take, where torch
                would take norms and sums in fewer digits, for a layer called in a way that cannot be followed, or if
                a model's first batch shows that its gradients would be wrong (`probe.py`), or its layers or parameters
                were replaced since the engine was made.
        """
        self.try_out(features, labels, asked.get("views", 1))
        try:
            return self._asked.norms(features, labels, **asked)
        except FAILURES as error:
            raise_told(error, self.passes, features, labels)

    def norms_by_parameter(self, features: Tensor, labels: Tensor, **asked: Unpack[Asked]) -> Tensor:
        """As `norms`, of each parameter's part of the gradients: for a step of your own that clips layer by layer.

        `weighted_sum` then takes as many weights, or one for each record. With parts bounded by C_p in the order of
        `parameters`, a record adds at most (Σ C_p²)^(1/2); a layer's norm is the root of its parameters' squares.

        Returns:
            `[P, b]` (or `[P, U]`) float32, in the order of `parameters`; 0 where the losses depend on none. What is not
            finite stays so: the caller masks it.

        Raises:
            EquidpError: as `norms`, and on a GPU, for an engine that records passes or pads them to a number of rows.
        """
        if self._asked is not self.passes or self.device.type != "cpu":
            raise EquidpError(
                "Norms by parameter were checked on a CPU alone, without `rows` and `new_recorder`: make the engine so."
            )
        self.try_out(features, labels, asked.get("views", 1))
        try:
            return self.passes.norms_by_parameter(features, labels, **asked)
        except FAILURES as error:
            raise_told(error, self.passes, features, labels)

    def try_out(self, features: Tensor, labels: Tensor, views: int = 1) -> None:
        """Try the model before it is used on private records: is each record's gradient its own?

        Every model is tried on the first batch, with the first view of each record. A model or a loss of others is
        looked at again from time to time, with all views, and in every batch that has more records than any before. A
        trial makes the engine forget the last batch.

        Raises:
            EquidpError: as `norms`.
        """
        if not (isinstance(features, Tensor) and isinstance(labels, Tensor)):
            raise EquidpError(
                f"Features and labels must be one tensor each, not {type(features).__name__} and "
                f"{type(labels).__name__}: `packed` makes one of several, and of a model that takes them."
            )
        refuse_around(self.autocast_kind)
        done = self.computed_by()
        if (beside := done[1]) != self._beside:
            self._beside, self._others, self._looks = beside, of_others(self.model, self.loss), Looks()
            self.record_passes(self._new_recorder)
            if self._probed_in is not None and not self._told:
                self._told = True
                logger.warning(
                    "Layers have other hooks than in the step before, or compute something else. So the model is tried "
                    "again, which takes as long as some dozens of steps: let hooks stay, or add the same again."
                )

        def here() -> object:  # larger records have more windows
            return done, self.in_pieces, features.shape[1:] if self.passes.blocks else None

        if (state := here()) != self._probed_in:
            # a hook may come and go by turns: then a look follows, and no trial, except of which rows are a record's
            self._earlier = [(self._probed_in, self._tried), *self._earlier][:EARLIER]
            known = () if self.passes.blocks else self._earlier
            self._tried = next((tried for of, tried in known if of == state), 0)
            self._probed_in = state if self._tried else None
            self._shares.forget()
            self.passes.blocks.forget()
        first = features[: len(labels)] if views > 1 else features
        # again if there are twice as many records: some faults do not show among few
        if len(first) and min(len(first), SEVERAL) >= 2 * self._tried:
            with self._trying(first, labels):
                refuse_short_products(self.device)
                tried = probe(self.passes, first, labels, others=self._others)
                if tried and self._others:
                    refuse_counted(self.passes, first[:2], labels[:2])
                if tried > 1:
                    refuse_shared_draws(self.passes, first[:SEVERAL], labels[:SEVERAL], in_pieces=self.in_pieces)
                if tried > 1 and self._others and self.exact:
                    compare_digits(self.passes, self._computed, first, labels)
                self._tried = tried
                self._probed_in = here()  # by now it is known whether there are windows
        # also for more records than any before: a model may pass few records at once, and many in pieces
        if len(first) and (self.look_is_due() or (self._others and len(first) > self._looked_at)):
            self.look(features, labels, views)

    def computed_by(self) -> tuple[tuple[bool, ...], tuple[object, ...]]:
        """Return the modes of the layers, their hooks, forwards and switches: with others they may compute otherwise.

        Raises:
            EquidpError: the layers or the parameters are others than those that are trained.
        """
        return tuple(layer.training for layer in self._trained.layers()), self._trained.beside()

    def look_is_due(self) -> bool:
        """Whether a model or a loss of others is to be looked at in the next batch. Ask once for each batch.

        After a refusal this is true for every batch, until a `look` finds nothing wrong.
        """
        return self._others and self._looks.due()

    def look(self, features: Tensor, labels: Tensor, views: int = 1) -> None:
        """Look again whether each record's gradient is its own. The engine forgets the last batch.

        The pass has as many rows as a private pass: a model or a loss may choose among all rows, and with a public
        number of rows, or several views, there are more of them than records. The batch's records are repeated to fill
        them, each about as often as any other.

        Raises:
            EquidpError: as `norms`.
        """
        rows = len(labels) if self.rows is None else math.ceil(len(labels) / self.rows) * self.rows
        places = torch.arange(rows, device=labels.device) * len(labels) // rows
        together = self.passes.together(features.numel() // len(labels) * rows, views)  # others would be copied in vain
        longer, theirs = torch.cat([view[places] for view in features.chunk(views)[:together]]), labels[places]
        with self._trying(features[: len(labels)], labels):
            look_again(self.passes, longer, repeated(theirs, together), rows, sized=self.rows is None)
            if len(labels) > 1 and self._looks.also_at_draws():
                some = min(len(labels), SEVERAL)
                refuse_shared_draws(self.passes, features[:some], labels[:some], in_pieces=self.in_pieces)
        self._looks.held()
        self._looked_at = max(self._looked_at, rows)
        self._shares.forget()

    @contextlib.contextmanager
    def _trying(self, features: Tensor, labels: Tensor) -> Iterator[None]:
        try:
            with torch.enable_grad():
                yield
        except FAILURES as error:
            raise_told(error, self.passes, features, labels)
        self.passes.clear()

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """`[d]` float32: Σ w_i g_i for the records (units) of the last `norms` call, or of `norms_by_parameter`.

        Args:
            weights: `[b]` (or `[U]`); after `norms_by_parameter` also `[P, b]` (or `[P, U]`), one for each part.

        A record of weight 0 contributes exactly 0, whatever its gradient. May be called more than once.

        Raises:
            EquidpError: without a preceding `norms` call, or inside `torch.autocast`.
        """
        return self._asked.weighted_sum(weights)

    def outputs(self, features: Tensor) -> Tensor:
        """The model's outputs `[b, …]` for private records, at the public number of rows."""
        return self._of_records(self.passes.outputs, features)

    def outputs_at(self, features: Tensor, weights: Tensor | None) -> Tensor:
        """The outputs `[b, …]` that the passes have for private records, at `[d]` other parameters if given."""
        return self._of_records(lambda some: self.passes.outputs_at(some, weights), features)

    def _computed(self, features: Tensor, labels: Tensor) -> list[Tensor]:
        """Return what a pass computes of the records: outputs (if they are one tensor) and losses, each `[b, …]`.

        On a CPU also the inputs of the trained layers and the gradients at their outputs. On a GPU these may be added
        up in no fixed order. The pass has `SEVERAL` rows.
        """
        some, theirs = padded(features, SEVERAL), padded(labels, SEVERAL)

        def computed(some: Tensor) -> list[Tensor]:
            outputs = self.passes.outputs(some)
            losses = self.passes.loss(outputs, theirs)
            found = [outputs, losses] if isinstance(outputs, Tensor) else [losses]
            if self.device.type == "cpu":
                calls = chain.from_iterable(self.passes.calls(some, theirs, [(None, 1.0)]).values())
                found += [values for call in calls for values in (*call.inputs, call.backprop)]
            return found

        found = self._shares.passed(computed, some, len(some), "tried")
        return [values.detach()[: len(features)] for values in found]

    def _of_records(self, forward: Callable[[Tensor], Tensor], features: Tensor) -> Tensor:
        # at least one row: some layers fail on an empty batch, and a failed run would reveal that a batch was empty
        some = self.padded(features if len(features) else features.new_zeros(1, *features.shape[1:]))

        def work(some: Tensor) -> Tensor:
            return self.passes.watched(lambda: forward(some))

        found = work(some) if self.rows is None else self._shares.passed(work, some, len(some))
        return found[: len(features)]

    def padded(self, values: Tensor) -> Tensor:
        """Return `[b, …]` with rows added up to the public number of rows, if there is one."""
        return values if self.rows is None else padded(values, self.rows)

    def plain_sum(
        self, features: Tensor, labels: Tensor, *, owners: Tensor | None = None, views: int = 1, padded: bool = False
    ) -> Tensor:
        """`[d]` float32: Σ g_i by ordinary autograd, without privacy; over units if `owners` are given.

        `padded`: compute with the public number of rows; added rows have weight 0. Only for one view, without owners.
        """
        if not padded:
            return self.passes.plain_sum(features, labels, owners=owners, views=views)
        longer = self.padded(labels)
        weights = weighed_nothing(torch.ones(len(labels), device=self.device), len(longer))
        return self.passes.plain_sum(self.padded(features), longer, weights=weights)

    def flatten(self) -> Tensor:
        """`[d]`: a copy of the current parameters."""
        return torch.cat([p.detach().reshape(-1) for p in self.parameters])

    @torch.no_grad()
    def load_(self, flat: Tensor) -> None:
        """Overwrite the parameters by a `[d]` vector."""
        for parameter, view in zip(self.parameters, self.passes.views(flat), strict=True):
            parameter.copy_(view)

    def apply_gradient(self, flat: Tensor, over: float = 1.0) -> None:
        """Let every parameter's `.grad` hold its part of a `[d]` vector divided by `over`, for an optimiser's step."""
        if self._gradient is None:
            gradient = torch.empty_like(flat)
            self._held, self._gradient = self.passes.views(gradient), gradient  # Ctrl-C may come between
        for parameter, view in zip(self.parameters, self._held, strict=True):
            # it is another tensor at first, after `zero_grad`, and after a backward() outside the engine
            if parameter.grad is not view:
                parameter.grad = view
        torch.div(flat, over, out=self._gradient)
