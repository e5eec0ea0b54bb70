"""Recording: the passes of a step, launched once on a GPU, recorded, and replayed as CUDA graphs.

A small model's step is a few hundred operations, and launching each of them takes longer than doing it. Only norms and
weighted sums are recorded; they follow from batch, weights and parameters. Sampling, side releases, noise and update
are not, and so nothing that draws a random number.

A recording has a fixed number of rows, and a Poisson batch has not: it is laid into the first of them. The rows after
it hold what they held before and have weight 0, so that they add exactly nothing, and their norms are dropped. A batch
that is larger, or much smaller, gets a recording of its own, or none: no record is ever left out.

No recording is trusted unseen: until parameters have changed a few times its batches are computed both ways.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from equidp.errors import EquidpError
from equidp.gradients.passes import Iterate, Passes, Precision
from equidp.gradients.probe import TOLERANCE
from equidp.system.threads import GLOBAL_RANDOM

TRIALS = 3
"""States of the parameters at which a recording's batches are computed both ways.

It counts states and not batches: batches at the same parameters do not show whether parameters are read anew.
"""

MOST = 4
"""Recordings of one run: each keeps the memory of a whole step."""

WARM_UP = 3
"""Passes before the recorded one, in which libraries choose their kernels and get their room."""

REMEDY = "leave training.cuda_graphs out."


class Recorder(Protocol):
    """Records the passes of one recording, in the order in which they will be replayed.

    Each is done before the next one is recorded, which may read what it leaves.
    """

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """`work` once more with every call, on what the tensors that it read hold by then; the result is overwritten
        by the next call.
        """


class Recordable(Passes, Protocol):
    """Passes that can be recorded.

    Attributes:
        parameters: the trained ones, in order.
        precision: in which forward and backward run.
    """

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]: ...
    @property
    def precision(self) -> Precision: ...

    def clear(self) -> None:
        """Forget the last batch."""

    def twin(self) -> Recordable:
        """Others on the same model, with memory of their own."""


class CudaGraphs:
    """Recorder on a CUDA device; the graphs share their memory.

    Args:
        device: where the model is; None for the current one.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        gc.collect()  # an earlier run's passes and recordings hold each other, and so the memory of whole steps

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A graph of `work`."""
        # of a process's threads one records at a time, and none seeds the generators, which a capture registers
        with GLOBAL_RANDOM, torch.cuda.device(self._device):
            return self._record(work)

    def _record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                work()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # thread_local: what trains in another thread may go on allocating
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()
        # so far nothing is computed: the next warm-up would look up, by ids that nobody wrote, rows that are not there
        graph.replay()

        def again() -> Tensor:
            graph.replay()
            return result

        return again


class Recording:
    """Norms and weighted sums of batches that are about as large as a given one, and have at most `limit` records."""

    def __init__(
        self, passes: Recordable, recorder: Recorder, features: Tensor, labels: Tensor, limit: int | None
    ) -> None:
        self._records, self._states = len(features), 0
        self._seen: list[Tensor] = []  # the parameters of the last state, while on trial
        # a Poisson batch of that size on average is larger once in 30,000
        size = self._records + 4 * round(self._records**0.5)
        size = size if limit is None else max(self._records, min(size, limit))
        self._sizes = range(self._records // 2, size + 1)
        self._features, self._labels = (x.new_zeros(size, *x.shape[1:]) for x in (features, labels))
        self._weights = torch.zeros(size, device=features.device)
        self._passes = passes.twin()  # its books are those that the recorded sum reads
        self._norms = recorder.record(lambda: self._passes.norms(self._features, self._labels))
        self._sum = recorder.record(lambda: self._passes.weighted_sum(self._weights))

    def fits(self, records: int) -> bool:
        """Whether a batch of so many has room, without wasting most of the work."""
        return records in self._sizes

    @property
    def on_trial(self) -> bool:
        """Whether it has yet to be trusted."""
        return self._states <= TRIALS

    def norms(self, features: Tensor, labels: Tensor) -> Tensor:
        """`[b]`, as of the passes."""
        self._records = len(features)
        if self.on_trial:
            self._count_states()
        self._features[: len(features)].copy_(features)
        self._labels[: len(labels)].copy_(labels)
        return self._norms()[: len(features)].clone()

    def _count_states(self) -> None:
        now = self._passes.parameters
        if not self._seen or not all(torch.equal(p, seen) for p, seen in zip(now, self._seen, strict=True)):
            self._states += 1
            self._seen = [p.detach().clone() for p in now] if self.on_trial else []

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """`[d]`, of the last batch, as of the passes."""
        self._weights[: self._records].copy_(weights)
        self._weights[self._records :].zero_()
        return self._sum().clone()


class Recordings:
    """Passes that replay what they have recorded, where a batch fits, and compute the others afresh.

    Args:
        passes: whose work is recorded.
        new_recorder: makes the recorder of one recording.
        limit: no batch has more records, so none needs more room; None: any may come.
    """

    def __init__(self, passes: Recordable, new_recorder: Callable[[], Recorder], limit: int | None) -> None:
        self._passes, self._new_recorder, self._limit = passes, new_recorder, limit
        self._made: list[Recording] = []
        self._last = torch.zeros(0)
        self._current: Recording | None = None  # whose norms were asked for last

    def norms(
        self,
        features: Tensor,
        labels: Tensor,
        *,
        owners: Tensor | None = None,
        iterates: Sequence[Iterate] | None = None,
        views: int = 1,
    ) -> Tensor:
        """As of the passes; units, other iterates and several views are computed afresh.

        Raises:
            EquidpError: for passes that cannot be recorded, or come to something else when replayed.
        """
        self._passes.clear()
        self._current = None
        plain = len(features) and owners is None and iterates is None and views == 1
        recording = self._fitting(features, labels) if plain else None
        if recording is None:
            return self._passes.norms(features, labels, owners=owners, iterates=iterates, views=views)
        found = recording.norms(features, labels)
        if recording.on_trial:
            expected = self._passes.norms(features, labels)  # their own sum wants their books too
            allowed = self._tolerance()
            _compare(torch.isclose(found, expected, rtol=allowed, atol=1e-6 * allowed, equal_nan=True).all())
        self._current, self._last = recording, found
        return found

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """As of the passes."""
        if self._current is None:
            return self._passes.weighted_sum(weights)
        found = self._current.weighted_sum(weights)
        if self._current.on_trial:
            expected = self._passes.weighted_sum(weights)
            size = expected.norm() + 0.1 * torch.where(weights > 0, weights * self._last, 0.0).sum()  # sums may cancel
            _compare((found - expected).norm() <= self._tolerance() * size)
        return found

    def _tolerance(self) -> float:
        return TOLERANCE[self._passes.precision]

    def _fitting(self, features: Tensor, labels: Tensor) -> Recording | None:
        for recording in self._made:
            if recording.fits(len(features)):
                return recording
        if len(self._made) == MOST:
            return None
        try:
            recording = Recording(self._passes, self._new_recorder(), features, labels, self._limit)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            raise EquidpError(f"The model's passes cannot be recorded as CUDA graphs ({reason}): {REMEDY}") from error
        self._made.append(recording)
        return recording


def _compare(equal: Tensor) -> None:
    if not equal:
        raise EquidpError(
            "The model's passes, replayed as CUDA graphs, give other gradients than computed afresh (so it is with a "
            f"model that draws random numbers, such as dropout): {REMEDY}"
        )
