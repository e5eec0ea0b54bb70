"""Recording: the passes of a step, launched once on a GPU, recorded, and replayed as CUDA graphs.

A small model's step is a few hundred operations, and launching each of them takes longer than doing it. Only norms and
weighted sums are recorded; they follow from batch, weights and parameters. Sampling, side releases, noise and update
are not, and so nothing that draws a random number.

A recording has a fixed number of rows, as all private passes on a GPU have (`shape.py`); what has another is computed
afresh. Every recording is checked first: until parameters have changed a few times, its batches are computed both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol, Unpack

import torch
from torch import Tensor

from equidp.errors import EquidpError, first_line
from equidp.gradients.bookkeeping import Asked, BookKeeping
from equidp.gradients.probe import TOLERANCE
from equidp.system.threads import GLOBAL_RANDOM

TRIALS = 3
"""States of the parameters at which a recording's batches are computed both ways.

It counts states and not batches: batches at the same parameters do not show whether parameters are read anew.
"""

WARM_UP = 3
"""Passes before the recorded one, in which libraries choose their kernels and get their room."""

REMEDY = "leave training.cuda_graphs out."


class Recorder(Protocol):
    """Records the passes of one recording, in the order in which they will be replayed.

    Each is done before the next one is recorded, which may read what it leaves.
    """

    def record(self, work: Callable[[], Tensor], generators: Sequence[torch.Generator] = ()) -> Callable[[], Tensor]:
        """`work` again with every call, on the current content of the tensors that it reads; overwrites its result.

        Args:
            generators: what it draws from besides torch's own; every call draws on.
        """


@lru_cache(maxsize=64)
def _aside(device: int) -> torch.cuda.Stream:
    """The stream that passes are tried on: cuBLAS keeps a workspace for each stream, of 32 MiB, as long as we live."""
    return torch.cuda.Stream(device)


class CudaGraphs:
    """Recorder on a CUDA device; the graphs share their memory.

    Args:
        device: where the model is; None for the current one.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensor], generators: Sequence[torch.Generator] = ()) -> Callable[[], Tensor]:
        """A graph of `work`."""
        # of a process's threads one records at a time, and none seeds the generators, which a capture registers
        with GLOBAL_RANDOM, torch.cuda.device(self._device):
            aside = _aside(torch.cuda.current_device())
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(WARM_UP):
                    work()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            for generator in generators:
                graph.register_generator_state(generator)
            # thread_local: what trains in another thread may go on allocating
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = work()
            # so far nothing is computed: the next warm-up would look up, by ids that nobody wrote, rows that are not
            # there
            graph.replay()

        def again() -> Tensor:
            graph.replay()
            return result

        return again


class Recording:
    """Norms and weighted sums of batches that have as many rows as a given one."""

    def __init__(self, passes: BookKeeping, recorder: Recorder, features: Tensor, labels: Tensor) -> None:
        self.rows, self._states = len(features), 0
        self._seen: list[Tensor] = []  # the parameters of the last state, while on trial
        self._features, self._labels = torch.zeros_like(features), torch.zeros_like(labels)
        self._weights = torch.zeros(self.rows, device=features.device)
        self._passes = passes.twin()  # the recorded sum reads what these keep
        self._norms = recorder.record(lambda: self._passes.norms(self._features, self._labels))
        self._sum = recorder.record(lambda: self._passes.weighted_sum(self._weights))

    @property
    def on_trial(self) -> bool:
        """Whether it has yet to be trusted."""
        return self._states <= TRIALS

    @property
    def outputs(self) -> Tensor | None:
        """The model's outputs of the last batch, where they are kept."""
        return self._passes.outputs_kept

    def norms(self, features: Tensor, labels: Tensor) -> Tensor:
        """`[b]`, as of the passes."""
        if self.on_trial:
            self._count_states()
        self._features.copy_(features)
        self._labels.copy_(labels)
        return self._norms().clone()

    def _count_states(self) -> None:
        now = self._passes.parameters
        if not self._seen or not all(torch.equal(p, seen) for p, seen in zip(now, self._seen, strict=True)):
            self._states += 1
            self._seen = [p.detach().clone() for p in now] if self.on_trial else []

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """`[d]`, of the last batch, as of the passes."""
        self._weights.copy_(weights)
        return self._sum().clone()


class Recordings:
    """Passes that replay what they have recorded, where a batch fits, and compute the others afresh."""

    def __init__(self, passes: BookKeeping, new_recorder: Callable[[], Recorder]) -> None:
        self._passes, self._new_recorder = passes, new_recorder
        self._made: Recording | None = None
        self._last = torch.zeros(0)
        self._replayed = False  # the norms that were asked for last

    def norms(self, features: Tensor, labels: Tensor, **asked: Unpack[Asked]) -> Tensor:
        """As of the passes; units, other iterates, several views and other numbers of rows are computed afresh.

        Raises:
            EquidpError: for passes that cannot be recorded, or come to something else when replayed.
        """
        self._passes.clear()
        plain = asked.get("owners") is None and asked.get("iterates") is None and asked.get("views", 1) == 1
        self._replayed = plain and len(features) > 0
        recording = self._recording(features, labels) if self._replayed else None
        if recording is None or recording.rows != len(features):
            self._replayed = False
            return self._passes.norms(features, labels, **asked)
        found = recording.norms(features, labels)
        if recording.on_trial:
            expected = self._passes.norms(features, labels)  # their own sum needs what they keep, too
            allowed = self._tolerance()
            _compare(torch.isclose(found, expected, rtol=allowed, atol=1e-6 * allowed, equal_nan=True).all())
        self._passes.outputs_kept = recording.outputs
        self._last = found
        return found

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """As of the passes."""
        if not self._replayed or self._made is None:
            return self._passes.weighted_sum(weights)
        found = self._made.weighted_sum(weights)
        if self._made.on_trial:
            expected = self._passes.weighted_sum(weights)
            size = expected.norm() + 0.1 * torch.where(weights > 0, weights * self._last, 0.0).sum()  # sums may cancel
            _compare((found - expected).norm() <= self._tolerance() * size)
        return found

    def _tolerance(self) -> float:
        return TOLERANCE[self._passes.precision]

    def _recording(self, features: Tensor, labels: Tensor) -> Recording:
        if self._made is None:
            try:
                self._made = Recording(self._passes, self._new_recorder(), features, labels)
            except RuntimeError as error:
                raise EquidpError(
                    f"The model's passes cannot be recorded as CUDA graphs ({first_line(error)}): {REMEDY}"
                ) from error
        return self._made


def _compare(equal: Tensor) -> None:
    if not equal:
        raise EquidpError(
            "The model's passes, replayed as CUDA graphs, give other gradients than computed afresh (so it is with a "
            f"model that draws random numbers, such as dropout): {REMEDY}"
        )
